"""Acts of `forward` that a graph cannot hold, stopped at the user's line while it is traced.

A torch function mode sees every call of torch that user code makes. Reading `.data` becomes `detach` (export would bake the
value in, or crash where it is written to), inference mode becomes `no_grad`; gradients, hooks and generators inside forward
are named errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import _checkpoint_hook, _recomputation_hook

from autopar.capture.explain import is_user_file, refusal
from autopar.capture.while_traced import selected_back, selected_sums  # noqa: F401  for the functions that they register
from autopar.capture.while_traced.autocast import Regions
from autopar.capture.while_traced.constants import UNKNOWN, Constants
from autopar.capture.while_traced.control_flow import WRITTEN_OUT
from autopar.capture.while_traced.data_numbers import TEXT, Ask
from autopar.capture.while_traced.decisions import Condition, asked_at
from autopar.capture.while_traced.random_branches import Drawn
from autopar.capture.while_traced.rewritten import cumulative, rewritten
from autopar.capture.while_traced.row_masks import RowMasks, is_noted, note
from autopar.capture.while_traced.selected import Selected
from autopar.capture.while_traced.selections import selection
from autopar.errors import CaptureError, DataError

Tensor = torch.Tensor
_FIELDS: Any = torch.Tensor
"""The class, for the getters and setters of its fields, by which torch calls them."""
_HOOK = "hooks on gradients are not part of a program; write what it does as a torch.autograd.Function"
_GRADIENT = (
    "a program has no gradients inside forward; write the derivative as torch ops, or as a torch.autograd.Function with its "
    "own backward"
)
_REFUSED: dict[Any, tuple[str, str]] = {
    Tensor.register_hook: ("registers a hook on the gradient of a tensor", _HOOK),
    Tensor.register_post_accumulate_grad_hook: ("registers a hook on the gradient of a parameter", _HOOK),
    _FIELDS.grad_fn.__get__: ("reads grad_fn", _HOOK),
    Tensor.backward: ("calls backward", _GRADIENT),
    torch.autograd.backward: ("calls torch.autograd.backward", _GRADIENT),
    torch.autograd.grad: ("calls torch.autograd.grad", _GRADIENT),
    _FIELDS.grad.__get__: (
        "reads .grad",
        "gradients belong to the step, not to forward; clip or scale them by options of compile",
    ),
    _FIELDS.grad.__set__: (
        "writes .grad",
        "gradients belong to the step, not to forward; clip or scale them by options of compile",
    ),
    _FIELDS.data.__set__: ("assigns .data", "only the optimizer may change parameters; compute a new tensor instead"),
    Tensor.detach_: ("detaches a tensor in place (detach_)", "use x = x.detach()"),
    torch._VF._pack_padded_sequence: (
        "packs sequences (pack_padded_sequence), of which the data say how many rows there are",
        "run the layer on the padded batch: in one direction it gives the same values up to the end of every sequence. Mask what "
        "is behind, and take the last states with gather at lengths - 1",
    ),
}
"""Function → what it is that forward does, and what to do instead."""
_NO_MARK = (_checkpoint_hook, _recomputation_hook, save_on_cpu)
"""Hooks on saved tensors that give back what they were given."""
_SEEDS = ("manual_seed", "seed", "set_rng_state")


def memory_of(model: nn.Module) -> dict[int, str]:
    """{the memory of a parameter: its name}."""
    return {_memory(p): name for name, p in model.named_parameters()}


def watched(
    model: nn.Module, owned: dict[int, str] | None, inputs: Mapping[str, Tensor], ask: Ask | None = None
) -> _Watch:
    """A context in which forward stops at what a graph cannot hold. Raises CaptureError inside.

    model: with fake parameters. owned: `memory_of` the model with its own ones; None where it runs with
    these, on values. inputs: the batch, by name. ask: for numbers that are to be the example's.
    """
    return _Watch(model, owned, {_memory(tensor): name for name, tensor in inputs.items()}, ask)


class _Watch(TorchFunctionMode):
    """Sees calls of torch. detached: the memory of tensors that carry a gradient, or are parameters, and were detached.
    apart: what detaching tensors without gradient gave.
    in_inference: errors that hold where the program turns out to be for inference. held: conditions without which eager
    stops with an error of its own."""

    def __init__(self, model: nn.Module, owned: dict[int, str] | None, inputs: dict[int, str], ask: Ask | None) -> None:
        """inputs: the memory of each, and its name."""
        super().__init__()
        self.ask = ask
        self.inputs = inputs
        self.model = model
        self.owned = owned
        self.detached: set[int] = set()
        self.apart: list[Tensor] = []
        self.in_inference: list[CaptureError] = []
        self.held: list[Condition] = []
        self.regions = Regions()
        self.drawn = Drawn()
        self.constants = Constants()
        self.masks = RowMasks(self.hold)

    def __enter__(self) -> Any:
        self.patches = _patched(self.in_inference)
        self.patches.__enter__()
        self.regions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.regions.__exit__()
        self.patches.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func == _FIELDS.data.__set__
            and any(b is args[0] for b in self.model.buffers())
            and args[0].shape == args[1].shape
        ):
            return args[0].detach().copy_(args[1].detach())
        refused = _REFUSED.get(func)
        if refused is not None and not self._harmless(func, args[0] if args else None):
            raise refusal(*refused)
        if kwargs.get("generator") is not None:
            raise refusal(
                "draws random numbers from a torch.Generator",
                "leave generator= out: a program draws by position in the tensor, from the seed of the run",
            )
        if func in (F.embedding, F.embedding_bag) and _max_norm(args, kwargs) is not None:
            self._check_renormalized(kwargs.get("weight", args[1] if len(args) > 1 else None))
        if func == _FIELDS.data.__get__:
            func = Tensor.detach
        if func in (Tensor.detach, torch.detach) and (args[0].requires_grad or isinstance(args[0], nn.Parameter)):
            self.detached.add(_memory(args[0]))
        if func in (Tensor.requires_grad_, _FIELDS.requires_grad.__set__):
            self._check_frozen(args, kwargs)
        elif self.owned is not None and _writes(func, kwargs):
            target = kwargs["out"] if kwargs.get("out") is not None else next(iter((*args, *kwargs.values())), None)
            self._check_written(target)
            self._check_apart(target, (*args[1:], *kwargs.values()))
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if self.owned is not None and isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                    self._check_hidden(tensor, self.owned)
        if Selected in types:
            func, args, kwargs = rewritten(func, args, kwargs, self.hold)
            return func(*args, **kwargs)
        if self.owned is not None:
            func, args = self.constants.at_places(func, args)
        if (rows := selection(func, args, kwargs, self.masks)) is not None:
            return rows
        if selected_back.set_rows(func, args, self.masks):
            return None
        if (truth := self.drawn.truth(func, args)) is not None:
            return truth
        if (value := self.constants.answer(func, args)) is not UNKNOWN:
            return value
        if self.owned is not None or self.ask is not None:
            kwargs = self.constants.with_output_size(func, args, kwargs, self.ask)
        writes = _writes(func, kwargs)
        func, args, kwargs = rewritten(func, args, kwargs, self.hold)
        result = func(*args, **kwargs)
        self.drawn.see(func, args, result)
        note(func, args, kwargs, result)
        self.constants.see(func, args, kwargs, result, writes)
        if func in (Tensor.detach, torch.detach, _FIELDS.data.__get__) and not args[0].requires_grad:
            self.apart.append(result)
        return result if writes else self.regions.detached(result)

    def noted(self) -> tuple[int, ...]:
        """So much was noted of calls until now."""
        return len(self.detached), len(self.in_inference), len(self.held), *self.masks.noted()

    def follows(self, tensor: Tensor) -> bool:
        """Whether more is known of a tensor than its type: it is a constant, drawn, or says which rows are selected."""
        return self.constants.follows(tensor) or self.drawn.follows(tensor) or is_noted(tensor)

    def hold(self, condition: Tensor, value: bool) -> None:
        self.held.append(Condition(condition, value, asked_at()))

    def _check_hidden(self, tensor: Tensor, owned: dict[int, str]) -> None:
        if tensor.requires_grad and _memory(tensor) not in owned:
            raise refusal(
                "uses a tensor that requires a gradient and is no parameter of the model",
                "register it (self.w = nn.Parameter(w)), or detach it if it is a constant",
            )
        if name := owned.get(_memory(tensor)):
            raise refusal(
                f"uses the parameter {name} by another way than its module (a list, a closure, .data of it), where its gradient "
                "and its changes would be lost",
                f"take it from the module while forward runs, or register it: self.{name.rsplit('.', 1)[-1]} = module.{name}",
            )

    def _harmless(self, func: Any, tensor: object) -> bool:
        """A gradient that no parameter has yet, and what torch's modules look at when a parameter is set."""
        if func == _FIELDS.grad.__get__:
            return self._name(tensor) is None
        return func == _FIELDS.grad_fn.__get__ and "/torch/nn/" in sys._getframe(2).f_code.co_filename

    def _check_frozen(self, args: Any, kwargs: Any) -> None:
        wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        if bool(wanted) != args[0].requires_grad and (name := self._name(args[0])) is not None:
            raise refusal(
                f"changes requires_grad of the parameter {name}",
                "freeze or unfreeze parameters before compile, and compile again",
            )

    def _check_written(self, target: Any) -> None:
        for tensor in target if isinstance(target, (list, tuple)) else (target,):
            if not isinstance(tensor, Tensor):
                continue
            if (name := self.inputs.get(_memory(tensor))) is not None:
                raise refusal(
                    f"writes to its input {name or 0} in place",
                    "write to a copy (x = x.clone(), or x = x + y for x += y)",
                )
            behind = _memory(tensor) in self.detached and not tensor.requires_grad
            if behind or _hides_gradient(tensor):
                parameter = next((n for n, p in self.model.named_parameters() if _memory(p) == _memory(tensor)), None)
                raise refusal(
                    f"writes to {f'the parameter {parameter}' if parameter else 'a tensor that carries a gradient'} behind "
                    "autograd's back (through .data or detach, or under no_grad)",
                    "only the optimizer may change parameters; compute a new tensor instead (w = self.weight.clamp(…))"
                    if parameter
                    else "compute a new tensor instead",
                )
            while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor = torch._C._functorch.get_unwrapped(tensor)
            if not isinstance(tensor, FakeTensor):
                raise refusal(
                    "writes to a plain tensor that it keeps from step to step",
                    "register it as a buffer of the module (register_buffer)",
                )

    def _check_apart(self, target: Any, values: Sequence[Any]) -> None:
        """In eager a detached tensor that a gradient is written to carries it, and the one that it was detached of does not; in
        a graph, where the former is computed of the latter, neither would."""
        if not isinstance(target, Tensor) or not torch.is_grad_enabled():
            return
        with torch._C.DisableTorchFunction():
            whole = target._base if target._base is not None else target
            given = (value for value in values if isinstance(value, Tensor) and value is not target)
            written = any(value.requires_grad for value in given)
        if written and any(one is whole for one in self.apart):
            raise refusal(
                "writes what carries a gradient to a tensor that was detached before (by .data or detach)",
                "it has no gradient that detach could cut: leave detach out, or clone it",
            )

    def _check_renormalized(self, weight: object) -> None:
        if (name := self._name(weight)) is not None:
            raise refusal(
                f"writes to the parameter {name} in place, as max_norm of an embedding asks for",
                "leave max_norm out, and look up in rows that are scaled: scale = (max_norm / (w.norm(dim=1, keepdim=True) + "
                "1e-7)).clamp(max=1).detach(); F.embedding(ids, w * scale)",
            )

    def _name(self, tensor: object) -> str | None:
        """The parameter that a tensor is."""
        return next((name for name, p in self.model.named_parameters() if p is tensor), None)


