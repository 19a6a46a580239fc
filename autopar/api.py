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
from autopar.capture.build import fingerprint
from autopar.capture.export import Exported
from autopar.capture.trees import flatten
from autopar.cluster import ClusterSpec
from autopar.errors import InputError, NoRoomError, PlanError
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.optimizer.examine import examine, update_rule
from autopar.options import Options
from autopar.passes.batch.microbatch import in_microbatches
from autopar.passes.rules.book import RuleBook
from autopar.passes.search.best_plans import search_plans
from autopar.passes.search.placement import placed
from autopar.passes.search.refused.explained import explained
from autopar.passes.search.replayed import replayed
from autopar.passes.search.task import Capture, RankedPlans, Task
from autopar.passes.shard.mesh_plan import candidate_meshes
from autopar.passes.shard.offload import KINDS
from autopar.plan import Plan
from autopar.program import ParallelProgram, Prediction, emit_program
from autopar.request import check_batch_dims, check_options, check_precision, most_targets, planned_precision
from autopar.runtime.update_rule import ClipNorm, LossScaling, OptimizerFactory, SchedulerFactory, UpdateRule


def compile(
    model: nn.Module,
    cluster: ClusterSpec | str | Path,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: OptimizerFactory | UpdateRule | None = None,
    scheduler: SchedulerFactory | None = None,
    clip_grad_norm: float | ClipNorm | None = None,
    clip_grad_value: float | None = None,
    loss_scaling: bool | LossScaling = False,
    options: Options | None = None,
    plan: Plan | str | Path | None = None,
) -> ParallelProgram:
    """Compile a single-device model into one program per rank.

    model: nn.Module, real or on the meta device. cluster: a ClusterSpec, a preset's name or a file. example_inputs:
    tuple of args or dict of kwargs for the global batch (the loss's targets last). loss_fn(output, *targets): optional;
    without it a model that returns a scalar, or an object with `.loss`, is trained on that, any other is compiled for
    inference. plan: replay this plan.

    optimizer: factory such as `functools.partial(torch.optim.AdamW, lr=1e-3)`, called with the list of parameters, or, if
    its parameter is called `named_parameters`, with (name, parameter) pairs to make parameter groups of; it may return
    several optimizers. scheduler: factory of a torch.optim.lr_scheduler over an optimizer, stepped once per step.
    clip_grad_norm: the global norm (of all ranks and stages) that gradients are clipped to, ClipNorm for other norms;
    clip_grad_value: clamps them instead. loss_scaling: dynamic, as torch.amp.GradScaler does it; a step whose gradients
    overflow on any rank is skipped on all.

    Raises InputError, CaptureError, ClusterError, ConstraintError, PlanError, InfeasibleError.
    """
    options = Options() if options is None else options
    check_options(options, plan)
    given = None if plan is None else plan if isinstance(plan, Plan) else Plan.load(plan)
    if given is not None:
        if options.microbatches not in (None, 1, given.microbatches):
            raise PlanError(
                f"this plan has {given.microbatches} microbatches, Options ask for {options.microbatches}; set "
                f"Options(microbatches={given.microbatches})"
            )
        options = replace(options, microbatches=given.microbatches, precision=planned_precision(given, options))
    spec = as_cluster(cluster)
    _check_model(model, loss_fn)
    rule = update_rule(optimizer, scheduler, clip_grad_norm, clip_grad_value, loss_scaling, options.compensated_sums)
    check_precision(options.precision, spec)
    inputs, targets = split_example(model, example_inputs, loss_fn)
    candidate_meshes(spec, options, spec.size // options.pp if options.pp else None)
    _check_batch(inputs, spec, options)
    started = time.perf_counter()

    rules = RuleBook()

    def capture(parts: int) -> tuple[Program, Exported]:
        made, exported = capture_microbatch(parts)
        if parts > 1 and made.training:
            whole = known[1][0].program if 1 in known else None
            if whole is None and batch == parts:  # one sample each: see in_microbatches
                whole = capture_microbatch(parts // 2 if parts % 2 == 0 else 1)[0]
            made = in_microbatches(made, rules, whole)
            made = replace(made, fingerprint=fingerprint(made))
        return made, exported

    def capture_microbatch(parts: int) -> tuple[Program, Exported]:
        pieces, starts = _microbatch(inputs, options, parts), options.stage_boundaries or ()
        return capture_program(model, pieces, loss_fn, targets, options.batch_dims, starts, options.precision)

    known: dict[int, tuple[Task, Exported]] = {}
    batch = _batch_size(inputs, options)

    program, exported = capture(options.microbatches or 1)
    captured = time.perf_counter()

    def setting_for(ranks: int) -> Setting:
        facts = examine(rule, program, ranks)
        return Setting(
            options.microbatches or 1,
            facts.state_ratio,
            facts.state_bytes,
            facts.scratch,
            offload=KINDS[options.offload],
            whole=facts.whole,
            compensated=rule.compensated,
            state_of=facts.state_of,
            group_of=facts.group_of,
        )

    setting = setting_for(spec.size)
    task = Task(program, spec, rules, setting, options)
    known[setting.microbatches] = (task, exported)
    again_s = 0.0

    def recapture(parts: int) -> Task:
        nonlocal again_s
        if parts not in known:
            before = time.perf_counter()
            made, exported = capture(parts)
            again_s += time.perf_counter() - before
            known[parts] = (task.smaller(made, parts), exported)
        return known[parts][0]

    if given is not None:
        found = [(task, replayed(task, given))]
    else:
        found = _planned(task, batch, recapture, setting_for)
    planned = time.perf_counter()
    owner, best = found[0]
    if given is None:
        best = owner.finish(best)
        assert best.lowered is not None
        assert best.account is not None
        best = replace(best, plan=placed(best.plan, best.lowered, best.account, spec))
        found[0] = (owner, best)
    lowering_s = sum(t.lowering_s for t, _ in known.values())
    result = emit_program(
        model,
        spec,
        owner.program,
        known[owner.setting.microbatches][1],
        [c for _, c in found],
        rules,
        owner.setting,
        options,
        rule,
        inputs,
        loss_fn,
        targets,
    )
    result.timings["capture_s"] = captured - started + again_s
    result.timings["plan_s"] = planned - captured - lowering_s - again_s
    result.timings["lower_s"] += lowering_s
    return result


def _planned(task: Task, batch: int, recapture: Capture, setting_for: Callable[[int], Setting]) -> RankedPlans:
    """Plans with their tasks, best first. Raises InfeasibleError, which says what is short and what would do."""
    try:
        found = search_plans(task, batch, recapture)
    except NoRoomError as error:
        raise explained(task, batch, setting_for, error) from None
    if not found:
        raise explained(task, batch, setting_for)
    return found


def _batch_size(inputs: Any, options: Options) -> int:
    """Size of the batch dim of the first input that has one."""
    leaves, names, _ = flatten(inputs)
    for i, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        dim = _batch_dim(options.batch_dims, i, name)
        if leaf.ndim and dim is not None:
            return int(leaf.shape[dim])
    return 1


def as_cluster(cluster: ClusterSpec | str | Path) -> ClusterSpec:
    """A ClusterSpec from a spec, a file or a preset's name."""
    if isinstance(cluster, ClusterSpec):
        return cluster
    if isinstance(cluster, (str, Path)):
        if Path(cluster).suffix in (".yaml", ".yml", ".json") or Path(cluster).is_file():
            return ClusterSpec.from_file(cluster)
        return ClusterSpec.preset(str(cluster))
    raise InputError(f"cluster must be a ClusterSpec, a preset's name or a file, not {type(cluster).__name__}")


def _check_model(model: Any, loss_fn: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}; wrap a function in a Module")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"loss_fn must be callable (output, *targets) -> scalar, not {type(loss_fn).__name__}")


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
        dp = cluster.size // (options.pp or len(options.stage_boundaries or ()) + 1)
    for i, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        dim = _batch_dim(options.batch_dims, i, name)
        if leaf.ndim == 0 or dim is None or i > 0:
            continue
        size = leaf.shape[dim]
        pieces = options.microbatches or 1
        if size % pieces:
            raise InputError(
                f"batch of {size} (input {name or i}) is not divisible by microbatches={pieces}; choose a "
                f"divisor of {size}"
            )
        if size // pieces % dp:
            raise InputError(
                f"batch of {size} (input {name or i}) is not divisible by dp={dp}"
                f"{f' times microbatches={pieces}' if pieces > 1 else ''}; use a batch that is "
                "a multiple, or another mesh"
            )


def _batch_dim(given: Any, index: int, name: str) -> int | None:
    if isinstance(given, dict):
        return given.get(name, 0)
    if isinstance(given, (list, tuple)) and index < len(given):
        return given[index]
    return 0


def _microbatch(inputs: Any, options: Options, parts: int) -> Any:
    """Example inputs of one of `parts` microbatches (meta tensors: only shapes matter)."""
    if parts == 1:
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
                return x.narrow(dim, 0, size // parts)
            return x
        if isinstance(x, dict):
            return {k: cut(v, path) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return type(x)(cut(v, path) for v in x)
        return x

    return cut(inputs, [0])


__all__ = ["Options", "Prediction", "as_cluster", "compile"]
