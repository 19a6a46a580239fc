"""The fastest schedule that fits: what the stages of a plan cost is found once, and every schedule is simulated."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from autopar.errors import PlanError
from autopar.ir.actions import StageGraph, Table, show_row, splits_backward
from autopar.passes.account.program import Account, under
from autopar.passes.memory.peak import StageMemory
from autopar.passes.schedule import ActionCosts, MemoryRoom, build, least_span_s, schedule_row, tried_by_default
from autopar.passes.schedule.grouped import grouped
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.task import Task
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Solution
from autopar.plan import Plan

_FASTER = 1e-3
"""A schedule replaces a simpler one that is slower by more than this, relative."""


def scheduled(plan: Plan, draft: Draft, useless_from_s: float = math.inf) -> PricedPlan | float:
    """The plan under the fastest schedule that fits; or how full its fullest group is at least under one that is fast enough
    (over 1; infinite where none is).

    useless_from_s: a plan that takes so many seconds or more is of no interest, and need not be found.
    """
    task = draft.task
    together = task.stage_costs(plan, False)
    if not task.program.training:
        return candidate_under(plan, draft, under(together, build("forward", together.graph, plan.microbatches)))
    apart = task.stage_costs(plan, True)
    result = fastest_schedule(draft, apart, together, _limits(plan, draft, apart.graph), useless_from_s)
    if isinstance(result, float):
        return result
    name, counted = result
    written_out = schedule_row(name).timed or (draft.shape == "any" and draft.chunks > 1)
    rows = tuple(map(show_row, counted.table)) if written_out else ()
    return candidate_under(replace(plan, schedule=name, table=rows), draft, counted)


def fastest_schedule(
    draft: Draft, apart: Account, together: Account, limits_bytes: list[float], useless_from_s: float = math.inf
) -> tuple[str, Account] | float:
    """Name and account of the fastest schedule that fits; or how full the fullest group is at least under one that is fast
    enough (over 1; infinite where none is).

    apart: what the stages cost with B and W apart; together: with both in one action, as schedules that do not split them
    have it. limits_bytes: what a rank of every group has. useless_from_s: a schedule that takes so many seconds or more is
    of no interest; one that takes that in any table of its form is not built.
    """
    best: tuple[str, Account] | None = None
    least = math.inf
    least_s = {True: _least_step_s(apart, limits_bytes), False: _least_step_s(together, limits_bytes)}
    for name in schedule_names(draft.task, draft):
        to_beat_s = useless_from_s if best is None else best[1].step_time_s * (1 - _FASTER)
        if least_s[schedule_row(name).splits_backward] >= to_beat_s:
            continue
        table = schedule_table(name, draft, apart, limits_bytes)
        if table is None:
            continue
        counted = under(apart if splits_backward(table) else together, table)
        if counted.step_time_s >= to_beat_s:
            continue
        fullest = max(p / limit for p, limit in zip(counted.peaks, limits_bytes, strict=True))
        if fullest > 1:
            least = min(least, fullest)
        else:
            best = name, counted
    return best if best is not None else least


def _least_step_s(counted: Account, limits_bytes: list[float]) -> float:
    """Seconds that a step of stages that cost so much takes in any table."""
    graph = counted.graph
    memory = [stage.memory for stage in counted.stages]
    most_held = [
        _most_held(stage, limits_bytes[graph.group_of[s]] - stage.resting_bytes) for s, stage in enumerate(memory)
    ]
    costs = ActionCosts(counted.seconds, counted.hand_over)
    span_s = least_span_s(graph, counted.microbatches, costs, most_held)
    return counted.read(lambda _: span_s).step_s


def _most_held(stage: StageMemory, room: float) -> float:
    """Microbatches that a stage can hold at once in so many bytes when its first B begins."""
    moments = {kind: [of[kind] for of in (stage.actions, stage.first, stage.last) if kind in of] for kind in "FB"}
    held = min(moment.after for moment in moments["F"])
    beside = max(min(moment.peak for moment in of_kind) for of_kind in moments.values())
    return 1 + max(room - beside, 0.0) * (1 + 1e-9) // held if held > 0 else math.inf


def schedule_names(task: Task, draft: Draft) -> list[str]:
    """Schedules to try, simple ones first."""
    if task.options.schedule != "auto":
        return [task.options.schedule]
    if draft.chunks > 1 and draft.shape != "any":
        return [row.name for row in tried_by_default() if row.shape == draft.shape and row.serves(draft.chunks)]
    actions = 3 * draft.microbatches * len(draft.solution.stages)
    return [
        row.name
        for row in tried_by_default()
        if row.serves(1)
        and (row.most_actions is None or actions <= row.most_actions)
        and not (
            row.timed and draft.chunks > 1
        )  # its seconds are those of stages, not of the groups that `grouped` makes
    ]


def schedule_table(name: str, draft: Draft, apart: Account, limits_bytes: list[float]) -> Table | None:
    """The table of a named schedule for these stages; None where it cannot serve. Raises when the user asked for it."""
    graph, M = apart.graph, draft.microbatches
    try:
        row = schedule_row(name)
        if max(map(len, graph.groups)) > 1 and row.stages[1] == 1:
            return grouped(partial(build, name), graph, M)
        if row.timed:
            costs = ActionCosts(apart.seconds, apart.hand_over)
            return build(name, graph, M, costs=costs, memory=_room(graph, apart, limits_bytes))
        return build(name, graph, M)
    except PlanError:
        if name == draft.task.options.schedule:
            raise
        return None


def _limits(plan: Plan, draft: Draft, graph: StageGraph) -> list[float]:
    """Bytes that a rank of every group has."""
    return [draft.task.limit_at(plan.stages[stages[0]].mesh.offset) for stages in graph.groups]


def _room(graph: StageGraph, counted: Account, limits: list[float]) -> MemoryRoom:
    """What a schedule may fill: per group the bytes that neither rest nor live for a moment."""
    after_F = tuple(s.memory.actions["F"].after for s in counted.stages)
    after_B = tuple(min(s.memory.actions["B"].after, f) for s, f in zip(counted.stages, after_F, strict=True))
    bound = []
    for stages, limit in zip(graph.groups, limits, strict=True):
        resting = sum(counted.stages[s].memory.resting_bytes for s in stages)
        beside = max(max(m.peak - m.after, 0.0) for s in stages for m in counted.stages[s].memory.actions.values())
        bound.append(max(limit - resting - beside, 0.0))
    return MemoryRoom(tuple(bound), after_F, after_B)


def candidate_under(plan: Plan, draft: Draft, counted: Account) -> PricedPlan | float:
    """The plan with its account; or how full its fullest group is (over 1)."""
    fullest = max(p / limit for p, limit in zip(counted.peaks, _limits(plan, draft, counted.graph), strict=True))
    if fullest > 1:
        return fullest
    solutions = [part.solution for part in draft.submesh_plans]
    before = {k: sum(s.before.get(k, 0) for s in solutions) for k in ("nodes", "variables")}
    after = {k: sum(s.after.get(k, 0) for s in solutions) for k in ("nodes", "variables")}
    cost = float(counted.step_time_s)
    gap = max(s.gap for s in solutions)
    method = "branch placement" if draft.shape == "any" else "stage DP"
    solution = Solution((), cost, counted.peak_bytes, cost * (1 - gap), method, before, after)
    return PricedPlan(replace(plan, predicted={"step_time_s": cost}), solution, account=counted)
