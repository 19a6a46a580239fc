"""`autopar.compile`: model, cluster and example inputs in, a parallel program out."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture import capture_program
from autopar.capture.trees import flatten
from autopar.cluster import ClusterSpec
from autopar.compiled import ParallelProgram, Prediction, emit_program
from autopar.errors import ConstraintError, InfeasibleError, InputError, PlanError
from autopar.inputs import check_batch_dims, check_options, check_plan, most_targets
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.options import Options
from autopar.passes.account import account
from autopar.passes.costs import Pricer
from autopar.passes.lower import lower
from autopar.passes.shard.planner import Candidate, candidate_meshes, solve_mesh
from autopar.passes.shard.problem import Setting
from autopar.passes.shard.rules import RuleBook
from autopar.passes.shard.solve import Shortage
from autopar.plan import Plan
from autopar.report import size_text

OptimizerFactory = Callable[..., torch.optim.Optimizer]


def compile(
    model: nn.Module,
    cluster: ClusterSpec | str | Path,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: OptimizerFactory | None = None,
    options: Options | None = None,
    plan: Plan | str | Path | None = None,
) -> ParallelProgram:
    """Compile a single-device model into one program per rank.

    model: nn.Module, real or on the meta device. cluster: a ClusterSpec, a preset's name or a file. example_inputs:
    tuple of args or dict of kwargs for the global batch (the loss's targets last). loss_fn(output, *targets): optional;
    without it a model that returns a scalar, or an object with `.loss`, is trained on that, any other is compiled for
    inference. optimizer: factory such as `functools.partial(torch.optim.AdamW, lr=1e-3)`. plan: replay this plan.

    Raises InputError, CaptureError, ClusterError, ConstraintError, PlanError, InfeasibleError.
    """
    options = Options() if options is None else options
    check_options(options, plan)
    given = None if plan is None else plan if isinstance(plan, Plan) else Plan.load(plan)
    if given is not None and options.microbatches == 1:
        options = replace(options, microbatches=given.microbatches)
    spec = as_cluster(cluster)
    _check_model(model, loss_fn, optimizer)
    inputs, targets = split_example(model, example_inputs, loss_fn)
    candidate_meshes(spec, options)
    _check_batch(inputs, spec, options)
    started = time.perf_counter()
    program, exported = capture_program(model, _microbatch(inputs, options), loss_fn, targets, options.batch_dims)
    captured = time.perf_counter()
    rules = RuleBook()
    setting = Setting(options.microbatches, *optimizer_state(optimizer, program))
    if given is not None:
        candidates = [_replayed(given, program, spec, setting, rules, options)]
        shortages: list[Any] = []
        lowering_s = 0.0
    else:
        candidates, shortages, lowering_s = search_fitting(program, spec, rules, setting, options)
    planned = time.perf_counter()
    if not candidates:
        raise InfeasibleError(_infeasible(program, spec, shortages, setting, options))
    result = emit_program(
        model, spec, program, exported, candidates, rules, setting, options, optimizer, inputs, loss_fn, targets
    )
    result.timings["capture_s"] = captured - started
    result.timings["plan_s"] = planned - captured - lowering_s
    result.timings["lower_s"] += lowering_s
    return result


def search_fitting(
    program: Program, cluster: ClusterSpec, rules: RuleBook, setting: Setting, options: Options
) -> tuple[list[Candidate], list[tuple[str, Mesh, Shortage]], float]:
    """`search`, until the peak of the lowered program fits too; also the seconds that lowering took in between.

    The solver counts what rests and what backward waits for; what lives for a moment is known after lowering. Where
    that breaks the limit, the solver gets a budget smaller by as much.
    """
    limit = memory_limit(cluster, options)
    budget, lowering_s = limit, 0.0
    for _ in range(4):
        candidates, shortages = search(program, cluster, rules, setting, options, budget)
        if not candidates:
            return candidates, shortages, lowering_s
        best = candidates[0]
        started = time.perf_counter()
        stages = lower(program, best.plan, best.pricer, rules)
        peak = account(stages[0], best.pricer, program, setting).peak_bytes
        lowering_s += time.perf_counter() - started
        if peak <= limit:
            return [replace(best, lowered=stages), *candidates[1:]], shortages, lowering_s
        budget -= 1.02 * (peak - limit)
        if budget <= 0:
            break
    return [], [(best.plan.origin, best.pricer.mesh, Shortage(peak, best.solution.choice)), *shortages], lowering_s


def search(
    program: Program, cluster: ClusterSpec, rules: RuleBook, setting: Setting, options: Options, budget: float
) -> tuple[list[Candidate], list[tuple[str, Mesh, Shortage]]]:
    """Plans that fit, best first, and what did not fit: the solver on every candidate mesh, and the baselines."""
    found: list[Candidate] = []
    short: list[tuple[str, Mesh, Shortage]] = []
    meshes = candidate_meshes(cluster, options)
    for mesh in meshes:
        pricer = Pricer(cluster, mesh)
        strategies = ["auto"] if options.strategy == "auto" else [options.strategy]
        if options.strategy == "auto":
            strategies += ["dp", "zero3"] if len(mesh.axes) == 1 else ["megatron"] if len(mesh.axes) == 2 else []
        for strategy in strategies:
            try:
                result = solve_mesh(program, cluster, pricer, rules, setting, options, strategy, budget)
            except (InfeasibleError, ConstraintError):
                if strategy == options.strategy:
                    raise
                continue
            if isinstance(result, Shortage):
                short.append((strategy, mesh, result))
            else:
                found.append(result)
    found.sort(key=lambda c: (c.solution.cost, c.solution.memory))
    best = [c for c in found if c.plan.origin.startswith("solver")] or found
    others = [c for c in found if c is not best[0]] if best else []
    return ([best[0], *others] if best else []), short


def memory_limit(cluster: ClusterSpec, options: Options) -> float:
    """Bytes a plan may use per rank."""
    if options.memory_bytes is not None:
        return options.memory_bytes
    return min(cluster.device(r).memory_bytes for r in {0, cluster.size - 1}) * options.memory_fraction


def as_cluster(cluster: ClusterSpec | str | Path) -> ClusterSpec:
    """A ClusterSpec from a spec, a file or a preset's name."""
    if isinstance(cluster, ClusterSpec):
        return cluster
    if isinstance(cluster, (str, Path)):
        if Path(cluster).suffix in (".yaml", ".yml", ".json") or Path(cluster).is_file():
            return ClusterSpec.from_file(cluster)
        return ClusterSpec.preset(str(cluster))
    raise InputError(f"cluster must be a ClusterSpec, a preset's name or a file, not {type(cluster).__name__}")


def _check_model(model: Any, loss_fn: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}; wrap a function in a Module")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"loss_fn must be callable (output, *targets) -> scalar, not {type(loss_fn).__name__}")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "optimizer must be a factory, not an optimizer instance: each rank makes its own over its shards; pass "
            f"functools.partial(torch.optim.{type(optimizer).__name__}, lr=…)"
        )
    if optimizer is not None and not callable(optimizer):
        raise InputError(f"optimizer must be a factory params -> torch.optim.Optimizer, not {type(optimizer).__name__}")


