"""Alpa's inter-operator DP: stages of different submeshes and kinds of devices, over one chain of units.

For limits on the slowest stage (t_max) and on the longest once-a-step work,

    F(s, l, d) = min over (i, option) of t(l..i, option) + F(s-1, i+1, d - devices(option))

is the least sum of stage times with s stages for the units from l on and d devices left. s also tells how many
microbatches the first of them holds (position from the end), hence whether it fits; when every stage that is short enough
fits wherever it stands, s is dropped. Devices lie in a row, kind after kind: a stage takes the next ones of its kind. The
same recurrence with max in place of + gives the least memory limit under which anything fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.passes.stage.bottleneck import CutWithin, distinct, minimise
from autopar.passes.stage.intervals import ROUND, Intervals, flights, intervals
from autopar.passes.stage.stage_problem import Piece, StageProblem

Cell = Callable[[int, int], np.ndarray]
"""(option, first unit) -> (k, S or 1, 1): value of the stages of 1..k units, by position from the end."""


@dataclass(frozen=True, eq=False)
class DeviceSpan:
    """Where an option's devices lie: stages of it may start at device `first` .. `last` of the row, but for those where they
    would lie across more groups of fast links than they have to (starts: last + 1 flags)."""

    devices: int
    first: int
    last: int
    starts: np.ndarray

    @classmethod
    def of(cls, devices: int, first: int, end: int, link_groups: tuple[tuple[int, ...], ...]) -> DeviceSpan:
        """The span of an option with so many devices, of the kind from device `first` on to `end`."""
        start = np.arange(max(end - devices, first - 1) + 1)
        own = start >= first
        across = [
            np.searchsorted(g, start + devices - 1, "right") - np.searchsorted(g, start, "right") for g in link_groups
        ]
        least = [row <= row[own].min(initial=devices) for row in across]
        return cls(devices, first, end - devices, np.logical_and.reduce([own, *least]))


class Mixed:
    """One problem (condensed), its tables, and `stages` as the number of stages that the in-flight rule is asked for.

    fixed: exactly that many stages; otherwise at most.
    """

    def __init__(self, problem: StageProblem, stages: int, fixed: bool) -> None:
        self.problem, self.S, self.fixed = problem, stages, fixed
        offsets = np.concatenate([[0], np.cumsum(problem.available)]).astype(int)
        self.D = int(offsets[-1])
        self.rows = [
            DeviceSpan.of(o.devices, int(offsets[o.kind]), int(offsets[o.kind + 1]), problem.link_groups)
            for o in problem.options
        ]
        self.tables = [intervals(problem, i) for i in range(len(problem.options))]
        self.flights = flights(problem, stages)
        self.fit = [self._fit(t) for t in self.tables]

    def _fit(self, table: Intervals) -> np.ndarray:
        """(S, L): how many units a stage that starts at l may have before it needs too much memory, per position."""
        values, where = np.unique(self.flights, return_inverse=True)
        return np.array([(table.memory(v) <= table.limit * (1 + ROUND)).sum(1) for v in values])[where]

    def fill(self, cell: Cell, join: np.ufunc, counted: bool) -> np.ndarray:
        """F: (L+1, S+1, D+1), or (L+1, 1, D+1) where stages are not counted."""
        L, shift = self.problem.units, int(counted)
        F = np.full((L + 1, self.S + 1 if counted else 1, self.D + 1), np.inf)
        F[L, 0, self.D if self.problem.no_idle else 0 :] = 0.0
        for l in reversed(range(L)):
            for o, row in enumerate(self.rows):
                values = cell(o, l)
                if row.last < row.first or not len(values):
                    continue
                after = F[l + 1 : l + 1 + len(values), : F.shape[1] - shift]
                best = join(after[:, :, row.first + row.devices : row.last + row.devices + 1], values).min(0)
                best[:, ~row.starts[row.first :]] = np.inf
                here = F[l, shift:]
                part = here[:, row.first : row.last + 1]
                np.minimum(part, best, out=part)
                if not self.problem.no_idle:
                    np.minimum(here[:, : row.first], best[:, :1], out=here[:, : row.first])
        return F

    def walk(self, F: np.ndarray, cell: Cell, join: np.ufunc, s: int, counted: bool) -> tuple[Piece, ...]:
        """The stages behind F[0, s, 0]."""
        l, d, pieces = 0, 0, []
        while l < self.problem.units:
            best: tuple[float, int, int, int] | None = None
            for o, row in enumerate(self.rows):
                values, start = cell(o, l), d if self.problem.no_idle else max(d, row.first)
                if start > row.last or not len(values) or not row.starts[start]:
                    continue
                stage_values = values[:, min(s - 1, values.shape[1] - 1), 0] if counted else values[:, 0, 0]
                sums = join(F[l + 1 : l + 1 + len(values), s - 1 if counted else 0, start + row.devices], stage_values)
                k = int(sums.argmin())
                if best is None or sums[k] < best[0]:
                    best = (float(sums[k]), o, k, start + row.devices)
            assert best is not None, "a finite F has a stage behind it"
            _, o, k, d = best
            pieces.append((l, l + k + 1, o))
            l, s = l + k + 1, s - 1
        return tuple(pieces)

    def fastest(self, slowest_s: float, step_s: float, cutoff: float) -> tuple[float, tuple[Piece, ...]] | None:
        """Least sum of stage times under both limits, with the stages; None when nothing fits or is below `cutoff`.

        First as if every stage held the fewest microbatches; what fits where it then stands is the answer.
        """
        counts = [np.minimum(t.counts(slowest_s, step_s), f.max(0)) for t, f in zip(self.tables, self.fit, strict=True)]
        differs = any((f.min(0) < c).any() for f, c in zip(self.fit, counts, strict=True))
        if not self.fixed:
            cheapest = self._cheapest(counts, False, cutoff)
            if cheapest is None or not differs or self.fits(cheapest[1]):
                return cheapest
        return self._cheapest(counts, True, cutoff)

    def fits(self, pieces: tuple[Piece, ...]) -> bool:
        """Whether every stage of a cut fits at its position."""
        last = len(pieces) - 1
        return last < self.S and all(j - i <= self.fit[o][last - n, i] for n, (i, j, o) in enumerate(pieces))

    def _cheapest(
        self, counts: list[np.ndarray], counted: bool, cutoff: float
    ) -> tuple[float, tuple[Piece, ...]] | None:
        def cell(o: int, l: int) -> np.ndarray:
            k = int(counts[o][l])
            time = self.tables[o].time[l, :k, None, None]
            fit = self.fit[o][:, l]
            if not counted or (fit >= k).all():
                return time
            return np.where(np.arange(k)[:, None, None] < fit[None, :, None], time, np.inf)

        F = self.fill(cell, np.add, counted)
        s = self._best(F, counted)
        if not np.isfinite(F[0, s, 0]) or F[0, s, 0] >= cutoff:
            return None
        return float(F[0, s, 0]), self.walk(F, cell, np.add, s, counted)

    def least_memory(self) -> tuple[float, tuple[Piece, ...]] | None:
        """Least, over all cuts, of the largest memory / limit; None when no cut exists at any limit."""

        def cell(o: int, l: int) -> np.ndarray:
            table, k = self.tables[o], self.problem.units - l
            bytes_ = table.base[l, :k, None, None] + self.flights[None, :, None] * table.held[l, :k, None, None]
            return bytes_ / max(table.limit, 1.0)

        F = self.fill(cell, np.maximum, True)
        s = self._best(F, True)
        if not np.isfinite(F[0, s, 0]):
            return None
        return float(F[0, s, 0]), self.walk(F, cell, np.maximum, s, True)

    def _best(self, F: np.ndarray, counted: bool) -> int:
        return self.S if self.fixed else int(F[0, :, 0].argmin()) if counted else 0


def fastest_mixed(
    problem: StageProblem, stages: int, fixed: bool, gap: float, cutoff: float
) -> tuple[Piece, ...] | None:
    """Stages with the least total below `cutoff` seconds, to within the relative gap; None when there are none."""
    dp = Mixed(problem, stages, fixed)
    M, tables = problem.microbatches, dp.tables
    slowest, floor = least_of_stages(problem, "time", dp.D)
    least_step, _ = least_of_stages(problem, "step", dp.D)
    times = distinct(np.concatenate([t.busy[t.busy >= slowest * (1 - 1e-9)] for t in tables]))
    steps = distinct(np.concatenate([t.step[t.step >= least_step * (1 - 1e-9)] for t in tables]))

    def at_most(t_max: float, beyond: float) -> CutWithin | None:
        def with_step(step_s: float, enough: float) -> CutWithin | None:
            cheapest = dp.fastest(t_max, step_s, enough)
            if cheapest is None:
                return None
            cost, pieces = cheapest
            return CutWithin(cost, max(float(tables[o].step[i, j - i - 1]) for i, j, o in pieces), pieces)

        best = minimise(steps, 1.0, with_step, floor, gap, cutoff=beyond, widest_first=True)
        if best is None:
            return None
        return CutWithin(best.cost, max(float(tables[o].busy[i, j - i - 1]) for i, j, o in best.pieces), best.pieces)

    if M == 1:
        times = times[-1:]
    best = minimise(times, M - 1.0, at_most, floor + least_step, gap, cutoff=cutoff)
    return None if best is None else best.pieces


def least_of_stages(problem: StageProblem, row: str, devices: int) -> tuple[float, float]:
    """Lower bounds of (the largest stage, the sum over stages) of a row: no stage is below its units at their cheapest,
    and devices times seconds are at least the work."""
    units = [np.diff(o.sums[row]) for o in problem.options]
    work = np.min([o.devices * u for o, u in zip(problem.options, units, strict=True)], axis=0).sum()
    unit = np.min(units, axis=0)
    return max(float(unit.max()), float(work) / devices) * (1 - ROUND), float(unit.sum()) * (1 - ROUND)
