"""Pipelines worth having: the most promising cuts become plans, are lowered, and their schedules simulated.

`autopar.passes.search.cuts` proposes cuts; here each becomes a plan of the real program, is lowered once with B and W apart, and
every schedule that fits in memory is simulated: the fastest wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from autopar.errors import InputError, NoRoomError, PlanError
from autopar.ir.actions import StageGraph, Table, show_row
from autopar.ir.lowered import LoweredProgram
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.account.program import Account, account, step_seconds
from autopar.passes.lower import lower
from autopar.passes.lower.cut import cut, cut_points
from autopar.passes.memory.peak import group_peaks, stage_memory
from autopar.passes.schedule import SCHEDULES, ActionCosts, MemoryRoom, build, schedule_row, tried_by_default
from autopar.passes.schedule.grouped import grouped
from autopar.passes.search.cuts import Draft, Search
from autopar.passes.search.recompute_levels import fitted
from autopar.passes.search.spmd import Task
from autopar.passes.search.submesh import boundary_calls, least_bytes, same_structure
from autopar.passes.shard.mesh_plan import Candidate
from autopar.passes.shard.solve import Solution
from autopar.passes.stage import StageShortage
from autopar.plan import Plan, StagePlan
from autopar.report import size_text

MOST_TRIED, MOST_MADE, MOST_SHARES = 6, 3, 4
SHARE = 0.95
"""Of the memory, what is counted before lowering may take at first."""
Capture = Callable[[int], Task]


def search_pipelines(
    task: Task, batch: int, recapture: Capture, best_s: float, search: Search | None = None
) -> list[tuple[Task, Candidate]]:
    """Pipelines predicted faster than best_s (or any, where the options ask for one), best first, with their tasks.

    task: of the whole batch, or of one microbatch where the options fix their number. recapture(M): the task for M.
    search: one over these cuts that others may use afterwards, too.
    Raises InputError for stages that cannot be, InfeasibleError when the options ask for a pipeline that does not fit.
    """
    check_pipeline_options(task)
    forced = asks_for_pipeline(task.options)
    search = search or Search(task, batch, recapture, math.inf if forced else best_s)
    made: list[tuple[Draft, Candidate]] = []
    for rough, policy, draft in _promising(search):
        bar = made[0][1].solution.cost if made else search.best_s
        if draft.step_s >= bar or len(made) >= MOST_MADE:
            break
        found = _realised(search, rough, policy, draft, bar)
        if found is not None and found[1].solution.cost < bar:
            made = [found, *made]
    if made:
        made[0] = made[0][0], _less_recompute(*made[0])
    settled = _settled(search, made, recapture)
    if forced and not settled:
        raise NoRoomError(_no_pipeline(task, search.shortages))
    return settled


def _promising(search: Search) -> list[tuple[Draft, str | None, Draft]]:
    """(cut with memory left out, recompute policy, the cut within memory) of the most promising cuts, best first."""
    found: list[tuple[Draft, str | None, Draft]] = []
    best_s, tried = search.best_s, 0
    seen: set[Any] = set()
    for rough in search.rough():
        if rough.step_s >= best_s * 0.999 or tried >= MOST_TRIED:
            break
        key = rough.microbatches, *sorted({rough.ways[s.option].mesh.axes for s in rough.solution.stages})
        if not search.within_reach(rough):
            continue
        tried += key not in seen
        seen.add(key)
        for policy, draft in _within(search, rough):
            found.append((rough, policy, draft))
            best_s = min(best_s, 1.03 * draft.step_s)
    return sorted(found, key=lambda row: row[2].step_s)


def _within(search: Search, rough: Draft) -> Iterator[tuple[str | None, Draft]]:
    """The cut within memory; where that costs time, also with recompute chosen together with the sharding."""
    free = search.task.options.recompute == "auto" and search.task.program.training
    first = search.exact(rough, SHARE, "none" if free else None)
    if first is not None:
        yield "none" if free else None, first
    if free and (first is None or first.step_s > rough.step_s * 1.02):
        second = search.exact(rough, SHARE, "auto")
        if second is not None and (first is None or second.step_s < first.step_s):
            yield "auto", second


def _fitting(search: Search, rough: Draft, bar: float) -> tuple[Draft, Candidate] | None:
    """The cut as a plan that fits."""
    best: tuple[Draft, Candidate] | None = None
    for policy, draft in sorted(_within(search, rough), key=lambda row: row[1].step_s):
        found = _realised(search, rough, policy, draft, bar)
        if found is not None:
            bar, best = found[1].solution.cost, found
    return best if best is None else (best[0], _less_recompute(*best))


def _realised(
    search: Search, rough: Draft, policy: str | None, draft: Draft, bar: float
) -> tuple[Draft, Candidate] | None:
    """The cut as a plan that fits. What lives for a moment is known after lowering: where it is too much, the cut is made
    again in less memory."""
    share, made = SHARE, draft
    for _ in range(MOST_SHARES):
        candidate = realise(made.task, made)
        if isinstance(candidate, Candidate):
            return made, candidate
        if candidate == math.inf:
            return None
        share *= 0.97 / candidate
        again = search.exact(rough, share, policy)
        if again is None or again.step_s >= bar * 1.05:
            return None
        made = again
    return None


def _less_recompute(draft: Draft, candidate: Candidate) -> Candidate:
    """The same plan and schedule with as little recomputed as fits (`recompute_levels`), where that is faster."""
    task, plan, lowered = draft.task, candidate.plan, candidate.lowered
    assert lowered is not None
    if not any(t.recompute for stage in plan.stages for t in stage.templates.values()):
        return candidate

    def judge(changed: Plan) -> Account:
        made = lower(task.program, changed, task.pricers, task.rules)
        return account(made, changed.stages, task.program.templates, task.pricers, task.setting, task.rules)

    found = fitted(task.program, plan, lowered.graph.groups, task.limit, judge, task.pricers, task.rules)
    if isinstance(found, float) or found[1].step_time_s >= candidate.solution.cost:
        return candidate
    again = _candidate(task, found[0], draft, plan.schedule, plan.table)
    return candidate if isinstance(again, float) else again


def _settled(
    search: Search, made: list[tuple[Draft, Candidate]], recapture: Callable[[int], Task]
) -> list[tuple[Task, Candidate]]:
    """The best for the program as captured in its microbatches, and the others of as many microbatches."""
    found: list[tuple[Task, Candidate]] = []
    for draft, candidate in made:
        if found and draft.microbatches != found[0][1].plan.microbatches:
            continue
        owner = recapture(draft.microbatches)
        if owner is draft.task:
            found.append((owner, candidate))
        elif same_structure(owner.program, draft.task.program):
            plan = replace(candidate.plan, program=owner.program.fingerprint)
            if not found:
                candidate = replace(candidate, lowered=None, account=None)
            found.append(
                (owner, owner.finish(replace(candidate, plan=plan)) if not found else replace(candidate, plan=plan))
            )
        elif not found:
            again = _fitting(search, replace(draft, task=owner), math.inf)
            if again is not None:
                found.append((owner, again[1]))
    return found


def asks_for_pipeline(options: Options) -> bool:
    """Whether the options ask for more than one stage."""
    return options.stage_boundaries is not None or (options.pp or 1) > 1 or (options.chunks or 1) > 1


def check_pipeline_options(task: Task) -> None:
    """Raises InputError for more stages than there are places to cut, unknown schedules and boundaries."""
    options = task.options
    most = len(cut_points(task.program)) + 1
    want = (options.pp or 1) * (options.chunks or 1)
    if want > most or (options.pp or 1) > task.cluster.size:
        raise InputError(
            f"Options ask for {want} stages; this model can be cut into {most} at most (its blocks: "
            f"{', '.join(dict.fromkeys(c.path for c in task.program.calls if c.path))}), and the cluster has "
            f"{task.cluster.size} ranks; ask for fewer"
        )
    if options.schedule not in ("auto", *SCHEDULES):
        raise InputError(
            f"Options.schedule {options.schedule!r} is unknown; choose auto or one of {', '.join(SCHEDULES)}"
        )
    if options.stage_boundaries is not None:
        stages = len(boundary_calls(task.program, options.stage_boundaries)) + 1
        if options.pp not in (None, stages):
            raise InputError(
                f"Options.stage_boundaries {list(options.stage_boundaries)} make {stages} stages, Options.pp is {options.pp}; "
                "leave one of them out"
            )


# --- plans ------------------------------------------------------------------------------------------------------------


def realise(task: Task, draft: Draft) -> Candidate | float:
    """The draft as a lowered plan under its best schedule; or how full its fullest group is at least (over 1)."""
    pieces = draft.solution.stages
    ranges = [(s.start, s.end) for s in pieces]
    offsets: dict[int, int] = {}
    end = 0
    for members in draft.solution.groups:
        offsets |= dict.fromkeys(members, end)
        end += draft.ways[pieces[members[0]].option].mesh.size
    stages: list[StagePlan] = []
    for s, (part, piece) in enumerate(zip(cut(task.program, ranges), pieces, strict=True)):
        way = draft.ways[piece.option]
        stages.append(
            StagePlan(
                ranges[s],
                Mesh(way.mesh.axes, offsets[s]),
                {n: way.plan.templates[n] for n in part.templates},
                {n: way.plan.parameters[n] for n in part.parameters},
            )
        )
    first = "gpipe" if draft.chunks > 1 else "1f1b"
    plan = Plan(
        task.program.fingerprint,
        task.cluster.fingerprint(),
        task.cluster.size,
        tuple(stages),
        draft.microbatches,
        first if task.program.training else "forward",
        "solver",
    )
    return scheduled(task, plan, draft)


def scheduled(task: Task, plan: Plan, draft: Draft) -> Candidate | float:
    """The plan under the fastest schedule that fits, lowered; or how full its fullest group is at least (over 1)."""
    if not task.program.training:
        return _candidate(task, plan, draft, "forward", ())
    together = lower(
        task.program, replace(plan, schedule="gpipe", table=_rows(plan, draft, "B")), task.pricers, task.rules
    )
    whole = [stage_memory(stage, task.setting) for stage in together.stages]
    apart = replace(plan, schedule="gpipe", table=_rows(plan, draft, "BW"))
    lowered = lower(task.program, apart, task.pricers, task.rules)
    counted = account(lowered, plan.stages, task.program.templates, task.pricers, task.setting, task.rules)
    best: tuple[float, str, Table] | None = None
    least = math.inf
    for name in schedule_names(task, draft):
        table = schedule_table(name, lowered, counted, task)
        if table is None:
            continue
        split = any(action.kind == "W" for row in table for action in row)
        peaks = group_peaks(replace(lowered, table=table), [s.memory for s in counted.stages] if split else whole)
        fullest = max(p / limit for p, limit in zip(peaks, _limits(lowered, task), strict=True))
        least = min(least, fullest)
        if fullest > 1:
            continue
        seconds = step_seconds(counted, table)
        if best is None or seconds < best[0] * (1 - 1e-3):
            best = (seconds, name, table)
    if best is None:
        return least
    _, name, table = best
    written_out = schedule_row(name).timed or (draft.shape == "any" and draft.chunks > 1)
    rows = tuple(map(show_row, table)) if written_out else ()
    return _candidate(task, plan, draft, name, rows)


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


def schedule_table(name: str, lowered: LoweredProgram, counted: Account, task: Task) -> Table | None:
    """The table of a named schedule for these stages; None where it cannot serve. Raises when the user asked for it."""
    graph, M = lowered.graph, lowered.stages[0].microbatches
    try:
        row = schedule_row(name)
        if max(map(len, graph.groups)) > 1 and row.stages[1] == 1:
            return grouped(partial(build, name), graph, M)
        if row.timed:
            costs = ActionCosts(counted.seconds, counted.hand_over)
            return build(name, graph, M, costs=costs, memory=_room(graph, counted, _limits(lowered, task)))
        return build(name, graph, M)
    except PlanError:
        if name == task.options.schedule:
            raise
        return None


def _limits(lowered: LoweredProgram, task: Task) -> list[float]:
    """Bytes that a rank of every group has."""
    return [task.limit_at(lowered.stages[stages[0]].mesh.offset) for stages in lowered.graph.groups]


def _room(graph: StageGraph, counted: Account, limits: list[float]) -> MemoryRoom:
    after_F = tuple(s.memory.actions["F"].after for s in counted.stages)
    after_B = tuple(min(s.memory.actions["B"].after, f) for s, f in zip(counted.stages, after_F, strict=True))
    bound = []
    for stages, limit in zip(graph.groups, limits, strict=True):
        resting = sum(counted.stages[s].memory.resting_bytes for s in stages)
        beside = max(max(m.peak - m.after, 0.0) for s in stages for m in counted.stages[s].memory.actions.values())
        bound.append(max(limit - resting - beside, 0.0))
    return MemoryRoom(tuple(bound), after_F, after_B)


def _rows(plan: Plan, draft: Draft, backward: str) -> tuple[str, ...]:
    """A table to lower for. backward: "B", or "BW", so that lowering takes B and W apart."""
    rows = []
    for stages in sorted(draft.solution.groups):
        ms = range(plan.microbatches)
        words = [f"F{m}.{s}" for s in stages for m in ms]
        words += [f"{kind}{m}.{s}" for s in reversed(stages) for m in ms for kind in backward]
        rows.append(" ".join(words))
    return tuple(rows)


def _candidate(task: Task, plan: Plan, draft: Draft, schedule: str, rows: tuple[str, ...]) -> Candidate | float:
    plan = replace(plan, schedule=schedule, table=rows)
    lowered = lower(task.program, plan, task.pricers, task.rules)
    counted = account(lowered, plan.stages, task.program.templates, task.pricers, task.setting, task.rules)
    fullest = max(p / limit for p, limit in zip(counted.peaks, _limits(lowered, task), strict=True))
    if fullest > 1:
        return fullest
    before = {k: sum(w.solution.before.get(k, 0) for w in draft.ways) for k in ("nodes", "variables")}
    after = {k: sum(w.solution.after.get(k, 0) for w in draft.ways) for k in ("nodes", "variables")}
    cost = float(counted.step_time_s)
    gap = max(w.solution.gap for w in draft.ways)
    method = "branch placement" if draft.shape == "any" else "stage DP"
    solution = Solution((), cost, counted.peak_bytes, cost * (1 - gap), method, before, after)
    return Candidate(replace(plan, predicted={"step_time_s": cost}), solution, lowered, counted)


def _no_pipeline(task: Task, shortages: list[StageShortage]) -> str:
    options = task.options
    asked = f"pp={options.pp}" if options.pp else f"stages at {list(options.stage_boundaries or ())}"
    if not shortages:
        resting, held = least_bytes(task)
        least = resting / task.cluster.size
        short = (
            f"parameters, gradients and optimizer state alone take {size_text(least)} however they are sharded; use "
            f"{math.ceil(task.cluster.size * least / task.limit)} ranks or more, or as much memory"
            if least > task.limit
            else f"they take {size_text(least)} at best and one microbatch holds {size_text(held / task.cluster.size)} beside; "
            "use more microbatches, another schedule, or leave them to the search"
        )
        return (
            f"no pipeline with {asked} fits in {size_text(task.limit)} per rank with microbatches="
            f"{options.microbatches or 'any'} and schedule={options.schedule}: {short}"
        )
    nearest = min(shortages, key=lambda s: s.ratio)
    return (
        f"no pipeline with {asked} fits: {nearest.describe()}. With {size_text(nearest.needed_bytes)} per rank it would; or "
        f"use {math.ceil(task.cluster.size * nearest.ratio)} ranks, more stages, or more microbatches of a smaller size"
    )
