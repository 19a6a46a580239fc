"""Cuts for schedules that have the gradients of weights (W) apart from those of inputs (B): W fills what 1F1B idles.

The seconds of a cut are then the least that any table of its actions takes (`passes.schedule.least_span_s`). They follow from
the end of the chain: for a stage of f, b and w seconds of F, B and W, which values reach in c seconds and gradients leave in c,
and which holds h of M microbatches at most,

    tail = c + f + tail' + b + c                                   from when values are sent to it until gradients are back
    need = c + max(M (f + b + w),  f + tail' + (M - h) f + M (b + w),  f + need',
                   r (f + tail' + b) + ((M - 1) mod h) f + w)                              until everything is done

with r = 1 + (M - 1) // h, the round trips that M microbatches make one after another where h of them are away at once, and
tail' and need' of the stages behind it, 0 behind the last. Neither number decides alone, so where Alpa's recurrence
(`autopar.passes.stage.mixed`) keeps the least sum, this one keeps every pair that no other pair beats in both. Which stage
takes how many units decides as much as their order: a slow stage behind others waits for its first microbatch, one before
others waits for its first gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.passes.stage.bottleneck import CutWithin, distinct, minimise
from autopar.passes.stage.intervals import ROUND
from autopar.passes.stage.mixed import Mixed, least_of_stages
from autopar.passes.stage.stage_problem import Piece, StageProblem, most_held

MOST_PAIRS = 12
"""Pairs of tail and need that are kept of the stages from a unit on; of more, some between the first and the last go."""


@dataclass(frozen=True, eq=False)
class _Stages:
    """All stages of one option that start at one unit, as (lengths, 1, stages after them or 1, 1) arrays."""

    f: np.ndarray
    b: np.ndarray
    c: float
    alone: np.ndarray
    behind: np.ndarray
    trips: np.ndarray
    away: np.ndarray

    @classmethod
    def starting_at(cls, problem: StageProblem, option: int, l: int, k: int, may_hold: np.ndarray) -> _Stages:
        """Stages of 1 to k units. alone: M (f + b + w). behind: f + (M - h) f + M (b + w), which comes beside tail'. trips: r.
        away: r (f + b) + ((M - 1) mod h) f + w, which comes beside r tail'. may_hold: by stages after them."""
        o, M = problem.options[option], problem.microbatches
        sums = o.sums

        def of(row: str) -> np.ndarray:
            return np.asarray(sums[row][l + 1 : l + 1 + k] - sums[row][l])[:, None, None, None]

        f, w, every = of("forward"), of("weights"), of("time")
        peak = np.maximum.accumulate(np.asarray(o.peak_bytes, float)[l : l + k])[:, None, None, None]
        h = most_held(of("resting") + peak, of("held"), o.limit_bytes, may_hold[:, None])
        trips, more = 1 + (M - 1) // h, (M - 1) % h
        away, behind = trips * (every - w) + more * f + w, f + (M - h) * f + M * (every - f)
        return cls(f, every - f - w, problem.enter_s(o)[l] / 2, M * every, behind, trips, away)


