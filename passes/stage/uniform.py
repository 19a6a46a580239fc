"""Cutting into S stages that all run on the same option: the case of large clusters of equal devices.

Devices follow from the number of stages, so the recurrence is over (s, l) alone, and what the units take themselves adds up
to the same however they are cut: with c(l) the seconds of handing values over at l, what is left to choose is

    F(s, l) = c(l) + min over e in (l, end(s, l)] of F(s-1, e),

where end(s, l) is how far a stage from l may go. Limits on seconds and on bytes are kept by all shorter stages as well, so the
minimum is over a run of F(s-1, .), found in a table of the minima of 1, 2, 4, ... neighbours: L log L numbers per stage.

With V chunks per group (interleaved schedules) the chain is cut into S V chunks; group g runs V of them ("loop": g, g+S,
..., "v": g and 2S-1-g), is as busy as all of them and holds what all of them hold. The DP makes the slowest chunk as fast
as can be (V times that bounds a group's time from above), trying several budgets per chunk where memory binds; then
single boundaries are moved while the true total falls. That is a heuristic: `bound_s` says how far off it can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import PlanError
from autopar.ir.actions import StageGraph
from autopar.passes.stage.bottleneck import CutWithin, distinct, minimise
from autopar.passes.stage.intervals import ROUND, flights
from autopar.passes.stage.stage_problem import Piece, StageProblem, StageSolution, evaluate


@dataclass(frozen=True, eq=False)
class Uniform:
    """One option of a (condensed) problem, and the bytes that a stage may take (normally the device's)."""

    problem: StageProblem
    option: int
    stages: int
    limit: float

    @cached_property
    def ends_in_memory(self) -> np.ndarray:
        """(S, L): where the longest stage from l ends that is within the limit, by position from the end (l: there is none)."""
        o, L = self.problem.options[self.option], self.problem.units
        resting, held = o.sums["resting"], o.sums["held"]
        largest = Neighbours(np.asarray(o.peak_bytes, float), np.maximum)
        kinds, where = np.unique(flights(self.problem, self.stages), return_inverse=True)
        first, v = np.arange(L), kinds[:, None]

        def within(ends: np.ndarray) -> np.ndarray:
            peak = largest.between(np.broadcast_to(first, ends.shape), ends)
            bytes_ = resting[ends] - resting[first] + v * (held[ends] - held[first]) + peak
            return np.asarray(bytes_ <= self.limit * (1 + ROUND))

        return _furthest(L, len(kinds), within)[where]

    def ends_in_time(self, slowest_s: float, step_s: float) -> np.ndarray:
        """(L,): where the longest stage from l ends that is within both limits (l: there is none)."""
        o, first = self.problem.options[self.option], np.arange(self.problem.units)
        time, step = o.sums["time"], o.sums["step"]
        busy_anyway = self.problem.boundary_busy * self.problem.enter_s(o) - time[:-1]

        def within(ends: np.ndarray) -> np.ndarray:
            fast = time[ends] + busy_anyway <= slowest_s * (1 + ROUND)
            return np.asarray(fast & (step[ends] - step[first] <= step_s * (1 + ROUND)))

        return np.asarray(_furthest(self.problem.units, 1, within)[0])

    def fastest(self, slowest_s: float, step_s: float, cutoff: float) -> tuple[float, tuple[Piece, ...]] | None:
        """Least sum of stage times under both limits and in memory, with the stages; None when nothing is below `cutoff`."""
        o, L, S = self.problem.options[self.option], self.problem.units, self.stages
        ends = np.minimum(self.ends_in_time(slowest_s, step_s), self.ends_in_memory)
        first, enter = np.arange(L), self.problem.enter_s(o)
        F = np.full((S + 1, L + 1), np.inf)
        F[0, L] = 0.0
        for s in range(1, S + 1):
            some = ends[s - 1] > first
            least = Neighbours(F[s - 1], np.minimum).between(first[some] + 1, ends[s - 1][some] + 1)
            F[s, first[some]] = enter[some] + least
        cost = float(o.sums["time"][-1] + F[S, 0])
        if not np.isfinite(cost) or cost >= cutoff:
            return None
        l, pieces = 0, []
        for s in range(S, 0, -1):
            e = l + 1 + int(F[s - 1, l + 1 : ends[s - 1, l] + 1].argmin())
            pieces.append((l, e, self.option))
            l = e
        return cost, tuple(pieces)

    def within(self, limit: float) -> tuple[Piece, ...] | None:
        """A cut in so many bytes: from the last stage back each takes all it can hold while others still get a unit."""
        o, end = self.problem.options[self.option], self.problem.units
        resting, held, peak = o.sums["resting"], o.sums["held"], np.asarray(o.peak_bytes, float)
        pieces: list[Piece] = []
        for s, v in enumerate(flights(self.problem, self.stages).tolist()):
            peaks = np.maximum.accumulate(peak[:end][::-1])[::-1]
            bytes_ = resting[end] - resting[:end] + v * (held[end] - held[:end]) + peaks
            first = max(int((bytes_ > limit).sum()), self.stages - 1 - s)
            if first >= end:
                return None
            pieces.append((first, end, self.option))
            end = first
        return tuple(reversed(pieces)) if end == 0 else None

    def least_memory(self, cap: float = np.inf) -> tuple[float, tuple[Piece, ...]] | None:
        """Least largest stage in bytes over all cuts, to within rounding; None when that is proven to be at least `cap`."""
        if np.isfinite(cap) and self.within(cap * (1 - 1e-9)) is None:
            return None
        o, rule = self.problem.options[self.option], flights(self.problem, self.stages)
        low, high = 0.0, float(o.sums["resting"][-1] + rule.max() * o.sums["held"][-1] + np.max(o.peak_bytes))
        pieces = self.within(high)
        assert pieces is not None, "everything fits in the bytes of all"
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            tighter = self.within(middle)
            low, high, pieces = (middle, high, pieces) if tighter is None else (low, middle, tighter)
        return high, pieces


class Neighbours:
    """The least (or largest) of any run of values, from the tables of those of 1, 2, 4, ... neighbours."""

    def __init__(self, values: np.ndarray, join: np.ufunc) -> None:
        self.join, self.table = join, np.tile(values, (max(len(values).bit_length(), 1), 1))
        for level in range(1, len(self.table)):
            half = 1 << (level - 1)
            self.table[level, :-half] = join(self.table[level - 1, :-half], self.table[level - 1, half:])

    def between(self, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The least (or largest) of values[first:end], for arrays of runs with at least one value."""
        level = np.frexp(end - first)[1] - 1
        return np.asarray(self.join(self.table[level, first], self.table[level, end - (1 << level)]))


def _furthest(L: int, rows: int, within: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """(rows, L): the largest e >= l with within(e), for limits that all smaller e > l keep too; l where no e does."""
    ends = np.broadcast_to(np.arange(L), (rows, L))
    for bit in reversed(range(L.bit_length())):
        further = ends + (1 << bit)
        ends = np.where((further <= L) & within(np.minimum(further, L)), further, ends)
    return ends


def stages_of(problem: StageProblem, option: int) -> int | None:
    """How many stages the devices allow on an option, or the fixed number; None when they do not."""
    o = problem.options[option]
    most = problem.available[o.kind] // o.devices
    stages = problem.fixed_stages or most
    return stages if 1 <= stages <= most else None


def floor_s(problem: StageProblem, option: int, stages: int) -> tuple[float, float, float]:
    """Lower bounds of (sum of stage times, slowest stage, longest step)."""
    sums = problem.options[option].sums
    unit, step = np.diff(sums["time"]), np.diff(sums["step"])
    enter = np.sort(problem.enter_s(problem.options[option])[1:])[: stages - 1].sum()
    whole = float(sums["time"][-1])
    slowest = max(float(unit.max()), whole / stages)
    return (
        (whole + float(enter)) * (1 - ROUND),
        slowest * (1 - ROUND),
        max(float(step.max()), float(sums["step"][-1]) / stages) * (1 - ROUND),
    )


def least_total(problem: StageProblem, option: int, stages: int) -> float:
    """Lower bound of the total on an option."""
    whole, slowest, step = floor_s(problem, option, stages)
    return whole + (problem.microbatches - 1) * slowest + step


def fastest_uniform(
    problem: StageProblem, option: int, stages: int, gap: float, cutoff: float, limit: float | None = None
) -> tuple[Piece, ...] | None:
    """S stages on an option with the least total below `cutoff` seconds, to within the relative gap, or None.

    limit: bytes that a stage may take, where it is not the device's.
    """
    M = problem.microbatches
    dp = Uniform(problem, option, stages, problem.options[option].limit_bytes if limit is None else limit)
    if dp.within(dp.limit * (1 + ROUND)) is None:
        return None
    o = problem.options[option]
    sums, enter = o.sums, problem.enter_s(o)
    floor, slowest, least_step = floor_s(problem, option, stages)
    most = (cutoff - floor - least_step) / (M - 1) if M > 1 and np.isfinite(cutoff) else np.inf
    times = runs_between(o.unit_s, problem.boundary_busy * enter, slowest, most)
    steps = runs_between(np.asarray(o.step_s, float), np.zeros(problem.units), least_step, np.inf)

    def real(pieces: tuple[Piece, ...]) -> tuple[float, float]:
        busy = max(sums["time"][j] - sums["time"][i] + problem.boundary_busy * enter[i] for i, j, _ in pieces)
        return float(busy), float(max(sums["step"][j] - sums["step"][i] for i, j, _ in pieces))

    def at_most(t_max: float, beyond: float) -> CutWithin | None:
        def with_step(step_s: float, enough: float) -> CutWithin | None:
            fastest = dp.fastest(t_max, step_s, enough)
            if fastest is None:
                return None
            cost, pieces = fastest
            return CutWithin(cost, real(pieces)[1], pieces)

        best = minimise(steps, 1.0, with_step, floor, gap, cutoff=beyond, widest_first=True)
        return None if best is None else CutWithin(best.cost, real(best.pieces)[0], best.pieces)

    best = minimise(times[-1:] if M == 1 else times, M - 1.0, at_most, floor + least_step, gap, cutoff=cutoff)
    return None if best is None else best.pieces


def runs_between(unit_s: np.ndarray, enter_s: np.ndarray, least_s: float, most_s: float) -> np.ndarray:
    """The distinct seconds of runs of units [l, e), sum(unit_s[l:e]) + enter_s[l], that lie between both limits.

    A run [l, e) takes as long as [l + 1, e + 1) where the unit that it loses is as long as the one that it gets, so of all
    runs of as many equal layers one is looked at.
    """
    L = len(unit_s)
    sums = np.concatenate([[0.0], np.cumsum(unit_s)])
    as_long_as_next = (unit_s[:, None] == unit_s) & np.append(enter_s[:-1] == enter_s[1:], False)[:, None]
    first, end = np.nonzero(np.triu(np.column_stack([~as_long_as_next, np.ones(L, bool)]), 1))
    seconds = sums[end] - sums[first] + enter_s[first]
    return distinct(seconds[(seconds >= least_s * (1 - ROUND)) & (seconds <= most_s * (1 + ROUND))])


def group_stages(S: int, V: int, shape: str) -> tuple[tuple[int, ...], ...]:
    """Which of the S V chunks each group runs. Raises PlanError for an unknown shape."""
    if shape != "loop" and (shape, V) != ("v", 2):
        raise PlanError(f'chunks lie in a "loop", or with two chunks per group in a "v"; got {shape!r} with {V} chunks')
    return StageGraph.chain(S, V, shape).groups


def fastest_chunks(
    problem: StageProblem, option: int, S: int, V: int, shape: str, gap: float
) -> tuple[StageSolution | None, StageSolution | None]:
    """(best cut into S groups of V chunks that fits, cut that needs the least memory); None where none was found."""
    groups = group_stages(S, V, shape)
    n = S * V
    limit = problem.options[option].limit_bytes
    fits: StageSolution | None = None
    least: StageSolution | None = None
    tight = Uniform(problem, option, n, np.inf).least_memory()
    assert tight is not None, "without a cap the least memory is found"
    for budget in (np.inf, 1.0, 0.75, 0.5, *(1 / V * x for x in (1.5, 1.2, 1.0)), tight[0] / limit if limit else 0.0):
        share = budget * limit if np.isfinite(budget) else np.inf
        pieces = tight[1] if budget <= 0 else fastest_uniform(problem, option, n, gap, np.inf, share)
        if pieces is None:
            continue
        cut = _improve(problem, evaluate(problem, pieces, groups))
        if least is None or max(cut.group_memory) < max(least.group_memory):
            least = cut
        if cut.fits and (fits is None or cut.total_s < fits.total_s):
            fits = cut
        if fits is not None and np.isinf(budget):
            break
    return fits, least


def _improve(problem: StageProblem, start: StageSolution) -> StageSolution:
    """Moves single boundaries by one unit while (bytes too many, total) falls."""

    def score(s: StageSolution) -> tuple[float, float]:
        over = max(m / max(s.stages[g[0]].limit_bytes, 1.0) for g, m in zip(s.groups, s.group_memory, strict=True))
        return max(over, 1.0), s.total_s

    best, improved = start, True
    while improved:
        improved = False
        for at in range(1, len(best.stages)):
            for by in (-1, 1):
                pieces = [list(p) for p in best.pieces]
                pieces[at - 1][1] += by
                pieces[at][0] += by
                if pieces[at - 1][0] >= pieces[at - 1][1] or pieces[at][0] >= pieces[at][1]:
                    continue
                neighbour = evaluate(problem, [(a, b, o) for a, b, o in pieces], best.groups)
                if score(neighbour) < score(best):
                    best, improved = neighbour, True
    return best
