"""How much the stages of a plan recompute: as little as fits, in the least predicted seconds.

Every template has a convex curve of (bytes kept, seconds computed again), `autopar.passes.recompute.choose.hull`. A price
per byte cuts all curves of a group of ranks, so their corners in order of seconds per byte saved are steps: at first everything
is kept, then every step moves one template of a stage to its next corner. It does so call by call, the first calls first, so a
group has a line of levels along which ever fewer bytes are kept:

    all calls of layers keep everything
    layers recompute h in 1 call, in 2, in 3, in all 4
    layers recompute h and q in 1 call and h in the others, h and q in 2 calls, …

The first level that fits is looked for as if peaks grew in a straight line with the bytes kept, as they nearly do. Every level
that is looked at is lowered and accounted for: values that backward holds while it runs again count.

The strategies of the plan stay as they are: they and its recompute were chosen together for the stage that holds most
(`autopar.passes.search.one_mesh.joint`), and the later stages hold less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.ir.actions import splits_backward
from autopar.ir.program import Program
from autopar.passes.account.program import Account, under
from autopar.passes.lower.cut import cut
from autopar.passes.recompute.choose import Choice, hull, of_values
from autopar.passes.recompute.problem import RecomputeProblem, recompute_problems
from autopar.passes.search.task import Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan, TemplatePlan

Place = tuple[int, str]
"""A stage, and a template of it."""
_LITTLE = 1e-4
"""A level that could spare no more than this share of a step is not looked at."""
_STRAIGHT = 4
"""So many levels are looked at as if peaks grew in a straight line; after that what is left is halved."""


@dataclass(frozen=True)
class _Level:
    """One way in which the templates of a group recompute, the bytes that it keeps of one microbatch, and the seconds that a step
    computes again."""

    templates: Mapping[Place, TemplatePlan]
    kept_bytes: float
    again_s: float


@dataclass
class _Line:
    """The levels of a group, and what is known of them.

    too_much: the last level that is known not to fit (-1: none). fits: the first that is known to (one past the last: none). kept
    bytes, peak: of what was looked at last. slope: bytes of the peak per byte kept.
    """

    levels: Sequence[_Level]
    limit: float
    kept_bytes: float
    peak: float
    slope: float
    too_much: int = -1
    fits: int = -1
    looks: int = 0

    def __post_init__(self) -> None:
        self.fits = len(self.levels)

    def most_likely(self, step_s: float) -> int:
        """The level that is most likely the first that fits; the first that is known to where none before it would spare enough
        of a step of so many seconds."""
        first, last = self.too_much + 1, len(self.levels) - 1
        if first >= self.fits:
            return min(self.fits, last)
        if self.fits <= last and self.levels[self.fits].again_s - self.levels[first].again_s <= _LITTLE * step_s:
            return self.fits
        if self.looks >= _STRAIGHT:
            return (first + self.fits) // 2
        kept = self.kept_bytes + (self.limit - self.peak) / self.slope
        level = bisect_left(self.levels, -kept, key=lambda level: -level.kept_bytes)
        return min(max(level, first), self.fits - 1)

    def note(self, k: int, peak: float) -> None:
        """The peak that a level has."""
        if peak <= self.limit:
            self.fits = min(self.fits, k)
        else:
            self.too_much = max(self.too_much, k)
        kept = self.levels[k].kept_bytes
        if (kept - self.kept_bytes) * (peak - self.peak) > 0:
            self.slope = (peak - self.peak) / (kept - self.kept_bytes)
        self.kept_bytes, self.peak, self.looks = kept, peak, self.looks + 1


def with_less_recompute(task: Task, candidate: PricedPlan) -> tuple[Plan, Account] | None:
    """The plan of a candidate with as little recomputed as fits, and its account under the same schedule; None where the options
    say what is recomputed, or it is no faster."""
    plan, counted = candidate.plan, account_of(candidate)
    recomputes = any(t.recompute for stage in plan.stages for t in stage.templates.values())
    if task.options.recompute != "auto" or not recomputes:
        return None
    split, lines = splits_backward(counted.table), _lines(task, plan, counted)
    chosen: list[int] = []
    while (following := [line.most_likely(counted.step_time_s) for line in lines]) != chosen:
        chosen = following
        less = _at(plan, [line.levels[k] for line, k in zip(lines, chosen, strict=True)])
        costs = under(task.stage_costs(less, split), counted.table)
        for line, k, peak in zip(lines, chosen, costs.peaks, strict=True):
            line.note(k, peak)
    return (less, costs) if task.short_bytes(less, costs) <= 0 and costs.step_time_s < candidate.step_s else None


def _lines(task: Task, plan: Plan, counted: Account) -> list[_Line]:
    """The levels of every group of ranks. counted: the account of the plan, from which the first look starts."""
    parts = cut(task.program, [stage.calls for stage in plan.stages])
    problems = [
        recompute_problems(part, stage, task.pricers[stage.mesh], task.rules)
        for part, stage in zip(parts, plan.stages, strict=True)
    ]
    lines = []
    for members, peak in zip(counted.graph.groups, counted.peaks, strict=True):
        places = {(s, name): problem for s in members for name, problem in problems[s].items()}
        kept = sum(_kept_bytes(plan, parts, place, problem) for place, problem in places.items())
        resting = sum(counted.stages[s].memory.resting_bytes for s in members)
        slope = (peak - resting) / kept if kept and peak > resting else 1.0
        levels = tuple(_levels(plan, parts, members, places))
        lines.append(_Line(levels, task.limit_at(plan.stages[members[0]].mesh), kept, peak, slope))
    return lines


def _kept_bytes(plan: Plan, parts: Sequence[Program], place: Place, problem: RecomputeProblem) -> float:
    """Bytes that the calls of a template keep under a plan. parts: the stages' programs."""
    s, name = place
    template, calls = plan.stages[s].templates[name], _calls(parts[s], name)
    first = calls if template.recompute_calls is None else template.recompute_calls
    after = of_values(problem, template.recompute_after).bytes_kept if first < calls else 0.0
    return first * of_values(problem, template.recompute).bytes_kept + (calls - first) * after


