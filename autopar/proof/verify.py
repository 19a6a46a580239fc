"""`verify`: every rank in this process against the eager model on one device.

The emitted files run as they are, with float dtypes replaced by the verification dtype (float64 by default), and so
does the eager model, casts inside it included: what is left of a difference is a mistake, not rounding. Compared are
the loss of each step, every gradient of the first step, and every parameter and buffer after the last one.

Dropout draws from positions, not from torch's generator, so with dropout active the reference is the same program on
one rank; that one is compared with the eager model with dropout switched off on both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.trees import flatten, rebuild
from autopar.codegen import in_process as running
from autopar.codegen.pipeline import pipeline_source
from autopar.codegen.stage import stage_source
from autopar.errors import InputError
from autopar.ir.lowered import Function, Line, LoweredProgram, LoweredStage
from autopar.ir.mesh import Mesh
from autopar.ir.program import RANDOM_OPS, op_name
from autopar.passes.lower import lower
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.shard.plans import spmd_plan
from autopar.passes.shard.problem import Problem
from autopar.program import ParallelProgram, in_process

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """errors: relative error per tensor ("loss/0", "grad/…", "param/…", "buffer/…", "output/…")."""

    errors: dict[str, float]
    tolerance: float

    @property
    def max_error(self) -> float:
        """The largest relative error (NaN where anything is NaN)."""
        worst = 0.0
        for e in self.errors.values():
            if e != e:
                return float("nan")
            worst = max(worst, e)
        return worst

    @property
    def ok(self) -> bool:
        return bool(self.errors) and self.max_error <= self.tolerance


def verify(
    program: ParallelProgram, model: nn.Module, batch: Any, *, steps: int = 2, dtype: torch.dtype = torch.float64
) -> Verification:
    """Compare `program` on all its ranks with `model` run eagerly over `steps` steps on one global batch."""
    if not isinstance(model, nn.Module):
        raise InputError(f"verify needs the eager model, an nn.Module, not {type(model).__name__}")
    given = program.leaves(batch)
    batch = rebuild(program.exported.input_structure, given)
    leaves = [_cast(t, dtype) for t in given]
    weights = {k: _cast(v, dtype) for k, v in _weights(program, model).items()}
    if not _random(program):
        ours = _ours(program, program.lowered, leaves, weights, steps, dtype)
        return Verification(compare(ours, _eager(program, model, batch, steps, dtype)), TOLERANCE[dtype])
    one = one_rank(program)
    ours = _ours(program, program.lowered, leaves, weights, steps, dtype)
    errors = compare(ours, _ours(program, one, leaves, weights, steps, dtype))
    if _only_dropout(program):
        still = _ours(program, without_dropout(one), leaves, weights, steps, dtype)
        with _no_dropout(model) as quiet:
            against = compare(still, _eager(program, quiet, batch, steps, dtype))
        errors |= {f"without dropout/{k}": v for k, v in against.items()}
    return Verification(errors, TOLERANCE[dtype])


def compare(ours: Values, reference: Values) -> dict[str, float]:
    """Relative error per tensor; tensors that are zero at the scale of the largest of their kind use that scale."""
    scales: dict[str, float] = {}
    for name, value in reference.items():
        kind = name.split("/")[0]
        scales[kind] = max(scales.get(kind, 0.0), _largest(value))
    errors = {}
    for name, expected in reference.items():
        if name not in ours:
            errors[name] = float("inf")
            continue
        got = ours[name]
        if got.shape != expected.shape:
            errors[name] = float("inf")
            continue
        scale = _largest(expected)
        whole = scales[name.split("/")[0]]
        scale = whole if scale < 1e-10 * whole else scale
        difference = _difference(got, expected)
        errors[name] = difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))
    for name in ours.keys() - reference.keys():
        errors[name] = float("inf")
    return errors


def _largest(x: torch.Tensor) -> float:
    x = x.detach()
    if not x.numel():
        return 0.0
    finite = x.double().abs() if not x.is_complex() else x.abs().double()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    a, b = (t.detach().double() if not t.is_complex() else t.detach() for t in (a, b))
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs()
    return float(torch.where(same, torch.zeros_like(gap), gap).max())


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.detach().to(dtype) if x.dtype in FLOATS else x.detach()


def _weights(program: ParallelProgram, model: nn.Module) -> Values:
    own = program.weights()
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {name: named[name].detach() if name in named else value for name, value in own.items()}


def _random(program: ParallelProgram) -> bool:
    return any(t.random for t in program.ir.templates.values())


def _only_dropout(program: ParallelProgram) -> bool:
    names = {op_name(n.target) for t in program.ir.templates.values() for n in t.ops}
    return not names & {"autopar.random_uniform", "autopar.random_normal"}


# --- our side -----------------------------------------------------------------------------------------------------------


def one_rank(program: ParallelProgram) -> LoweredProgram:
    """The captured program on one rank."""
    mesh = Mesh.of(dp=1)
    problem = Problem(program.ir, Pricer(program.cluster, mesh), program.rules, program.setting)
    plan = spmd_plan(problem, [0] * len(problem.graph.keys), program.cluster, program.options, "one rank")
    plan = replace(plan, microbatches=program.plan.microbatches)
    return lower(program.ir, plan, Pricers(program.cluster), program.rules)


def without_dropout(lowered: LoweredProgram) -> LoweredProgram:
    """The same lines with every dropout probability 0."""

    def quiet(line: Line) -> Line:
        if line.op not in RANDOM_OPS or "p" not in line.kwargs:
            return line
        return replace(line, kwargs={**line.kwargs, "p": 0.0})

    def silence(f: Function | None) -> Any:
        return replace(f, lines=tuple(map(quiet, f.lines))) if f is not None else None

    def still(stage: LoweredStage) -> LoweredStage:
        templates = {
            name: replace(t, forward=silence(t.forward), backward=silence(t.backward), weights=silence(t.weights))
            for name, t in stage.templates.items()
        }
        return replace(stage, templates=templates)

    return replace(lowered, stages=tuple(map(still, lowered.stages)))


def _ours(
    program: ParallelProgram,
    lowered: LoweredProgram,
    leaves: Sequence[torch.Tensor],
    weights: Values,
    steps: int,
    dtype: torch.dtype,
) -> Values:
    replaced = dict.fromkeys(FLOATS, dtype)
    sources = [stage_source(stage, "verification", replaced) for stage in lowered.stages]
    made = in_process(program, lowered, sources, pipeline_source(lowered, program.ir, "verification", replaced))

    def body(session: Any) -> Values:
        found: Values = {}
        if not program.training:
            for i, out in enumerate(session.forward(list(leaves))):
                found[f"output/{i}"] = out
            return found
        for step in range(steps):
            found[f"loss/{step}"] = session.train_step(list(leaves)).clone()
            if step == 0:
                found |= {f"grad/{n}": g for n, g in session.full_grads().items()}
        found |= {f"param/{n}": session.gather_full(n) for n in program.ir.parameters}
        found |= {f"buffer/{n}": session.gather_full(n) for n in program.ir.buffers if program.ir.buffers[n].persistent}
        return found

    every = running.run_ranks(
        made.pipeline,
        made.modules,
        weights,
        program.update if program.training else None,
        program.options.seed,
        body,
        dtype=dtype,
    )
    worst = every[0]
    for other in every[1:]:
        for name, value in other.items():
            if _difference(value, worst[name]) > 1e-6 * max(_largest(worst[name]), 1e-30):
                worst = {**worst, name: torch.full_like(value, float("nan")) if value.is_floating_point() else value}
    return worst


# --- the eager side -------------------------------------------------------------------------------------------------------


class _Promote(TorchDispatchMode):
    """Every float dtype named in an op becomes `dtype`: a cast inside the model must not round."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in FLOATS:
            kwargs["dtype"] = self.dtype
        written = {i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None}
        return func(*(self._promoted(a) if i not in written else a for i, a in enumerate(args)), **kwargs)

    def _promoted(self, a: Any) -> Any:
        """Also tensors that the model does not own, such as class weights inside a loss function."""
        if isinstance(a, torch.dtype) and a in FLOATS:
            return self.dtype
        return _cast(a, self.dtype) if isinstance(a, torch.Tensor) and a.dtype in FLOATS else a