class _Pairs:
    """The (need, tail) pairs that the stages from every unit on may come to: need and tail by unit, pair (least need
    first; infinite where there is no more), stages (one place where they are not counted) and device. came: which of
    `choices[unit]` their first stage is: its option, its length, and the pair of the stages behind it. most: pairs of a
    unit at most, of which there are `many`."""

    def __init__(self, units: int, most: int, stages: int, devices: int, no_idle: bool) -> None:
        shape = (units + 1, most, stages, devices + 1)
        self.need, self.tail, self.came = np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape, int)
        self.many, self.choices = [0] * units + [1], [np.zeros((0, 3), int)] * units
        for row in (self.need, self.tail):
            row[units, 0, 0, devices if no_idle else 0 :] = 0.0

    def keep(self, l: int, need: np.ndarray, tail: np.ndarray, choices: np.ndarray) -> None:
        """The (choices, stages, devices) pairs of a unit that no other beats in both, spread evenly where they are many."""
        most = self.need.shape[1]
        order = np.argsort(need, axis=0, kind="stable")
        need, tail = np.take_along_axis(need, order, 0), np.take_along_axis(tail, order, 0)
        kept = np.isfinite(need)
        kept[1:] &= tail[1:] < np.minimum.accumulate(tail, 0)[:-1] * (1 - ROUND)
        count, rank = kept.sum(0), np.cumsum(kept, 0) - 1
        slot = np.where(count > most, rank * (most - 1) // np.maximum(count - 1, 1), rank)
        kept[1:] &= slot[1:] > slot[:-1]
        self.many[l] = size = int(kept.sum(0).max())
        place = np.argsort(~kept, axis=0, kind="stable")[:size]
        real = np.take_along_axis(kept, place, 0)
        self.need[l, :size] = np.where(real, np.take_along_axis(need, place, 0), np.inf)
        self.tail[l, :size] = np.where(real, np.take_along_axis(tail, place, 0), np.inf)
        self.came[l, :size], self.choices[l] = np.take_along_axis(order, place, 0), choices


class ApartCuts:
    """One problem and its tables (`Mixed`), cut for the least span."""

    def __init__(self, problem: StageProblem, dp: Mixed) -> None:
        self.problem, self.dp = problem, dp
        forward = np.min([np.asarray(o.forward_s, float) for o in problem.options], axis=0)
        self.may_hold = problem.may_hold(dp.S)
        self.arrives_s = np.concatenate([[0.0], np.cumsum(forward)]) * (1 - ROUND)

    def fastest(self, step_s: float, cutoff: float) -> tuple[float, tuple[Piece, ...]] | None:
        """The least span of stages whose once-a-step work is within step_s, with the stages; None where none is below `cutoff`.

        Without a cutoff one pair of every unit gives a cut whose span is one.
        """
        if np.isfinite(cutoff):
            return self._cut(step_s, cutoff, MOST_PAIRS)
        first = self._cut(step_s, cutoff, 1)
        return first and (self._cut(step_s, first[0], MOST_PAIRS) or first)

    def _cut(self, step_s: float, cutoff: float, most: int) -> tuple[float, tuple[Piece, ...]] | None:
        dp = self.dp
        lengths = [np.minimum(self._lengths(o, step_s, cutoff), fit.max(0)) for o, fit in enumerate(dp.fit)]
        differs = any((fit.min(0) < k).any() for fit, k in zip(dp.fit, lengths, strict=True))
        if not dp.fixed and self.problem.most_in_flight is None:
            cut = self._least(lengths, False, cutoff, most)
            if cut is None or not differs or dp.fits(cut[1]):
                return cut
        return self._least(lengths, True, cutoff, most)

    def _lengths(self, option: int, step_s: float, cutoff: float) -> np.ndarray:
        """(L,): units that a stage from l on may have within a span and step_s."""
        o, first = self.problem.options[option], np.arange(self.problem.units)
        ends = [
            np.searchsorted(row, row[:-1] + limit * (1 + ROUND) + ROUND * row[-1], "right") - 1
            for row, limit in ((o.sums["time"], cutoff / self.problem.microbatches), (o.sums["step"], step_s))
        ]
        return np.asarray(np.minimum(*ends) - first)

    def _least(
        self, lengths: list[np.ndarray], counted: bool, cutoff: float, most: int
    ) -> tuple[float, tuple[Piece, ...]] | None:
        S = self.dp.S + 1 if counted else 1
        pairs = _Pairs(self.problem.units, most, S, self.dp.D, self.problem.no_idle)
        for l in reversed(range(self.problem.units)):
            needs, tails, choices = [], [], []
            for option, row in enumerate(self.dp.rows):
                k = int(lengths[option][l])
                if row.last < row.first or k < 1:
                    continue
                need, tail, chosen = self._first_stages(l, option, k, pairs, counted)
                need[need > cutoff - self.arrives_s[l]] = np.inf
                some = np.isfinite(need).any((1, 2))
                needs.append(need[some])
                tails.append(tail[some])
                choices.append(chosen[some])
            if sum(map(len, needs)):
                pairs.keep(l, np.concatenate(needs), np.concatenate(tails), np.concatenate(choices))
        need = pairs.need[0, 0, :, 0]
        s = self.dp.S if self.dp.fixed else int(need.argmin())
        if need[s] >= cutoff or not np.isfinite(need[s]):
            return None
        return float(need[s]), self._walk(pairs, s, counted)

    def _first_stages(
        self, l: int, option: int, k: int, pairs: _Pairs, counted: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """need and tail of every stage on an option from l on before every pair behind it, (choices, stages, devices); and the
        choices."""
        row, shift = self.dp.rows[option], int(counted)
        many = max(max(pairs.many[l + 1 : l + 1 + k]), 1)
        here = _Stages.starting_at(self.problem, option, l, k, self.may_hold if counted else self.may_hold[:1])
        S, D = pairs.need.shape[2:]
        devices = slice(row.first + row.devices, row.last + row.devices + 1)
        need_behind, tail_behind = (
            values[l + 1 : l + 1 + k, :many, : S - shift, devices] for values in (pairs.need, pairs.tail)
        )
        waits = np.maximum(here.alone, np.maximum(here.behind + tail_behind, here.f + need_behind))
        waits = np.maximum(waits, here.away + here.trips * tail_behind) + here.c
        if counted:
            too_long = np.arange(1, k + 1)[:, None, None, None] > self.dp.fit[option][:, l][None, None, :, None]
            waits = np.where(too_long, np.inf, waits)
        waits[..., ~row.starts[row.first :]] = np.inf
        need, tail = np.full((2, k * many, S, D), np.inf)
        for every, some in ((need, waits), (tail, tail_behind + (here.f + here.b + 2 * here.c))):
            part = every[:, shift:]
            part[:, :, row.first : row.last + 1] = some.reshape(k * many, S - shift, -1)
            if not self.problem.no_idle:
                part[:, :, : row.first] = part[:, :, row.first : row.first + 1]
        lengths, places = np.divmod(np.arange(k * many), many)
        return need, tail, np.stack([np.full(k * many, option), lengths + 1, places], 1)

    def _walk(self, pairs: _Pairs, s: int, counted: bool) -> tuple[Piece, ...]:
        """The stages of the pair with the least need of s stages."""
        l, d, place, pieces = 0, 0, 0, []
        while l < self.problem.units:
            option, length, place = pairs.choices[l][pairs.came[l, place, s, d]].tolist()
            pieces.append((l, l + length, option))
            row = self.dp.rows[option]
            l, d, s = l + length, max(d, row.first) + row.devices, s - counted
        return tuple(pieces)


def fastest_apart(
    problem: StageProblem, stages: int, fixed: bool, gap: float, cutoff: float
) -> tuple[Piece, ...] | None:
    """Stages with the least span and once-a-step work below `cutoff` seconds, to within the relative gap; None when there are
    none."""
    dp = Mixed(problem, stages, fixed)
    cuts = ApartCuts(problem, dp)
    least_step, _ = least_of_stages(problem, "step", dp.D)
    steps = distinct(np.concatenate([t.step[t.step >= least_step * (1 - 1e-9)] for t in dp.tables]))

    def within(step_s: float, enough: float) -> CutWithin | None:
        cut = cuts.fastest(step_s, enough)
        if cut is None:
            return None
        return CutWithin(cut[0], max(float(dp.tables[o].step[i, j - i - 1]) for i, j, o in cut[1]), cut[1])

    slowest, _ = least_of_stages(problem, "time", dp.D)
    floor = problem.microbatches * slowest
    best = minimise(steps, 1.0, within, floor, gap, cutoff=cutoff, widest_first=True)
    return None if best is None else best.pieces