def _calls(part: Program, template: str) -> int:
    """How many calls of a template have a backward."""
    return sum(part.calls[i].template == template for i in part.backward_calls)


def _levels(
    plan: Plan, parts: Sequence[Program], members: Sequence[int], problems: Mapping[Place, RecomputeProblem]
) -> Iterator[_Level]:
    """The levels of the stages of a group, from keeping everything to keeping the least. parts: the stages' programs."""
    templates = {
        (s, name): replace(template, recompute=(), recompute_calls=None, recompute_after=())
        for s in members
        for name, template in plan.stages[s].templates.items()
    }
    corners = {place: _corners(problem) for place, problem in problems.items()}
    calls = {(s, name): _calls(parts[s], name) for s, name in problems}
    kept = sum(calls[place] * choices[0].bytes_kept for place, choices in corners.items())
    again = plan.microbatches * sum(calls[place] * choices[0].again_s for place, choices in corners.items())
    yield _Level(templates, kept, again)
    steps = [step for place, choices in corners.items() for step in _steps(place, choices)]
    for _, k, place in sorted(steps):
        before, after = corners[place][k - 1], corners[place][k]
        moved = replace(templates[place], recompute=after.recompute)
        templates = {**templates, place: moved}
        for n in range(1, calls[place] + 1):
            kept -= before.bytes_kept - after.bytes_kept
            again += plan.microbatches * (after.again_s - before.again_s)
            part = replace(moved, recompute_calls=n, recompute_after=before.recompute) if n < calls[place] else moved
            yield _Level({**templates, place: part}, kept, again)


def _corners(problem: RecomputeProblem) -> list[Choice]:
    """Everything kept, then the corners of the template's curve, seconds ascending."""
    return [of_values(problem, ()), *(choice for choice in hull(problem) if choice.recompute)]


def _steps(place: Place, corners: Sequence[Choice]) -> Iterator[tuple[float, int, Place]]:
    """The price of every step from corner to corner in seconds per byte, none below one before it, with the corner's number."""
    price = 0.0
    for k, (a, b) in enumerate(pairwise(corners), 1):
        saved = a.bytes_kept - b.bytes_kept
        price = max(price, (b.again_s - a.again_s) / saved) if saved > 0 else price
        yield price, k, place


def _at(plan: Plan, chosen: Sequence[_Level]) -> Plan:
    """The plan with one level for every group."""
    stages = list(plan.stages)
    for level in chosen:
        for (s, name), template in level.templates.items():
            stages[s] = replace(stages[s], templates={**stages[s].templates, name: template})
    return replace(plan, stages=tuple(stages))