def split_example(model: nn.Module, inputs: Any, loss_fn: Any) -> tuple[Any, int]:
    """(inputs, how many trailing entries are targets for loss_fn). Raises InputError when they fit no split."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if not isinstance(inputs, (tuple, dict)):
        raise InputError(f"example_inputs must be a tuple of args or a dict of kwargs, not {type(inputs).__name__}")
    name = type(model).__name__
    signature = inspect.signature(model.forward)
    parameters = list(signature.parameters.values())
    if isinstance(inputs, dict):
        if loss_fn is None:
            targets = 0
        else:
            own = {p.name for p in parameters}
            if any(p.kind is p.VAR_KEYWORD for p in parameters):
                targets = _target_count(loss_fn)
            else:
                extra = [k for k in inputs if k not in own]
                inputs = {**{k: v for k, v in inputs.items() if k in own}, **{k: inputs[k] for k in extra}}
                targets = len(extra)
        kept = list(inputs)[: len(inputs) - targets]
        try:
            signature.bind(**{k: inputs[k] for k in kept})
        except TypeError as error:
            raise InputError(f"example inputs do not match {name}.forward{signature}: {error}") from error
        return inputs, targets
    targets = _target_count(loss_fn) if loss_fn is not None else 0
    options = [targets] if loss_fn is None else range(targets, min(most_targets(loss_fn), len(inputs)) + 1)
    problem: Exception | str = f"the loss takes {targets} targets"
    for count in options:
        try:
            signature.bind(*inputs[: len(inputs) - count])
        except TypeError as error:
            problem = error
        else:
            return inputs, count
    raise InputError(
        f"example inputs do not match {name}.forward{signature}: got {len(inputs)} positional inputs"
        f"{f', {targets} of them for loss_fn' if targets else ''} ({problem})"
    )


def _target_count(loss_fn: Any) -> int:
    """Required positional arguments of the loss after the output."""
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return 1
    required = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return max(len(required) - 1, 0)


def _check_batch(inputs: Any, cluster: ClusterSpec, options: Options) -> None:
    leaves, names, _ = flatten(inputs)
    if not leaves:
        raise InputError("example_inputs hold no tensor")
    check_batch_dims(options.batch_dims, leaves, names)
    dp = int((options.mesh or {}).get("dp", 1))
    if options.strategy in ("dp", "zero1", "zero3") and options.mesh is None:
        dp = cluster.size
    for i, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        dim = _batch_dim(options.batch_dims, i, name)
        if leaf.ndim == 0 or dim is None or i > 0:
            continue
        size = leaf.shape[dim]
        if size % options.microbatches:
            raise InputError(
                f"batch of {size} (input {name or i}) is not divisible by microbatches={options.microbatches}; choose a "
                f"divisor of {size}"
            )
        if size // options.microbatches % dp:
            raise InputError(
                f"batch of {size} (input {name or i}) is not divisible by dp={dp}"
                f"{f' times microbatches={options.microbatches}' if options.microbatches > 1 else ''}; use a batch that is "
                "a multiple, or another mesh"
            )


def _batch_dim(given: Any, index: int, name: str) -> int | None:
    if isinstance(given, dict):
        return given.get(name, 0)
    if isinstance(given, (list, tuple)) and index < len(given):
        return given[index]
    return 0


def _microbatch(inputs: Any, options: Options) -> Any:
    """Example inputs of one microbatch (meta tensors: only shapes matter)."""
    if options.microbatches == 1:
        return inputs
    leaves, names, _ = flatten(inputs)
    first = leaves[0]
    size = first.shape[_batch_dim(options.batch_dims, 0, names[0]) or 0]

    def cut(x: Any, path: list[int]) -> Any:
        if isinstance(x, torch.Tensor):
            index = path[0]
            path[0] += 1
            dim = _batch_dim(options.batch_dims, index, names[index])
            if x.ndim and dim is not None and x.shape[dim] == size:
                return x.narrow(dim, 0, size // options.microbatches)
            return x
        if isinstance(x, dict):
            return {k: cut(v, path) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return type(x)(cut(v, path) for v in x)
        return x

    return cut(inputs, [0])


def optimizer_state(optimizer: OptimizerFactory | None, program: Program) -> tuple[float, int]:
    """(state elements per parameter element, bytes each), found by one step on a small parameter."""
    if optimizer is None or not program.training:
        return 0.0, 0
    probe = nn.Parameter(torch.zeros(8, 8))
    probe.grad = torch.ones(8, 8)
    try:
        made = optimizer([probe])
        made.step()
    except Exception as error:
        raise InputError(
            f"the optimizer factory cannot make a working optimizer: {type(error).__name__}: {error}"
        ) from error
    state = [v for v in made.state.get(probe, {}).values() if isinstance(v, torch.Tensor) and v.shape == probe.shape]
    return float(len(state)), max((v.dtype.itemsize for v in state), default=0)


def _replayed(
    plan: Plan, program: Program, cluster: ClusterSpec, setting: Setting, rules: RuleBook, options: Options
) -> Candidate:
    from autopar.passes.shard.replay import evaluate

    if plan.ranks != cluster.size:
        raise PlanError(
            f"this plan is for {plan.ranks} ranks, the cluster has {cluster.size}; compile again without plan="
        )
    if plan.cluster != cluster.fingerprint():
        raise PlanError(
            f"this plan is for another cluster (plan {plan.cluster}, given {cluster.fingerprint()}): devices or links differ; "
            f"compile again without plan=, or, to run it here all the same, write {cluster.fingerprint()!r} as the plan's cluster"
        )
    if plan.microbatches != options.microbatches:
        raise PlanError(
            f"this plan has {plan.microbatches} microbatches, Options ask for {options.microbatches}; set "
            f"Options(microbatches={plan.microbatches})"
        )
    if plan.program != program.fingerprint:
        raise PlanError(
            f"this plan is for another model (plan {plan.program}, model {program.fingerprint}): the model, its shapes or "
            "the example inputs changed; compile again without plan="
        )
    check_plan(plan, program)
    pricer = Pricer(cluster, plan.stages[0].mesh)
    solution = evaluate(program, plan, pricer, rules, setting)
    return Candidate(replace(plan, predicted={"step_time_s": solution.cost}), solution, pricer)


def _infeasible(
    program: Program, cluster: ClusterSpec, shortages: list[Any], setting: Setting, options: Options
) -> str:
    """What is short, by how much, what would fit."""
    limit = memory_limit(cluster, options)
    if not shortages:
        return "no plan exists on this cluster"
    strategy, mesh, least = min(shortages, key=lambda s: s[2].least_bytes)
    total = sum(p.type.nbytes for p in program.parameters.values())
    need = least.least_bytes
    ranks = cluster.size
    fit = ranks
    while need * ranks / fit > limit and fit < ranks * 1024:
        fit *= 2
    return (
        f"nothing fits in {size_text(limit)} per rank: the smallest plan ({strategy} on {mesh}) needs {size_text(need)}, "
        f"{size_text(need - limit)} too much (parameters {size_text(total)} in all, with gradients and optimizer state "
        f"{size_text(total * (2 + setting.state_ratio))}). About {fit} such ranks, a smaller batch, or {size_text(need)} per "
        "rank would do"
    )


__all__ = ["Options", "Prediction", "as_cluster", "compile"]