class _KeepEps(TorchFunctionMode):
    """`rms_norm` without eps takes the eps of its dtype; the promoted model keeps that of the original dtype."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.rms_norm and (args[3] if len(args) > 3 else kwargs.get("eps")) is None:
            args = args[:3]
            kwargs["eps"] = self.eps
        return func(*args, **kwargs)


def _eps(model: nn.Module) -> float:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.finfo(dtype).eps


def _eager(program: ParallelProgram, model: nn.Module, batch: Any, steps: int, dtype: torch.dtype) -> Values:
    reference = _copy(model).to(dtype)
    reference.train(model.training)
    loss_fn = program.loss_fn
    loss_fn = _copy(loss_fn).to(dtype) if isinstance(loss_fn, nn.Module) else loss_fn
    inputs = _map(batch, lambda t: _cast(t, dtype))
    from autopar.proof.reference import EagerUpdate, loss_of, run_model

    if not program.training:
        with _promoted(dtype, model), torch.no_grad():
            return {f"output/{i}": t for i, t in enumerate(flatten(run_model(reference, inputs))[0])}
    found: Values = {}
    named = dict(reference.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    update = EagerUpdate(program.update, list(trained.items()))
    parts = program.plan.microbatches if program.ir.loss_kind == "coupled" else 1
    for step in range(steps):
        for p in trained.values():
            p.grad = None
        with _promoted(dtype, model):
            total = torch.zeros(())
            for piece in _pieces(inputs, parts, program):
                loss = loss_of(reference, piece, loss_fn, program.targets) / parts
                loss.backward()
                total = total + loss.detach()
        found[f"loss/{step}"] = total.clone()
        update.clip()
        if step == 0:
            found |= {f"grad/{n}": p.grad.clone() for n, p in named.items() if p.grad is not None}
        update.step(total)
    found |= {f"param/{n}": p.detach() for n, p in named.items()}
    persistent = reference.state_dict().keys()
    found |= {f"buffer/{n}": b for n, b in reference.named_buffers() if n in persistent}
    return found


@contextmanager
def _promoted(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """The model computes in `dtype` whatever it says. Updates stay outside: the optimizer's own dtypes are part of it."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Promote(dtype), _KeepEps(_eps(model)):
            yield
    finally:
        torch.set_default_dtype(previous)


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy; tensors that a module computed from its parameters (old weight_norm) are copied as values."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def _pieces(inputs: Any, parts: int, program: ParallelProgram) -> Iterator[Any]:
    for k in range(parts):
        if parts == 1:
            yield inputs
        else:
            sizes = iter(zip(program.ir.inputs, program.ir.batch_dims, strict=True))

            def cut(t: torch.Tensor, k: int = k, sizes: Any = sizes) -> torch.Tensor:
                (_, type_), dim = next(sizes)
                return t if dim is None or tuple(t.shape) == type_.shape else t.chunk(parts, dim)[k]

            yield _map(inputs, cut)


def _map(value: Any, f: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, dict):
        return {k: _map(v, f) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(v, f) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(v, f) for v in value)
    return value


class _Quiet(TorchFunctionMode):
    """Dropout does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and func is not F.scaled_dot_product_attention:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs = {k: (0.0 if k == "dropout_p" else v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def _no_dropout(model: nn.Module) -> Iterator[nn.Module]:
    quiet = _copy(model)
    quiet.train(model.training)
    for module in quiet.modules():
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    with _Quiet():
        yield quiet
