"""`autopar.compile`: request → capture → search → place → emit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from autopar.capture.examples.buckets import Sizes
from autopar.capture.examples.default_device import with_cpu_as_default
from autopar.capture.examples.inputs import LossFunction
from autopar.cluster import ClusterSpec, resized
from autopar.cluster.arrangement import arranged, arrangements, placement_onto
from autopar.codegen.factories import named_rule
from autopar.compiled import Decision, Known, emitted
from autopar.errors import ConstraintError, EmitError, InfeasibleError, InputError, NoRoomError, PlanError
from autopar.forms import captured_for, laid_out_as, setting_for, with_forms, with_others
from autopar.ir.memory_levers import forced_offload
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.optimizer.examine import examine
from autopar.optimizer.rule import update_rule
from autopar.options import Entry, Options, with_suggestions
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.order.ordered import in_order
from autopar.passes.order.refused import NotOrdered
from autopar.passes.rules.book import RuleBook
from autopar.passes.search.best_plans import search_plans
from autopar.passes.search.frontier import HALVINGS, Option, comparable, not_beaten, options_of, whole_parts
from autopar.passes.search.idle import planned_ranks
from autopar.passes.search.infrequent_gc import infrequent_gc
from autopar.passes.search.overlap import overlapped
from autopar.passes.search.placement import find_placement
from autopar.passes.search.refused.explained import explained
from autopar.passes.search.refused.smallest import SmallPlan
from autopar.passes.search.replayed import replayed
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan
from autopar.program import ParallelProgram
from autopar.report.pareto import Pareto, pareto_of
from autopar.report.torch_trace import trace
from autopar.request import Request, checked_options, make_request
from autopar.runtime.data.schema import is_integer, shown
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, OptimizerFactory, SchedulerFactory, UpdateRule

MORE_MEMORY = (1.0, 1.2, 1.5, 2.0, 4.0)
"""Times the memory that stages were estimated to need, until there are stages to be looked at that fit in it."""


@with_suggestions
@with_cpu_as_default
def compile(
    model: nn.Module,
    cluster: ClusterSpec | str | Path,
    example_inputs: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | UpdateRule | None = None,
    scheduler: SchedulerFactory | None = None,
    clip_grad_norm: float | ClipNorm | None = None,
    clip_grad_value: float | None = None,
    loss_scaling: bool | LossScaling = False,
    options: Options | None = None,
    plan: Plan | str | Path | None = None,
    buckets: Sizes | None = None,
    pad_values: Mapping[str, float] | None = None,
    entries: Mapping[str, Entry] | None = None,
) -> ParallelProgram:
    """Compile a single-device model into one program per rank.

    model: nn.Module, real or on the meta device. cluster: a ClusterSpec, a preset's name, a file, or "here": the ranks that
    torchrun started, or this machine. example_inputs: tuple of args or dict of kwargs for the global batch (the loss's targets
    last). loss_fn(output, *targets): optional.
    It returns the loss, a scalar, or (loss, extras): tensors, in tuples, lists and dicts, that a step gives beside the loss, of
    the whole batch and without a gradient, such as `(out[1], {"logits": out[0]})` or an accuracy. Without it a model that returns
    a scalar, or an object with `.loss`, is trained on that, and, where there is an optimizer or something else of training, one
    whose tuple, list or dict has a single scalar with a gradient on that; any other is compiled for inference. plan: replay
    this plan.

    optimizer: factory such as `functools.partial(torch.optim.AdamW, lr=1e-3)`, called with the list of parameters, or, if
    its parameter is called `named_parameters`, with (name, parameter) pairs to make parameter groups of; it may return
    several optimizers. scheduler: factory of a torch.optim.lr_scheduler over an optimizer, stepped once per step, with its
    loss where `step` takes `metrics` (ReduceLROnPlateau).
    clip_grad_norm: the global norm (of all ranks and stages) that gradients are clipped to, ClipNorm for other norms;
    clip_grad_value: clamps them instead. loss_scaling: dynamic, as torch.amp.GradScaler does it; a step whose gradients
    overflow on any rank is skipped on all.

    buckets: sizes that dims of inputs may have, `{"input_ids": {1: (512, 1024)}, "labels": {1: (512, 1024)}}` (an odd last
    batch: `{0: (8, 3)}`): one program with one set of parameters runs them all; the largest decides how parameters are
    stored, the others are planned for that. pad_values: number by input, with which a batch between two buckets is padded
    up to the next one (never along its batch dim).

    entries: other steps over the same parameters, in the same memory, by name: `{"evaluate": autopar.Entry()}` is the model in
    eval mode. `program.run_in_turn`, and `autopar.load(DIR).entry(name)`, run them between the program's own.

    Raises InputError, CaptureError, CoupledError, ClusterError, ConstraintError, PlanError, InfeasibleError.
    """
    request = request_of(
        model,
        cluster,
        example_inputs,
        loss_fn=loss_fn,
        optimizer=optimizer,
        scheduler=scheduler,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
        loss_scaling=loss_scaling,
        options=options,
        plan=plan,
        buckets=buckets,
        pad_values=pad_values,
        entries=entries,
    )
    try:
        named_rule(request.update)
    except EmitError as error:
        warnings.warn(f"this program will run here, but cannot be saved: {error}", stacklevel=4)
    return compile_request(request)


def request_of(
    model: nn.Module,
    cluster: ClusterSpec | str | Path,
    example_inputs: Any,
    *,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | UpdateRule | None,
    scheduler: SchedulerFactory | None,
    clip_grad_norm: float | ClipNorm | None,
    clip_grad_value: float | None,
    loss_scaling: bool | LossScaling,
    options: Options | None,
    plan: Plan | str | Path | None,
    buckets: Sizes | None,
    pad_values: Mapping[str, float] | None,
    entries: Mapping[str, Entry] | None = None,
) -> Request:
    """The request that the arguments of `compile` make. Raises InputError, ClusterError, PlanError."""
    options = checked_options(options)
    update = update_rule(optimizer, scheduler, clip_grad_norm, clip_grad_value, loss_scaling, options.compensated_sums)
    return make_request(model, cluster, example_inputs, loss_fn, update, options, plan, buckets, pad_values, entries)


@with_suggestions
@with_cpu_as_default
def pareto(
    model: nn.Module,
    cluster: ClusterSpec | str | Path,
    example_inputs: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | UpdateRule | None = None,
    scheduler: SchedulerFactory | None = None,
    clip_grad_norm: float | ClipNorm | None = None,
    clip_grad_value: float | None = None,
    loss_scaling: bool | LossScaling = False,
    options: Options | None = None,
    halvings: int = HALVINGS,
) -> Pareto:
    """The plans that no other plan beats in seconds of a step, bytes of a rank, devices and joules at once.

    They are sought on the cluster and on its first 1, 2, 4, … nodes (of one node: devices), within the memory that there is and
    within less: so often (halvings, 0 to 8) the half of what the fastest plan takes. The step is captured once. A row's plan is
    compiled by `compile(model, row.cluster, …, plan=row.plan)`. Other arguments are those of `compile`. Raises what it raises.
    """
    request = request_of(
        model,
        cluster,
        example_inputs,
        loss_fn=loss_fn,
        optimizer=optimizer,
        scheduler=scheduler,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
        loss_scaling=loss_scaling,
        options=options,
        plan=None,
        buckets=None,
        pad_values=None,
    )
    if not is_integer(halvings, 0, 8):
        raise InputError(f"pareto: halvings is a whole number from 0 to 8, not {shown(halvings)}")
    return pareto_of_request(request, halvings)


def pareto_of_request(request: Request, halvings: int) -> Pareto:
    """The plans of a request that no other plan beats: `pareto` once its arguments are checked."""
    rules = RuleBook()
    batches = _ordered(request, Microbatches(request.capture(), rules, request.capture_apart))
    program = batches.at(request.options.microbatches or 1)

    def task_on(part: Request) -> Task:
        setting, order = _setting(part, program, part.cluster.size), _forced_order(part) or 0
        return Task(program, arrangements(part.cluster)[0].cluster, rules, setting, part.options, batches, order=order)

    looked_at: list[Option] = []
    with infrequent_gc():
        for ranks in whole_parts(request.cluster):
            with suppress(InputError, ConstraintError):  # there are too few ranks for what the options ask for
                part = request if ranks == request.cluster.size else request.on_part(resized(request.cluster, ranks))
                looked_at += options_of(task_on(part), request.batch, part.cluster, halvings)
        if not looked_at:
            _searched(task_on(request), request.batch, lambda ranks: _setting(request, program, ranks))
        looked_at = comparable(looked_at)
        return pareto_of(looked_at, [_decided(option) for option in not_beaten(looked_at)])


def _decided(option: Option) -> tuple[Option, Decision]:
    """An option with its plan as `compile` would give it."""
    task, listed = option.task, option.cluster
    best = replace(option.plan, plan=_of_cluster(option.plan.plan, task, listed))
    return option, Decision.of(task, _on_ranks(task, best, placement_onto(listed, task.cluster)), ())


def compile_request(request: Request, known: Known | None = None) -> ParallelProgram:
    """The program of a request: `compile` once its arguments are checked. known: what was found out before about the same model;
    the program is the same without."""
    program = _compiled(request, known if known is not None and known.serves(request) else None)
    program = with_forms(program, lambda form: _compiled(form, first=program))
    trace(program)
    return program


def _compiled(request: Request, known: Known | None = None, first: ParallelProgram | None = None) -> ParallelProgram:
    """One program. known: of the same step; first: that whose parameters it is to compute with."""
    started = time.perf_counter()
    if known is None:
        rules = RuleBook() if first is None else first.rules
        captured = request.capture() if first is None else captured_for(first, request)
        whole = Microbatches(captured, rules, request.capture_apart)
        known = Known(request, whole, rules, request.captured_tensors)
    rules = known.rules
    batches = _ordered(request, known.batches)
    program = batches.at(request.options.microbatches or 1)
    capture_s = time.perf_counter() - started

    def setting(ranks: int) -> Setting:
        own = _setting(request, program, ranks)
        return with_others(request, program, own, ranks) if first is None else setting_for(first, own)

    given = first.plan if first is not None else request.plan
    listed = request.cluster
    if given is None:
        cluster = arrangements(listed)[0].cluster
    else:
        cluster = planned_ranks(arranged(listed, given.placement), given)
    layout = laid_out_as(first, request, program) if first is not None else None
    order = _forced_order(request) or 0
    task = Task(
        program, cluster, rules, setting(request.cluster.size), request.options, batches, layout=layout, order=order
    )
    task.pricers = known.pricers_on(cluster)
    with infrequent_gc():
        if request.plan is not None:
            plans = [(task, replayed(task, request.plan, request.cluster))]
        else:
            alone = first is None and not (request.buckets or request.entries)
            try:
                searched = _searched(task, request.batch, setting)
            except InfeasibleError as error:
                raise _with_program(error, request, task, capture_s) from None
            plans = overlapped(searched, not alone)
        plans = [(owner, replace(one, plan=_of_cluster(one.plan, owner, listed))) for owner, one in plans]
        task, best = plans[0]
        if first is not None:
            best = replace(best, plan=replace(best.plan, placement=first.plan.placement))
        elif request.plan is None:
            best = _on_ranks(task, best, placement_onto(listed, task.cluster))
    lowering_s = sum({id(t): t.lowering_s for t, _ in plans}.values())
    seconds = {
        "capture_s": capture_s,
        "plan_s": time.perf_counter() - started - capture_s - lowering_s,
        "lower_s": lowering_s,
    }
    candidates = [best, *(candidate for _, candidate in plans[1:])]
    captured = task.batches.captured(task.setting.microbatches)
    again = partial(compile_request, known=known) if first is None else compile_request
    made = emitted(request, captured, task, candidates, seconds)
    return ParallelProgram(request, captured, *made, again)


def _of_cluster(plan: Plan, owner: Task, listed: ClusterSpec) -> Plan:
    """The plan with the order of its sequences, and with the cluster that it is for where it leaves ranks of that idle."""
    cluster = plan.cluster if plan.ranks == listed.size else listed.fingerprint()
    return replace(plan, order=owner.order, cluster=cluster)


def _forced_order(request: Request) -> int | None:
    """The order that the plan or the options say."""
    return request.plan.order if request.plan is not None else request.options.order


def _ordered(request: Request, batches: Microbatches) -> Microbatches:
    """The step in the order that is asked for. Raises PlanError, InputError where it cannot be."""
    order = _forced_order(request) or 0
    try:
        return in_order(batches, order)
    except NotOrdered as error:
        why = f"this model's sequence cannot be put in zigzag order {order}: {error}"
        if request.plan is not None:
            raise PlanError(f"{why}; compile again without plan=") from error
        raise InputError(f"{why}; leave Options.order at None or 0") from error


def _searched(task: Task, batch: int, setting_for: Callable[[int], Setting]) -> RankedPlans:
    """Plans with their tasks, best first. Raises InfeasibleError, which says what is short and what would do."""
    try:
        plans = search_plans(task, batch)
    except NoRoomError as error:
        raise explained(task, batch, setting_for, error) from None
    if not plans:
        raise explained(task, batch, setting_for)
    return plans


def _with_program(error: InfeasibleError, request: Request, task: Task, capture_s: float) -> InfeasibleError:
    """The error with the program under the smallest plan, to be looked at, made when it is asked for."""
    small: SmallPlan | None = error.smallest
    if small is not None:
        error.make_program = partial(_smallest, small, request, task, capture_s)
    elif error.would_fit_bytes is not None:
        error.make_program = partial(_with_memory, request, error.would_fit_bytes)
    return error


def _smallest(small: SmallPlan, request: Request, task: Task, capture_s: float) -> ParallelProgram:
    """The program under the smallest plan. task: of the search, whose prices have no deadline."""
    owner = small.task.changed()
    owner.pricers = task.pricers
    plan, lowered = _of_cluster(small.candidate.plan, owner, request.cluster), small.candidate.lowered
    assert lowered is not None
    candidate = replace(small.candidate, plan=plan, account=owner.account(lowered, plan))
    candidate = _on_ranks(owner, candidate, placement_onto(request.cluster, owner.cluster))
    seconds = {"capture_s": capture_s, "plan_s": 0.0, "lower_s": 0.0}
    captured = owner.batches.captured(owner.setting.microbatches)
    made = emitted(request, captured, owner, [candidate], seconds)
    return ParallelProgram(request, captured, *made, compile_request)


def _with_memory(request: Request, memory_bytes: float) -> ParallelProgram:
    """The program that a request would have if there were a little more memory for tensors than that, beside the memory that
    there is. Raises EmitError where even several times as much would not do."""
    for times in MORE_MEMORY:
        options = replace(request.options, memory_bytes=times * memory_bytes, explain_s=0.0)
        with suppress(InfeasibleError):
            return replace(compile_request(replace(request, options=options)), request=request)
    raise EmitError(
        "there is no page of what does not fit, as no stages were found that would fit in several times the memory"
    )


def _on_ranks(task: Task, candidate: PricedPlan, onto: tuple[int, ...]) -> PricedPlan:
    """The candidate lowered, with the placement of its ranks. onto: the place in the task's cluster of every machine's device as
    they are listed (empty: the same)."""
    candidate = task.finish(candidate)
    assert candidate.lowered is not None
    assert candidate.account is not None
    found, plan = find_placement(candidate.plan, candidate.lowered, candidate.account, task.cluster)
    if found is not None:
        candidate = replace(candidate, placed_by=found.method, placement_gap=found.gap)
    if onto:
        plan = replace(plan, placement=tuple(plan.placement[place] if plan.placement else place for place in onto))
    return replace(candidate, plan=plan)


def _setting(request: Request, program: Program, ranks: int) -> Setting:
    """The setting that planning depends on beside program and mesh, on so many ranks (an optimizer that updates whole
    tensors may ask for their number)."""
    return Setting(
        request.options.microbatches or 1,
        examine(request.update, program, ranks),
        offload=forced_offload(request.options.offload),
        compensated=request.update.compensated,
        compression=request.options.gradient_compression or "",
        changes_gradients=request.update.changes_gradients,
        by_microbatch=request.options.strategy.endswith(("zero2", "zero3")),
    )
