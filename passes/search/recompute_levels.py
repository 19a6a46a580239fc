"""How much to recompute: from a plan that needs too much memory to one that fits, in the least predicted seconds.

Every template has a convex curve of (bytes kept, seconds made again), `autopar.passes.recompute.choose.hull`. One price
per byte cuts all curves of a group of ranks, so their corners in order of seconds per byte saved are levels: level 0
keeps all, every further one moves one template to its next corner. The level is found by bisection, and every level that
is looked at is lowered and accounted: what backward holds while it runs again counts.

The strategies of a plan stay as they are: this is for the stages of a pipeline, whose sharding and recompute were chosen
together for the stage that holds most (`autopar.passes.search.joint`), and of which the later ones hold less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.ir.program import Program
from autopar.passes.account.program import Account
from autopar.passes.lower.cut import cut
from autopar.passes.price.pricer import Pricers
from autopar.passes.recompute.choose import Choice, hull
from autopar.passes.recompute.problem import recompute_problems
from autopar.passes.rules.book import RuleBook
from autopar.plan import Plan, StagePlan, TemplatePlan

Judge = Callable[[Plan], Account]


@dataclass(frozen=True)
class Level:
    """What the stages of one group recompute, per (stage, template)."""

    plans: dict[tuple[int, str], TemplatePlan]


def levels(
    program: Program, plan: Plan, groups: Sequence[Sequence[int]], pricers: Pricers, rules: RuleBook
) -> list[list[Level]]:
    """Per group of stages its levels, from keeping everything to keeping the least."""
    parts = cut(program, [stage.calls for stage in plan.stages])
    found = []
    for members in groups:
        start = {(s, n): replace(t, recompute=()) for s in members for n, t in plan.stages[s].templates.items()}
        moves: list[tuple[float, int, tuple[int, str], TemplatePlan]] = []
        for s in members:
            for name, corners in curves(parts[s], plan.stages[s], pricers, rules).items():
                before = 0.0
                for k, corner in enumerate(corners):
                    if not corner.recompute:
                        continue
                    price = max(_price(corners, k), before)
                    before = price
                    moves.append((price, k, (s, name), replace(start[s, name], recompute=corner.recompute)))
        moves.sort(key=lambda move: move[:3])
        rows = [Level(start)]
        for _, _, key, template in moves:
            rows.append(Level({**rows[-1].plans, key: template}))
        found.append(rows)
    return found


def _price(corners: list[Choice], k: int) -> float:
    """Seconds per byte that the step to corner k costs."""
    if k == 0:
        return 0.0
    a, b = corners[k - 1], corners[k]
    return (b.again_s - a.again_s) / (a.bytes_kept - b.bytes_kept)


def curves(part: Program, stage: StagePlan, pricers: Pricers, rules: RuleBook) -> dict[str, list[Choice]]:
    """Per template of a stage that has a backward the corners of its curve, seconds ascending."""
    problems = recompute_problems(part, stage, pricers[stage.mesh], rules)
    return {name: hull(problem) for name, problem in problems.items()}


def fitted(
    program: Program,
    plan: Plan,
    groups: Sequence[Sequence[int]],
    limit: float,
    judge: Judge,
    pricers: Pricers,
    rules: RuleBook,
) -> tuple[Plan, Account] | float:
    """The plan with as little recomputed as fits, and its account; or the least peak that was seen.

    judge: the lowered plan's account. Peaks are taken to fall from level to level; where the last one does not fit (what
    runs again needs room itself), the ones between are looked at, too.
    """
    rows = levels(program, plan, groups, pricers, rules)

    def at(chosen: Sequence[int]) -> tuple[Plan, Account]:
        stages = list(plan.stages)
        for row, k in zip(rows, chosen, strict=True):
            for (s, name), template in row[k].plans.items():
                stages[s] = replace(stages[s], templates={**stages[s].templates, name: template})
        made = replace(plan, stages=tuple(stages))
        return made, judge(made)

    low = [-1] * len(rows)
    high = [len(row) - 1 for row in rows]
    last = at(high)
    seen = {tuple(high): last}
    if last[1].peak_bytes > limit:
        tried = [at([round(share * (len(row) - 1)) for row in rows]) for share in (0.25, 0.5, 0.75)]
        return min(
            (t for t in tried if t[1].peak_bytes <= limit),
            key=lambda t: t[1].step_time_s,
            default=min(t[1].peak_bytes for t in (*tried, last)),
        )
    while any(b - a > 1 for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 if b - a > 1 else b for a, b in zip(low, high, strict=True)]
        made = seen[tuple(middle)] = at(middle)
        for g, peak in enumerate(made[1].peaks):
            if high[g] - low[g] > 1:
                low, high = _halve(low, high, g, middle[g], peak <= limit)
    return seen.get(tuple(high)) or at(high)


def _halve(low: list[int], high: list[int], g: int, middle: int, fits: bool) -> tuple[list[int], list[int]]:
    if fits:
        return low, [middle if i == g else k for i, k in enumerate(high)]
    return [middle if i == g else k for i, k in enumerate(low)], high
