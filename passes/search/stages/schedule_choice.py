"""The fastest schedule that fits: what the stages of a plan cost is found once, and every schedule is simulated."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import PlanError
from autopar.ir.actions import StageGraph, Table, show_row, splits_backward
from autopar.ir.lowered import LoweredProgram
from autopar.passes.account.program import Account, under
from autopar.passes.memory.peak import Moment, StageMemory
from autopar.passes.schedule import ActionCosts, MemoryRoom, build, least_span_s, schedule_row, tried_by_default
from autopar.passes.schedule.grouped import grouped
from autopar.passes.search.by_microbatch import lowered_reducing, reduced_by_microbatch
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.task import Task
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Solution
from autopar.plan import Plan
from autopar.runtime.step.pipeline import most_sends

_FASTER = 1e-3
"""A schedule replaces a simpler one that is slower by more than this, relative."""
_FAR = 1.1
"""A timed schedule that takes so many times what is to be beaten is not made in less room."""
_LESS_ROOM = 0.995
"""A timed schedule is made in this share of its room too: what fills it greedily is at times slower in a little more of it."""


@dataclass(frozen=True)
class OutlinedPlan:
    """A plan whose stages were lowered, with B and W together and (in training) apart, each with what they cost so."""

    plan: Plan
    together: tuple[LoweredProgram, Account]
    apart: tuple[LoweredProgram, Account] | None

    @staticmethod
    def of(task: Task, plan: Plan) -> OutlinedPlan:
        """The plan with its stages lowered."""
        forms = [task.outline(plan, split) for split in (False, True) if task.program.training or not split]
        together, *apart = [(lowered, task.costs_of(plan, lowered)) for lowered in forms]
        return OutlinedPlan(plan, together, apart[0] if apart else None)

    def reducing(self, task: Task, names: Collection[str]) -> OutlinedPlan:
        """The plan with the gradients of these parameters reduced after every microbatch: it runs the same lines."""
        plan = reduced_by_microbatch(self.plan, names)

        def again(lowered: LoweredProgram, counted: Account) -> tuple[LoweredProgram, Account]:
            reducing = lowered_reducing(lowered, names)
            return reducing, task.costs_of(plan, reducing, counted)

        return OutlinedPlan(plan, again(*self.together), None if self.apart is None else again(*self.apart))


def scheduled(outlined: OutlinedPlan, draft: Draft, useless_from_s: float = math.inf) -> PricedPlan | float:
    """The plan under the fastest schedule that fits; or how full its fullest group is at least under one that is fast enough
    (over 1; infinite where none is).

    useless_from_s: a plan that takes so many seconds or more is of no interest, and need not be found.
    """
    plan, (_, together) = outlined.plan, outlined.together
    if outlined.apart is None:
        return candidate_under(plan, draft, under(together, build("forward", together.graph, plan.microbatches)))
    _, apart = outlined.apart
    limits_bytes = _limits(plan, draft, apart.graph)
    there_bytes = [draft.task.limit_on_devices(plan.stages[stages[0]].mesh) for stages in apart.graph.groups]
    result = fastest_schedule(draft, apart, together, limits_bytes, there_bytes, useless_from_s)
    if isinstance(result, float):
        return result
    name, counted = result
    written_out = schedule_row(name).timed or (draft.shape == "any" and draft.chunks > 1)
    rows = tuple(map(show_row, counted.table)) if written_out else ()
    return candidate_under(replace(plan, schedule=name, table=rows), draft, counted)


def fastest_schedule(
    draft: Draft,
    apart: Account,
    together: Account,
    limits_bytes: list[float],
    there_bytes: list[float],
    useless_from_s: float = math.inf,
) -> tuple[str, Account] | float:
    """Name and account of the fastest schedule that fits; or how full the fullest group is at least under one that is fast
    enough (over 1; infinite where none is).

    apart: what the stages cost with B and W apart; together: with both in one action, as schedules that do not split them
    have it. limits_bytes: what a rank of every group may take; there_bytes: as much of it as its device has, within which
    timed tables are made where one microbatch fits, as they fill what they are given. useless_from_s: a schedule that takes
    so many seconds or more is of no interest; one that takes that in any table of its form is not built, and none is
    searched where all that fit take it.
    """
    best: tuple[str, Account] | None = None
    least = no_room = math.inf
    room = _room(apart.graph, apart, limits_bytes)
    one_microbatch = _full_with_one(apart.graph, limits_bytes, room)
    least_s = {True: _least_step_s(apart), False: _least_step_s(together)}
    within_s = _least_step_s(apart, limits_bytes)
    costs = ActionCosts(apart.seconds, apart.hand_over)
    too_many = (limit - nbytes for limit, nbytes in zip(limits_bytes, there_bytes, strict=True))
    there = replace(room, bound=tuple(bound - more for bound, more in zip(room.bound, too_many, strict=True)))
    filled = there if _full_with_one(apart.graph, there_bytes, there) <= 1 else room
    rooms = [filled, _less(apart.graph, filled)]
    for name in schedule_names(draft.task, draft):
        row = schedule_row(name)
        for space in rooms[: 1 + row.timed]:
            to_beat_s = useless_from_s if best is None else best[1].step_time_s * (1 - _FASTER)
            if least_s[row.splits_backward] >= to_beat_s:
                break
            if row.timed and one_microbatch > 1:
                no_room = one_microbatch
                break
            if row.timed and within_s >= to_beat_s:
                break
            table = schedule_table(name, draft, apart.graph, costs, space)
            if table is None:
                continue
            counted = under(apart if splits_backward(table) else together, table)
            if counted.step_time_s >= _FAR * to_beat_s:
                break
            if counted.step_time_s >= to_beat_s:
                continue
            fullest = max(p / limit for p, limit in zip(counted.peaks, limits_bytes, strict=True))
            if fullest > 1:
                least = min(least, fullest)
            else:
                best = name, counted
    return best if best is not None else no_room if least == math.inf else least


def _least_step_s(counted: Account, limits_bytes: list[float] | None = None) -> float:
    """Seconds that a step of stages that cost so much takes in any table, or in any that keeps to the limits of groups."""
    graph, most_held = counted.graph, [math.inf] * counted.graph.stages
    if limits_bytes is not None:
        memory = [stage.memory for stage in counted.stages]
        most_held = [_most_held(m, limits_bytes[graph.group_of[s]] - m.resting_bytes) for s, m in enumerate(memory)]
    costs = ActionCosts(counted.seconds, counted.hand_over)
    span_s = least_span_s(graph, counted.microbatches, costs, most_held)
    return counted.read(lambda _: span_s).step_s


def _most_held(stage: StageMemory, room: float) -> float:
    """Microbatches that a stage can hold at once in so many bytes: there is room for an F or B beside all others."""
    held = min(moment.after for moment in _moments(stage, "F"))
    beside = max(min(moment.peak for moment in _moments(stage, kind)) for kind in "FB")
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


def schedule_table(name: str, draft: Draft, graph: StageGraph, costs: ActionCosts, room: MemoryRoom) -> Table | None:
    """The table of a named schedule for these stages, timed ones within a room; None where it cannot serve. Raises when the
    user asked for it."""
    M = draft.microbatches
    try:
        row = schedule_row(name)
        if max(map(len, graph.groups)) > 1 and row.stages[1] == 1:
            return grouped(partial(build, name), graph, M)
        if row.timed:
            return build(name, graph, M, costs=costs, memory=room)
        return build(name, graph, M)
    except PlanError:
        if name == draft.task.options.schedule:
            raise
        return None


def _limits(plan: Plan, draft: Draft, graph: StageGraph) -> list[float]:
    """Bytes that a rank of every group has."""
    return [draft.task.limit_at(plan.stages[stages[0]].mesh) for stages in graph.groups]


def _room(graph: StageGraph, counted: Account, limits: list[float]) -> MemoryRoom:
    """The room of a schedule, so that what it fills keeps to the limits: per group the bytes that neither rest, nor are
    gradients, nor live for a moment."""
    memory = [stage.memory for stage in counted.stages]
    after_F, after_B = (tuple(max(m.after for m in _moments(stage, kind)) for stage in memory) for kind in "FB")
    most_held = [{"F": f, "B": max(f, b), "W": b} for f, b in zip(after_F, after_B, strict=True)]
    bound = []
    for stages, limit in zip(graph.groups, limits, strict=True):
        resting = sum(memory[s].resting_bytes for s in stages)
        sums = {(s, kind): _summed(memory[s], kind, counted.microbatches) for s in stages for kind in "FBW"}
        received = max(m.received for s in stages for kind in "FBW" for m in _moments(memory[s], kind))
        beside = 0.0
        for s, kind in sums:
            others = sum(sums.values()) - sums[s, kind]
            for m in _moments(memory[s], kind):
                before = others if m is memory[s].first.get(kind) else others + sums[s, kind] - max(m.sums, 0.0)
                need = max(m.peak, m.after + m.sums + m.sent + received) + m.received
                beside = max(beside, before + need - most_held[s][kind])
        sent = [m.sent for s in stages if memory[s].runs_ahead for kind in "FBW" for m in _moments(memory[s], kind)]
        bound.append(limit - resting - beside - most_sends(len(graph.groups)) * max(sent, default=0.0))
    return MemoryRoom(tuple(bound), after_F, after_B)


def _less(graph: StageGraph, room: MemoryRoom) -> MemoryRoom:
    """A little less of a room, in which one microbatch fits if it does in the room."""
    groups = zip(graph.groups, room.bound, strict=True)
    return replace(room, bound=tuple(max(_LESS_ROOM * n, min(n, room.least(stages))) for stages, n in groups))


def _full_with_one(graph: StageGraph, limits: list[float], room: MemoryRoom) -> float:
    """How full the fullest group is with one microbatch on its stages."""
    groups = zip(graph.groups, limits, room.bound, strict=True)
    return max((limit - bound + room.least(stages)) / limit for stages, limit, bound in groups)


def _moments(stage: StageMemory, kind: str) -> list[Moment]:
    """The moments of a stage's actions of a kind: of one among others, of the first and of the last."""
    return [moments[kind] for moments in (stage.actions, stage.first, stage.last) if kind in moments]


def _summed(stage: StageMemory, kind: str, microbatches: int) -> float:
    """The most bytes that actions of a kind add to the gradient store in a step."""
    middle = stage.actions[kind]
    first, last = stage.first.get(kind, middle), stage.last.get(kind, middle)
    order = [last] if microbatches == 1 else [first, last]
    return sum(max(m.sums, 0.0) for m in order) + max(microbatches - 2, 0) * max(middle.sums, 0.0)


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
