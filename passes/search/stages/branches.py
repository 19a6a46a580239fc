"""Branches side by side: independent encoders and heads on device groups of their own, each with its own mesh.

The program is cut into segments (`autopar.passes.search.stages.segments`). Every submesh prices every segment,
`autopar.passes.branch` groups the segments, and the groups become a plan: segments that follow each other in a group are
one stage. As with cuts into stages, first roughly for every number of microbatches and any memory, then exactly for the
most promising ones.

Which group works when does not follow from a named schedule where a group has several stages. Groups form a DAG too, so
a schedule of one stage per group is made for that DAG, and every action of a group stands for those of its stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.passes.branch import BranchProblem, BranchSolution, SegmentOption, solve_branches
from autopar.passes.lower.cut import Range
from autopar.passes.search.lower_bounds import least_step_s
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.stages.limits import StageLimits
from autopar.passes.search.stages.plan_of_draft import DraftPlan, best_plan, ranked
from autopar.passes.search.stages.segment_chain import best_chain
from autopar.passes.search.stages.segments import boundary_bytes, branches, segments, work_shares
from autopar.passes.search.stages.submesh import (
    PlansByCount,
    SubmeshPlan,
    SubmeshPlans,
    flight_rule,
    possible_schedules,
    two_counts,
)
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.stage import StageChoice, StageSolution

MOST_GROUPS = 6
MOST_TRIED = 4
"""Groups of segments, and groupings that are made to fit, at most."""
SOLVE_S = 5.0
"""Seconds for one grouping of segments, of the solver's own clock."""
_FASTER = 0.999
"""A plan with branches is one where it is faster by more than this."""
_HOPE = 1.05
"""A grouping is tried while its estimate is no more than this many times the step time to beat."""


@dataclass(frozen=True)
class BranchDraft(Draft):
    """Groups of segments before they are lowered."""

    @property
    def step_s(self) -> float:
        """Estimated seconds of a step. total_s is that of 1F1B; other schedules fill a part of what it idles."""
        grouping = self.solution
        idle = grouping.total_s - self.microbatches * grouping.t_max_s - grouping.step_s
        if not self.task.program.training or self.microbatches == 1:
            return float(grouping.total_s)
        left = min(row.branch_idle_left for row in possible_schedules(self.task))
        return float(grouping.total_s - (1 - left) * idle)


def search_branches(submeshes: SubmeshPlans, best_s: float) -> Iterator[RankedPlans]:
    """Plans with branches side by side that are predicted faster than best_s, best first, whenever there is another one.

    Nothing for chains, and where the options ask for a pipeline of their own. Every group has devices of one kind.
    """
    task = submeshes.task
    if task.options.asks_for_pipeline or task.cluster.size < 2 or not branches(task):
        return
    search = BranchSearch(submeshes, best_s)
    plans: list[DraftPlan] = []
    for rough in search.rough()[:MOST_TRIED]:
        to_beat_s = plans[0].cost_s if plans else best_s
        if rough.step_s >= to_beat_s * _HOPE:
            break
        plan = best_plan(search.exact, rough, to_beat_s)
        if plan is not None and plan.cost_s < best_s * _FASTER:
            named = replace(plan.candidate, plan=replace(plan.candidate.plan, origin="solver (branches)"))
            plans.append(DraftPlan(plan.draft, named))
            plans.sort(key=lambda plan: plan.cost_s)
            yield ranked(plans)


