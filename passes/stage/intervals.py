"""Costs of all stages [l, e) of one option at once, from prefix sums.

Units between two places where a stage may start stay together, so they are merged first: afterwards every unit may
start a stage. Row l, column k of a table is the stage of units l .. l + k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.passes.stage.stage_problem import StageProblem

ROUND = 1e-12
"""Relative room in comparisons, for sums made in another order."""


def condense(problem: StageProblem) -> tuple[StageProblem, np.ndarray]:
    """The same problem over merged units, and the first unit of each (with the number of units at the end)."""
    marks = np.flatnonzero(problem.starts)
    if len(marks) == problem.units + 1:
        return problem, marks
    first = marks[:-1]
    options = []
    for o in problem.options:
        rows: dict[str, Any] = {
            name: np.add.reduceat(np.asarray(getattr(o, name), float), first)
            for name in ("forward_s", "backward_s", "step_s", "resting_bytes", "held_bytes")
        }
        peak = np.maximum.reduceat(np.asarray(o.peak_bytes, float), first)
        enter = None if o.boundary_s is None else np.asarray(o.boundary_s, float)[first]
        weights = None if o.weights_s is None else np.add.reduceat(np.asarray(o.weights_s, float), first)
        options.append(replace(o, **rows, peak_bytes=peak, boundary_s=enter, weights_s=weights))
    merged = replace(
        problem,
        options=tuple(options),
        boundary_s=np.asarray(problem.boundary_s, float)[first],
        cuts=np.ones(len(first), bool),
        boundaries=None,
        stages=problem.fixed_stages,
    )
    return merged, marks


@dataclass(frozen=True, eq=False)
class Intervals:
    """(L, W) tables of one option. Beyond the last unit all but `held` are inf.

    time: seconds per microbatch. busy: what counts in the maximum. step: once per step. base, held: bytes that do not
    and that do grow with the microbatches in flight.
    """

    time: np.ndarray
    busy: np.ndarray
    step: np.ndarray
    base: np.ndarray
    held: np.ndarray
    limit: float

    @property
    def width(self) -> int:
        return self.time.shape[1]

    def memory(self, in_flight: float) -> np.ndarray:
        """(L, W) bytes of a stage with so many microbatches in flight."""
        return self.base + in_flight * self.held

    def counts(self, slowest_s: float, step_s: float) -> np.ndarray:
        """(L,) how many stages that start at l stay within both limits (costs rise with the length)."""
        return ((self.busy <= slowest_s * (1 + ROUND)) & (self.step <= step_s * (1 + ROUND))).sum(1)


def intervals(problem: StageProblem, option: int) -> Intervals:
    """Tables of an option, for stages of any length."""
    o, L = problem.options[option], problem.units
    sums, enter = o.sums, problem.enter_s(o)
    last = np.arange(L)[:, None] + 1 + np.arange(L)
    outside = last > L
    last = np.minimum(last, L)

    def between(row: np.ndarray) -> np.ndarray:
        return row[last] - row[:-1, None]

    compute = between(sums["time"])
    peaks = np.maximum.accumulate(np.asarray(o.peak_bytes, float)[last - 1], axis=1)
    time = compute + enter[:, None]
    busy = compute + problem.boundary_busy * enter[:, None]
    step, base, held = between(sums["step"]), between(sums["resting"]) + peaks, between(sums["held"])
    for table in (time, busy, step, base):
        table[outside] = np.inf
    return Intervals(time, busy, step, base, held, o.limit_bytes)


def flights(problem: StageProblem, S: int) -> np.ndarray:
    """(S,) microbatches in flight by stages after this one, in a pipeline of S stages."""
    return np.array([problem.in_flight(after, S, problem.microbatches) for after in range(S)], float)