def _max_norm(args: Any, kwargs: Any) -> float | None:
    """The `max_norm` argument of an embedding's or an embedding bag's look-up."""
    return args[3] if len(args) > 3 else kwargs.get("max_norm")


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor lies in; 0 for one without memory of its own (sparse ones, those inside vmap)."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return tensor.untyped_storage()._cdata


def _hides_gradient(tensor: Tensor) -> bool:
    """Whether writing to the tensor now changes a value that carries a gradient, unseen by autograd."""
    with torch._C.DisableTorchFunction():
        base = tensor._base if tensor._base is not None else tensor
        return base.requires_grad and not base.is_leaf and not (torch.is_grad_enabled() and tensor.requires_grad)


def _writes(func: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING or kwargs.get("out") is not None


_WRITING = frozenset(
    f"__{op}__"
    for op in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
)


def _padded(forward: Callable[..., Any], in_inference: list[CaptureError]) -> Callable[..., Any]:
    """`TransformerEncoder.forward` for what runs with gradients. Without them eager sets padded positions to 0 if the mask of
    the batch is aligned to the left, and computes them if it is not: the error for a program that is for inference."""

    def run(
        self: nn.TransformerEncoder, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, **kwargs: Any
    ) -> Any:
        trained = torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in self.parameters()))
        nested = self.use_nested_tensor and not self.training and torch.backends.mha.get_fastpath_enabled()
        if nested and src_key_padding_mask is not None and mask is None:
            error = refusal(
                "runs a TransformerEncoder in eval mode with src_key_padding_mask, where eager's nested tensors make padded "
                "positions 0 or not as the data fall",
                "build it with enable_nested_tensor=False (positions that are not padded keep their values)",
            )
            if not trained:
                raise error
            in_inference.append(error)
        return forward(self, src, mask, src_key_padding_mask, **kwargs)

    return run


