"""Cutting into S stages that all run on the same option: the case of large clusters of equal devices.

Devices follow from the number of stages, so the recurrence is over (s, l) alone, F(s, l) = min over i of
t(l..i) + F(s-1, i+1), and since no stage exceeds the limit on the slowest one, i - l is at most the width of a narrow
band: a thousand units and 64 stages are about a million numbers.

With V chunks per group (interleaved schedules) the chain is cut into S V chunks; group g runs V of them ("loop": g, g+S,
..., "v": g and 2S-1-g), is as busy as all of them and holds what all of them hold. The DP makes the slowest chunk as fast
as can be (V times that bounds a group's time from above), trying several budgets per chunk where memory binds; then
single boundaries are moved while the true total falls. That is a heuristic: `bound_s` says how far off it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import PlanError
from autopar.ir.actions import StageGraph
from autopar.passes.stage.bottleneck import CutWithin, distinct, minimise
from autopar.passes.stage.intervals import ROUND, Intervals, flights, intervals
from autopar.passes.stage.stage_problem import Piece, StageProblem, StageSolution, evaluate

Values = np.ndarray | Sequence[np.ndarray]
"""(L, W) values of all stages, or one such table per position from the end."""


@dataclass(frozen=True, eq=False)
class Uniform:
    """One option of a (condensed) problem, and the bytes that a stage may take (normally the device's)."""

    problem: StageProblem
    option: int
    stages: int
    limit: float

    def fill(self, table: Intervals, values: Values, join: np.ufunc, allowed: list[np.ndarray] | None) -> np.ndarray:
        """F: (S+1, L+1). values: (L, W), the same for all positions or by position from the end. allowed: masks by position."""
        L, S = self.problem.units, self.stages
        ends = np.minimum(np.arange(L)[:, None] + 1 + np.arange(table.width), L)
        F = np.full((S + 1, L + 1), np.inf)
        F[0, L] = 0.0
        for s in range(1, S + 1):
            cost = values if isinstance(values, np.ndarray) else values[s - 1]
            cost = cost if allowed is None else np.where(allowed[s - 1], cost, np.inf)
            first, last = S - s, L - s + 1
            F[s, first:last] = join(F[s - 1][ends[first:last]], cost[first:last]).min(1)
        return F

    def walk(
        self, F: np.ndarray, table: Intervals, values: Values, join: np.ufunc, allowed: list[np.ndarray] | None
    ) -> tuple[Piece, ...]:
        """The stages behind F[S, 0]."""
        l, pieces, L = 0, [], self.problem.units
        for s in range(self.stages, 0, -1):
            width = min(table.width, L - l)
            cost = (values if isinstance(values, np.ndarray) else values[s - 1])[l, :width]
            if allowed is not None:
                cost = np.where(allowed[s - 1][l, :width], cost, np.inf)
            k = int(join(F[s - 1, l + 1 : l + 1 + width], cost).argmin())
            pieces.append((l, l + k + 1, self.option))
            l += k + 1
        return tuple(pieces)

    def fits(self, table: Intervals) -> list[np.ndarray]:
        """(L, W) masks by position from the end: which stages are within the limit there."""
        masks: dict[float, np.ndarray] = {}
        rule = flights(self.problem, self.stages)
        for v in set(rule.tolist()):
            masks[v] = table.memory(v) <= self.limit * (1 + ROUND)
        return [masks[v] for v in rule.tolist()]

    def fastest(self, slowest_s: float, step_s: float, cutoff: float) -> tuple[float, tuple[Piece, ...]] | None:
        """Least sum of stage times under both limits and in memory, with the stages; None when nothing is below `cutoff`."""
        table = intervals(self.problem, self.option, slowest_s, step_s)
        inside = (table.busy <= slowest_s * (1 + ROUND)) & (table.step <= step_s * (1 + ROUND))
        time = np.where(inside, table.time, np.inf)
        allowed: list[np.ndarray] | None = self.fits(table)
        if allowed is not None and all((mask | ~inside).all() for mask in {id(m): m for m in allowed}.values()):
            allowed = None
        F = self.fill(table, time, np.add, allowed)
        if not np.isfinite(F[self.stages, 0]) or F[self.stages, 0] >= cutoff:
            return None
        return float(F[self.stages, 0]), self.walk(F, table, time, np.add, allowed)

    def least_memory(self, cap: float = np.inf) -> tuple[float, tuple[Piece, ...]] | None:
        """Least largest stage in bytes over all cuts; None when that is proven to be at least `cap`.

        Limits that grow until something fits give a band; the recurrence inside it is exact.
        """
        rule = flights(self.problem, self.stages)
        o = self.problem.options[self.option]
        lean = np.asarray(o.resting_bytes, float) + rule.min() * np.asarray(o.held_bytes, float)
        prefix = np.concatenate([[0.0], np.cumsum(lean)])
        limit = self.reach()
        growth = 1 + 1e-9
        while limit < cap * (1 - 1e-9):
            limit, growth = min(max(limit, 1.0) * growth, cap), 1.25
            ends = np.searchsorted(prefix, (prefix[:-1] + limit) * (1 + ROUND), "right") - 1
            table = intervals(self.problem, self.option, width=max(1, int((ends - np.arange(len(ends))).max())))
            kinds, where = np.unique(rule, return_inverse=True)
            bytes_ = [np.where(table.memory(v) <= limit, table.memory(v), np.inf) for v in kinds]
            values = [bytes_[i] for i in where]
            F = self.fill(table, values, np.maximum, None)
            if F[self.stages, 0] < cap:
                return float(F[self.stages, 0]), self.walk(F, table, values, np.maximum, None)
        return None

    def reach(self) -> float:
        """Bytes below which nothing fits: stages that take, from the last one back, all they can hold do not get there."""
        o, L = self.problem.options[self.option], self.problem.units
        resting, held, peak = o.sums["resting"], o.sums["held"], np.asarray(o.peak_bytes, float)
        rule = flights(self.problem, self.stages)

        def gets_there(limit: float) -> bool:
            end = L
            for v in rule.tolist():
                peaks = np.maximum.accumulate(peak[:end][::-1])[::-1]
                bytes_ = resting[end] - resting[:end] + v * (held[end] - held[:end]) + peaks
                end = int((bytes_ > limit).sum())
                if end == 0:
                    return True
            return False

        low, high = 0.0, float(resting[-1] + rule.max() * held[-1] + peak.max())
        while high - low > 1e-10 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if gets_there(middle) else (middle, high)
        return low


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
    if dp.reach() > dp.limit * (1 + 1e-9):
        return None
    sums, enter = problem.options[option].sums, problem.enter_s(problem.options[option])
    floor, slowest, least_step = floor_s(problem, option, stages)
    most = (cutoff - floor - least_step) / (M - 1) if M > 1 and np.isfinite(cutoff) else np.inf
    times = _candidates(sums["time"], slowest, most, problem.boundary_busy * enter)
    steps = _candidates(sums["step"], least_step, np.inf, None)

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


def _candidates(sums: np.ndarray, least: float, most: float, enter: np.ndarray | None) -> np.ndarray:
    sums_in_range = []
    for l in range(len(sums) - 1):
        row = sums[l + 1 :] - sums[l] + (0.0 if enter is None else enter[l])
        a, b = np.searchsorted(row, [least * (1 - ROUND), most * (1 + ROUND)])
        sums_in_range.append(row[a : b + 1])
    return distinct(np.concatenate(sums_in_range))


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
