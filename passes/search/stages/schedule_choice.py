"""The fastest schedule that fits: what the stages of a plan cost is found once, and every schedule is simulated."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from autopar.errors import PlanError
from autopar.ir.actions import StageGraph, Table, show_row
from autopar.passes.account.program import Account, step_seconds, under
from autopar.passes.memory.peak import StageMemory, group_peaks
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
    """The plan under the fastest schedule that fits; or how full its fullest group is at least (over 1).

    useless_from_s: a plan that takes so many seconds or more is of no interest, and need not be found.
    """
    task = draft.task
    together = task.stage_costs(plan, False)
    if not task.program.training:
        return candidate_under(plan, draft, under(together, build("forward", together.graph, plan.microbatches)))
    apart = task.stage_costs(plan, True)
    together_memory, limits_bytes = [s.memory for s in together.stages], _limits(plan, draft, apart.graph)
    result = fastest_schedule(draft, apart, together_memory, limits_bytes, useless_from_s)
    if isinstance(result, float):
        return result
    name, table = result
    written_out = schedule_row(name).timed or (draft.shape == "any" and draft.chunks > 1)
    rows = tuple(map(show_row, table)) if written_out else ()
    costs = apart if _splits(table) else together
    return candidate_under(replace(plan, schedule=name, table=rows), draft, under(costs, table))


def fastest_schedule(
    draft: Draft,
    apart: Account,
    together_memory: list[StageMemory],
    limits_bytes: list[float],
    useless_from_s: float = math.inf,
) -> tuple[str, Table] | float:
    """Name and table of the fastest schedule that fits; or how full the fullest group is at least (over 1).

    apart: what the stages cost with B and W apart. together_memory: bytes of the stages with both in one action, as
    schedules that do not split them have it. limits_bytes: what a rank of every group has. useless_from_s: a schedule that
    takes so many seconds or more is of no interest; one that takes that in any table of its form is not built.
    """
    apart_memory = [s.memory for s in apart.stages]
    best: tuple[float, str, Table] | None = None
    least = math.inf
    least_s = {
        True: _least_step_s(apart, apart.seconds, apart_memory, limits_bytes),
        False: _least_step_s(apart, _blocks(apart.seconds), together_memory, limits_bytes),
    }
    for name in schedule_names(draft.task, draft):
        if least_s[schedule_row(name).splits_backward] >= (useless_from_s if best is None else best[0] * (1 - _FASTER)):
            continue
        table = schedule_table(name, draft, apart, limits_bytes)
        if table is None:
            continue
        peaks = group_peaks(apart.graph, table, apart_memory if _splits(table) else together_memory)
        fullest = max(p / limit for p, limit in zip(peaks, limits_bytes, strict=True))
        least = min(least, fullest)
        if fullest > 1:
            continue
        seconds = step_seconds(apart, table)
        if seconds < (useless_from_s if best is None else best[0] * (1 - _FASTER)):
            best = (seconds, name, table)
    return best[1:] if best is not None else least


def _least_step_s(
    counted: Account, seconds: dict[tuple[int, str], float], memory: list[StageMemory], limits_bytes: list[float]
) -> float:
    """Seconds that a step takes in any table whose actions take so many seconds and bytes."""
    graph = counted.graph
    most_held = [
        _most_held(stage, limits_bytes[graph.group_of[s]] - stage.resting_bytes) for s, stage in enumerate(memory)
    ]
    costs = ActionCosts(seconds, counted.hand_over)
    return counted.least_step_s(least_span_s(graph, counted.microbatches, costs, most_held))


def _blocks(seconds: dict[tuple[int, str], float]) -> dict[tuple[int, str], float]:
    """Seconds of actions where W is part of B."""
    blocks = {(s, kind): t + (seconds[s, "W"] if kind == "B" else 0.0) for (s, kind), t in seconds.items()}
    return {(s, kind): 0.0 if kind == "W" else t for (s, kind), t in blocks.items()}


def _most_held(stage: StageMemory, room: float) -> float:
    """Microbatches that a stage can hold at once in so many bytes when its first B begins."""
    moments = {kind: [of[kind] for of in (stage.actions, stage.first, stage.last) if kind in of] for kind in "FB"}
    held = min(moment.after for moment in moments["F"])
    beside = max(min(moment.peak for moment in of_kind) for of_kind in moments.values())
    return 1 + max(room - beside, 0.0) * (1 + 1e-9) // held if held > 0 else math.inf


def _splits(table: Table) -> bool:
    """Whether B and W are apart."""
    return any(action.kind == "W" for row in table for action in row)


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