def _cast_already(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`Module.to` of a module that is as it is asked to be; devices are those of the program."""
    dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
    tensors = (*self.parameters(), *self.buffers())
    if dtype is not None and any(t.is_floating_point() and t.dtype != dtype for t in tensors):
        raise refusal(
            f"casts the parameters of a module to {dtype}",
            "cast the module before compile, or in forward what is computed: F.linear(x, self.weight.to(dtype))",
        )
    return self


def _without_text(text: Callable[..., str]) -> Callable[..., str]:
    """The text of a number of the data, which the model may branch on and a trace does not know."""

    def run(*args: Any) -> str:
        if is_user_file(sys._getframe(1).f_code.co_filename):
            raise refusal(*TEXT, DataError)
        return text(*args)

    return run


def _enter_no_grad(self: Any) -> None:
    """Export does not see inference mode: it is traced as the `no_grad` that it is for values and gradients."""
    self.as_no_grad = torch.no_grad() if self.mode else nullcontext()
    self.as_no_grad.__enter__()


def _exit_no_grad(self: Any, *error: Any) -> None:
    self.as_no_grad.__exit__(*error)


@contextmanager
def _patched(in_inference: list[CaptureError]) -> Iterator[None]:
    """Within the context torch's functions that no torch function mode sees are refused, or replaced by what export sees."""

    def seed(*args: Any, **kwargs: Any) -> Any:
        raise refusal(
            "sets the state of torch's generator",
            "seed once, before training: a program draws by position in the tensor, from the seed of the run",
        )

    enter: Callable[..., Any] = saved_tensors_hooks.__enter__

    def enter_unmarked(self: saved_tensors_hooks) -> Any:
        if type(self) not in _NO_MARK:
            raise refusal(
                "enters hooks on saved tensors (saved_tensors_hooks)",
                "what is saved for backward, and in which form, is the planner's choice: see Options.recompute and offload",
            )
        return enter(self)

    patches: list[Any] = [mock.patch.object(home, name, seed) for home in (torch, torch.random) for name in _SEEDS]
    patches.append(mock.patch.object(saved_tensors_hooks, "__enter__", enter_unmarked))
    patches.append(mock.patch.object(nn.Module, "to", _cast_already))
    patches.append(mock.patch.object(torch.inference_mode, "__enter__", _enter_no_grad))
    patches.append(mock.patch.object(torch.inference_mode, "__exit__", _exit_no_grad))
    patches.append(
        mock.patch.object(nn.TransformerEncoder, "forward", _padded(nn.TransformerEncoder.forward, in_inference))
    )
    patches.append(mock.patch.object(_BatchNorm, "forward", cumulative(_BatchNorm.forward)))
    patches += [mock.patch.object(kind, "__call__", call) for kind, call in WRITTEN_OUT.items()]
    patches += [
        mock.patch.object(kind, name, _without_text(getattr(kind, name)))
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)
        for name in ("__str__", "__repr__", "__format__")
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