class BranchSearch:
    """One search over groupings. best_s: step time to beat."""

    def __init__(self, submeshes: SubmeshPlans, best_s: float) -> None:
        self.submeshes, self.best_s = submeshes, best_s
        self.task = submeshes.task
        self.limits = StageLimits.of(self.task)

    def rough(self) -> list[Draft]:
        """Groupings by estimate in any memory, best first; one per number of microbatches."""
        counts = self.submeshes.tasks.counts()
        if not counts or least_step_s(self.task) >= self.best_s:
            return []
        plans = self._plans(counts)
        drafts: list[Draft] = []
        for M in counts:
            task = self.submeshes.tasks.at(M)
            draft = self._grouped(task, M, [on_mesh.at(M) for on_mesh in plans], math.inf)
            drafts += [draft] if draft is not None else []
        return sorted(drafts, key=lambda draft: draft.step_s)

    def _plans(self, counts: Sequence[int]) -> list[PlansByCount]:
        """Plans on all submeshes."""
        low, high = two_counts(counts)
        planned = (low, high) if low < high else tuple(dict.fromkeys((counts[0], high)))
        plans: list[PlansByCount] = []
        meshes = self.limits.submeshes(self.task)
        with self.submeshes.ahead([(M, mesh) for mesh in meshes for M in reversed(planned)]) as ahead:
            for mesh in meshes:
                at: dict[int, SubmeshPlan] = {}
                for M in reversed(planned):
                    plan = ahead.on(M, mesh)
                    if plan is None:
                        break
                    at[M] = plan
                else:
                    plans.append(self.submeshes.by_count(at, counts))
        return plans

    def exact(self, rough: Draft, share: float, policy: str | None) -> Draft | None:
        """The best grouping at this M that fits in that share of the memory: on the draft's submeshes, or on any."""
        M, task = rough.microbatches, rough.task
        self.submeshes.use(M, task)
        for meshes in (rough.used_meshes(), list(dict.fromkeys(plan.mesh for plan in rough.submesh_plans))):
            plans = self.submeshes.within(M, meshes, share, policy)
            draft = self._grouped(task, M, plans, task.limit * share)
            if draft is not None:
                return draft
        return None

    def _grouped(self, task: Task, M: int, plans: list[SubmeshPlan], limit: float) -> Draft | None:
        """The best grouping on these submeshes; None where there is none side by side. limit: bytes of a device."""
        if not plans:
            return None
        ranges = segments(task.program, work_shares(task))
        if len(ranges) < 2:
            return None
        priced = PricedSegments.of(ranges, plans, M, task)
        busy_s = sum(min(o.devices * o.time_s for o in of_segment) for of_segment in priced.options)
        if M * (busy_s / task.cluster.size) >= self.best_s:  # even with every device busy all the time
            return None
        try:
            problem = _problem(task, M, priced, limit)
            chain = best_chain(problem)
            starts = () if chain is None else (chain,)
            grouping = solve_branches(problem, known=starts, max_groups=MOST_GROUPS, time_limit_s=SOLVE_S)
        except InfeasibleError:
            return None
        return _draft(task, M, priced, grouping, limit) if grouping.side_by_side else None


@dataclass(frozen=True)
class PricedSegments:
    """Segments with what each costs on every submesh.

    options: per segment those that no other one beats in all. plan_of: per segment and option the index in plans.
    """

    ranges: tuple[Range, ...]
    plans: list[SubmeshPlan]
    options: tuple[tuple[SegmentOption, ...], ...]
    plan_of: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, ranges: tuple[Range, ...], plans: list[SubmeshPlan], M: int, task: Task) -> PricedSegments:
        options, plan_of = zip(*(_options(plans, span, M, task) for span in ranges), strict=True)
        return cls(ranges, plans, options, plan_of)


def _options(
    plans: Sequence[SubmeshPlan], span: Range, M: int, task: Task
) -> tuple[tuple[SegmentOption, ...], tuple[int, ...]]:
    """The options of a segment on every submesh, and which plan each is of; those that another one beats in all are left out."""
    every = [_option(plan, span, task) for plan in plans]

    def better(a: SegmentOption, b: SegmentOption) -> bool:
        return (
            (a.kind, a.devices) == (b.kind, b.devices)
            and M * a.time_s + a.step_s < M * b.time_s + b.step_s
            and a.resting_bytes + a.held_bytes <= (b.resting_bytes + b.held_bytes) * 1.01
        )

    kept = [i for i, option in enumerate(every) if not any(better(other, option) for other in every)]
    return tuple(every[i] for i in kept), tuple(kept)


