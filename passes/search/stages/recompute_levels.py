"""How much the stages of a pipeline recompute: as little as fits, in the least predicted seconds.

Every template has a convex curve of (bytes kept, seconds computed again), `autopar.passes.recompute.choose.hull`. A price
per byte cuts all curves of a group of ranks, so their corners in order of seconds per byte saved are levels: level 0
keeps everything, every further one moves one template to its next corner. The level is found by bisection, and every level
that is looked at is lowered and accounted for: values that backward holds while it runs again count.

The strategies of the plan stay as they are: they and its recompute were chosen together for the stage that holds most
(`autopar.passes.search.one_mesh.joint`), and the later stages hold less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.ir.program import Program
from autopar.passes.account.program import Account
from autopar.passes.lower.cut import cut
from autopar.passes.recompute.choose import Choice, hull
from autopar.passes.recompute.problem import recompute_problems
from autopar.passes.search.task import Task
from autopar.plan import Plan, StagePlan, TemplatePlan

Level = dict[tuple[int, str], TemplatePlan]
"""Plans of the templates of one group, per (stage, template)."""
_INNER = (0.25, 0.5, 0.75)
"""Where between keeping all and keeping least a plan is looked for when the last level does not fit."""


def fitted(
    task: Task, plan: Plan, groups: Sequence[Sequence[int]], account: Callable[[Plan], Account]
) -> tuple[Plan, Account] | float:
    """The plan with as little recomputed as fits, and its account; or the least peak that was seen.

    groups: the stages of every group of ranks. account: lowers a plan and accounts for it. Peaks are taken to fall from
    level to level; where the last level does not fit (what runs again needs room itself), levels between are looked at.
    """
    by_group = levels(task, plan, groups)
    limits = [task.limit_at(plan.stages[members[0]].mesh) for members in groups]

    def at(chosen: Sequence[int]) -> tuple[Plan, Account]:
        changed = _with_levels(plan, [group[k] for group, k in zip(by_group, chosen, strict=True)])
        return changed, account(changed)

    low = [-1] * len(by_group)
    high = [len(group) - 1 for group in by_group]
    last = at(high)
    if task.short_bytes(*last) > 0:
        inner = [at([round(part * (len(group) - 1)) for group in by_group]) for part in _INNER]
        return min(
            (result for result in inner if task.short_bytes(*result) <= 0),
            key=lambda result: result[1].step_time_s,
            default=min(result[1].peak_bytes for result in (*inner, last)),
        )
    seen = {tuple(high): last}
    while any(b - a > 1 for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 if b - a > 1 else b for a, b in zip(low, high, strict=True)]
        result = seen[tuple(middle)] = at(middle)
        for g, peak in enumerate(result[1].peaks):
            if high[g] - low[g] > 1:
                side = high if peak <= limits[g] else low
                side[g] = middle[g]
    return seen.get(tuple(high)) or at(high)


def levels(task: Task, plan: Plan, groups: Sequence[Sequence[int]]) -> list[list[Level]]:
    """Per group of stages its levels, from keeping everything to keeping the least."""
    parts = cut(task.program, [stage.calls for stage in plan.stages])
    by_group: list[list[Level]] = []
    for members in groups:
        start = {(s, n): replace(t, recompute=()) for s in members for n, t in plan.stages[s].templates.items()}
        moves: list[tuple[float, int, tuple[int, str], TemplatePlan]] = []
        for s in members:
            for name, corners in _curves(task, parts[s], plan.stages[s]).items():
                price = 0.0
                for k, corner in enumerate(corners):
                    if corner.recompute:
                        price = max(_price(corners, k), price)
                        moves.append((price, k, (s, name), replace(start[s, name], recompute=corner.recompute)))
        moves.sort(key=lambda move: move[:3])
        group_levels = [start]
        for _, _, key, template in moves:
            group_levels.append({**group_levels[-1], key: template})
        by_group.append(group_levels)
    return by_group


def _with_levels(plan: Plan, chosen: Sequence[Level]) -> Plan:
    """The plan with one level for every group."""
    stages = list(plan.stages)
    for level in chosen:
        for (s, name), template in level.items():
            stages[s] = replace(stages[s], templates={**stages[s].templates, name: template})
    return replace(plan, stages=tuple(stages))


def _price(corners: list[Choice], k: int) -> float:
    """Seconds per byte that the step to corner k costs."""
    if k == 0:
        return 0.0
    a, b = corners[k - 1], corners[k]
    return (b.again_s - a.again_s) / (a.bytes_kept - b.bytes_kept)


def _curves(task: Task, part: Program, stage: StagePlan) -> dict[str, list[Choice]]:
    """Per template of a stage that has a backward the corners of its curve, seconds ascending."""
    problems = recompute_problems(part, stage, task.pricers[stage.mesh], task.rules)
    return {name: hull(problem) for name, problem in problems.items()}
