"""Every kind of plan that is searched for one request, best first.

The kinds are: the solver's plans on one mesh of all ranks; on one mesh too, with microbatches, recompute and offload
chosen together where memory is short; pipelines; branches side by side; sequences in zigzag order; and the best of all
these on fewer ranks, where that could be faster. Each kind is bounded by the best plan of those before it, so whichever is likely
to win goes first and the others are soon ruled out: pipelines on large clusters for models without experts and batches that hold
much for backward, plans on one mesh elsewhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from autopar.cluster.arrangement import arrangements
from autopar.errors import NoRoomError
from autopar.passes.order.dims import causal_attention
from autopar.passes.price.pricer import OutOfTime
from autopar.passes.search.clock import Clock
from autopar.passes.search.idle import could_win, fewer_ranks, on_fewer_ranks
from autopar.passes.search.lower_bounds import least_bytes, least_step_s
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.one_mesh.by_strategy import search_strategies
from autopar.passes.search.one_mesh.short_memory import ShortMemorySearch
from autopar.passes.search.stages.branches import search_branches
from autopar.passes.search.stages.laid_out import search_laid_out
from autopar.passes.search.stages.limits import check_pipeline_options, leaves_stages_open
from autopar.passes.search.stages.pipelines import PipelineSearch
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.search.zigzag import search_zigzag
from autopar.passes.shard.allowed import check_constraints
from autopar.passes.shard.uneven import numbers_of_experts

MANY_RANKS = 64
"""The most ranks for which one mesh is searched first: on larger clusters pipelines may be looked for before
microbatches and recompute on one mesh."""

NEAR = 1.1
"""Plans on fewer ranks that are slower by less than this may be the faster ones once lines run while messages travel."""
WORTH_STAGES = 0.998
"""Stages are worth a program that is harder to read where a step takes less than this share of the best plan's on one mesh: no
prediction tells plans apart that are closer."""

Kind = tuple[str, Callable[[float], Iterator[RankedPlans]]]
"""A kind of plans, and the search for those that are faster than so many seconds: their ranking, whenever it gets better."""


def search_plans(task: Task, batch: int, now: Callable[[], float] = time.monotonic) -> RankedPlans:
    """Plans with the task that each is a plan of, best first; none where nothing fits.

    batch: size of the global batch. now: seconds of the clock that `Options.search_s` is measured by. Raises InputError
    for options that cannot be, ConstraintError for constraints that nothing meets, InfeasibleError where the options ask for a
    pipeline and none fits.
    """
    check_pipeline_options(task)
    check_constraints(task.program, task.options.constraints)
    clock = Clock(task.options.search_s, now)
    task = task.changed()
    task.pricers = task.pricers.until(clock.is_over)
    rankings: dict[str, RankedPlans] = {}
    unfinished: list[str] = []
    with task.workers:
        for kind, search in chain(_on_all(task, batch, rankings), _on_fewer(task, batch)):
            if not unfinished:
                clock.say(kind, _best_s(rankings))
                try:
                    for ranking in search(_best_s(rankings)):
                        rankings[kind] = ranking
                        clock.has_plan = True
                        clock.say(kind, _best_s(rankings))
                    continue
                except (OutOfTime, KeyboardInterrupt):
                    if not rankings:
                        clock.stop()
                        raise
            unfinished.append(kind)
    clock.stop()
    plans = [
        plan for ranking in sorted(rankings.values(), key=lambda ranking: ranking[0][1].step_s) for plan in ranking
    ]
    return _left_out(plans, tuple(dict.fromkeys(unfinished)), least_step_s(task)) if unfinished else plans


def _on_all(task: Task, batch: int, rankings: dict[str, RankedPlans]) -> Iterator[Kind]:
    """The kinds of plans on all ranks of a task. rankings: theirs, as they are found."""
    pipelines = PipelineSearch(SubmeshPlans(TasksByCount(task, batch)))
    short_memory = ShortMemorySearch(pipelines.submeshes.tasks)
    return chain(
        _kinds(pipelines, short_memory),
        _on_finer_meshes(pipelines, rankings),
        _in_order(task, batch, rankings, short_memory),
    )


def _on_fewer(task: Task, batch: int) -> Iterator[Kind]:
    """The kind that takes the best plans of fewer ranks, where there may be any. The best plan on all ranks bounds them from a
    little above: estimates would rule out what is a little faster, and a rank more is never to be worse than none."""
    numbers = fewer_ranks(task)

    def search_fewer(best_s: float) -> Iterator[RankedPlans]:
        found: RankedPlans = []
        for smaller in (on_fewer_ranks(task, ranks) for ranks in numbers):
            rankings: dict[str, RankedPlans] = {}
            for kind, search in _on_all(smaller, batch, rankings) if could_win(task, smaller, best_s) else ():
                for ranking in search(min(_best_s(rankings), NEAR * best_s)):
                    rankings[kind] = ranking
            if (fastest_s := _best_s(rankings)) < NEAR * best_s:
                best_s = min(best_s, fastest_s)
                found += (ranking[0] for ranking in rankings.values() if ranking[0][1].step_s == fastest_s)
                found.sort(key=lambda plan: plan[1].step_s)
                yield found

    if numbers:
        yield "plans that leave ranks idle", search_fewer


def _kinds(search: PipelineSearch, short_memory: ShortMemorySearch) -> Iterator[Kind]:
    """The kinds of plans in the order in which they are looked for, in natural order."""
    task, submeshes = search.task, search.submeshes
    pipelines: Kind = "pipelines", lambda best_s: _pipelines(search, best_s)
    layout = task.layout
    if layout is not None and len(layout.stages) > 1:
        yield "plans with the given stages", lambda best_s: search_laid_out(submeshes, layout, best_s)
        return
    if task.options.asks_for_pipeline:
        yield pipelines
        return
    memory_short: list[bool] = []

    def strategies(_: float) -> Iterator[RankedPlans]:
        candidates, is_short = search_strategies(task)
        memory_short.append(is_short)
        if candidates:
            yield [(task, candidate) for candidate in candidates]

    yield "plans on one mesh", strategies
    stages = leaves_stages_open(task.options, task.cluster.size)
    pipelines_first = stages and _pipelines_first(task)
    lean: Kind = "plans on one mesh with microbatches, recompute and offload", short_memory.plans
    is_lean = any(memory_short) and task.program.training
    if is_lean and pipelines_first:

        def estimated(best_s: float) -> Iterator[RankedPlans]:
            short_memory.first_s(search.estimate_s(best_s, short_memory.first_s), best_s)
            return iter(())

        yield pipelines[0], estimated
        pipelines_first = not short_memory.faster
    if is_lean and not pipelines_first:
        yield lean
    if stages:
        yield pipelines[0], lambda best_s: _pipelines(search, WORTH_STAGES * best_s)
        yield "branches side by side", lambda best_s: search_branches(submeshes.copy(), WORTH_STAGES * best_s)
    if is_lean and pipelines_first:
        yield lean


def _pipelines(search: PipelineSearch, best_s: float) -> Iterator[RankedPlans]:
    """Pipelines whose stages take the kinds of devices in any order. search: for those in the cluster's own order. Raises
    NoRoomError as `PipelineSearch.plans` does, where none fits in any of them."""
    tasks, found, shortages = search.submeshes.tasks, list[RankedPlans](), list[NoRoomError]()
    for way in arrangements(search.task.cluster):
        own = search
        if way.cluster != search.task.cluster:
            own = PipelineSearch(SubmeshPlans(TasksByCount(search.task.changed(cluster=way.cluster), tasks.batch)))
        before = [plan for ranking in found for plan in ranking]
        try:
            for ranking in own.plans(min([best_s, *(plan.step_s for _, plan in before)])):
                yield sorted([*ranking, *before], key=lambda plan: plan[1].step_s)
                found = [ranking, before]
        except NoRoomError as error:
            shortages.append(error)
    if shortages and not found:
        raise shortages[0]


def _on_finer_meshes(search: PipelineSearch, rankings: dict[str, RankedPlans]) -> Iterator[Kind]:
    """The kind that tries finer meshes of stages, where the best plan so far has stages. search: for pipelines, before it;
    rankings: of the kinds before it."""
    plans = sorted((ranking[0][1] for ranking in rankings.values()), key=lambda plan: plan.step_s)
    if plans and len(plans[0].plan.stages) > 1:
        yield "pipelines on finer meshes", lambda _: search.finer(plans[0])


def _in_order(
    task: Task, batch: int, rankings: dict[str, RankedPlans], short_memory: ShortMemorySearch
) -> Iterator[Kind]:
    """The kind that begins with plans of the others. rankings: theirs; short_memory: their search on one mesh."""
    if task.options.order is not None or not any(map(causal_attention, task.program.templates.values())):
        return

    def zigzag(best_s: float) -> Iterator[RankedPlans]:
        plans = [plan for ranking in rankings.values() for plan in ranking]
        yield from search_zigzag(task, batch, plans, best_s, short_memory.without_room)

    yield "plans in zigzag order", zigzag


def _pipelines_first(task: Task) -> bool:
    """Whether pipelines are looked for before microbatches and recompute on one mesh: on large clusters, where the batch holds
    more for backward, even recomputed, than rests. One mesh is slow then, as it gathers parameters again for every microbatch;
    but for experts, which stay where they are."""
    resting, held = least_bytes(task)
    return task.cluster.size > MANY_RANKS and held > resting and not numbers_of_experts(task.program, task.rules)


def _left_out(plans: RankedPlans, kinds: tuple[str, ...], least_s: float) -> RankedPlans:
    """Plans of a search that ended early: the best one says what was left out, and how far it is from what no plan beats.
    least_s: seconds that no plan beats."""
    (task, best), *others = plans
    solution = replace(best.solution, bound=min(best.solution.bound, least_s))
    return [(task, replace(best, solution=solution, left_out=kinds)), *others]


def _best_s(rankings: dict[str, RankedPlans]) -> float:
    """Seconds of a step of the best plan so far."""
    return min((ranking[0][1].step_s for ranking in rankings.values()), default=math.inf)