def _option(plan: SubmeshPlan, span: Range, task: Task) -> SegmentOption:
    """The seconds and bytes of a segment on a submesh. Where devices differ in memory, bytes are those that would fill the
    smallest as far as these fill the submesh's own."""
    (first, last), u, cluster = span, plan.units, task.cluster
    several = len(cluster.kind_starts) > 1
    room = task.limit / task.limit_at(plan.mesh) if several else 1.0
    return SegmentOption(
        plan.mesh.size,
        float(sum(seconds[first:last].sum() for seconds in (u.forward_s, u.backward_s, u.weights_s))),
        float(u.step_s[first:last].sum()),
        room * float(u.resting_bytes[first:last].sum()),
        room * float(u.held_bytes[first:last].sum()),
        room * float(u.peak_bytes[first:last].max()),
        cluster.kind_starts.index(plan.mesh.offset),
    )


def _problem(task: Task, M: int, priced: PricedSegments, limit: float) -> BranchProblem:
    """The problem that `solve_branches` solves. limit: bytes of a device."""
    sizes = boundary_bytes(task.program, priced.ranges)
    latency_s, rate = _link(task, max(sizes.values(), default=1.0))
    return BranchProblem(
        priced.options,
        tuple((u, v, b) for (u, v), b in sorted(sizes.items())),
        task.cluster.size,
        M,
        rate,
        latency_s,
        limit,
        0.0,
        flight_rule(task, 1),
        tuple(task.program.calls[first].path or f"calls {first}–{last - 1}" for first, last in priced.ranges),
        True,
        StageLimits.of(task).available,
    )


def _link(task: Task, nbytes: float) -> tuple[float, float]:
    """(latency, bytes/s) of a hand-over between groups of a quarter of the ranks, which share its bytes."""
    ranks = max(task.cluster.size // 4, 1)
    pricer = task.pricers[Mesh.of(dp=ranks)]
    least, most = pricer.hand_over_s(1.0), pricer.hand_over_s(1.0 + nbytes / ranks)
    return least, nbytes / max(most - least, 1e-15)


def _draft(task: Task, M: int, priced: PricedSegments, grouping: BranchSolution, limit: float) -> BranchDraft:
    """The groups as stages: segments that follow each other in one group are one, on the mesh that suits them best."""
    group_of = {s: g for g, group in enumerate(grouping.groups) for s in group.segments}
    runs: list[list[int]] = []
    for s in range(len(priced.ranges)):
        if runs and group_of[runs[-1][-1]] == group_of[s]:
            runs[-1].append(s)
        else:
            runs.append([s])
    stages = tuple(_stage(task, M, priced, run, grouping, group_of[run[0]], limit) for run in runs)
    largest_first = sorted(
        range(len(grouping.groups)), key=lambda g: (grouping.groups[g].kind, -grouping.groups[g].devices)
    )
    groups = tuple(tuple(k for k, run in enumerate(runs) if group_of[run[0]] == g) for g in largest_first)
    solution = StageSolution(
        stages,
        grouping.total_s,
        grouping.busiest_s,
        grouping.step_s,
        groups,
        tuple(grouping.memory[g] for g in largest_first),
        grouping.bound,
        "branches",
    )
    return BranchDraft(task, M, max(map(len, groups)), "any", solution, tuple(priced.plans))


def _stage(
    task: Task, M: int, priced: PricedSegments, run: list[int], grouping: BranchSolution, g: int, limit: float
) -> StageChoice:
    """A run of segments of group g as one stage, on whichever of their submeshes makes it fastest."""
    group = grouping.groups[g]
    chosen = {priced.plan_of[s][o] for s, o in zip(group.segments, group.options, strict=True) if s in run}
    first, last = priced.ranges[run[0]][0], priced.ranges[run[-1]][1]
    costs = {p: _option(priced.plans[p], (first, last), task) for p in chosen}
    best = min(costs, key=lambda p: (M * costs[p].time_s + costs[p].step_s, p))
    return StageChoice(first, last, best, costs[best].time_s, costs[best].step_s, grouping.memory[g], limit)
