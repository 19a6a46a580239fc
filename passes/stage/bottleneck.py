"""Minimising weight * x + f(x) over a sorted list of x, where f is costly and never rises with x.

x is a bottleneck (the slowest stage, the longest once-a-step work) and f(x) what the rest costs when nothing exceeds x.
Alpa tries all x in increasing order; here intervals of x are split in two instead: on an interval whose right neighbour
costs f(b), nothing is below weight * (its first x) + f(b), so most intervals are dropped without a look. A solution whose
real bottleneck is below x answers for all x in between.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.passes.stage.stage_problem import Piece

NEAR = 1e-12
"""Relative difference below which two times are one: sums of the same units in another order."""


@dataclass(frozen=True)
class CutWithin:
    """A cut into stages within a bottleneck. cost: f at the x asked for. x: the real bottleneck, at most what was asked."""

    cost: float
    x: float
    pieces: tuple[Piece, ...]


Run = Callable[[float, float], CutWithin | None]
"""(x, cutoff) -> the best solution with bottleneck <= x, or None when there is none or f(x) >= cutoff."""


def distinct(values: np.ndarray) -> np.ndarray:
    """Sorted, finite, with values that are nearly the same kept once (the largest)."""
    values = np.sort(values[np.isfinite(values)].ravel())
    if len(values) < 2:
        return values
    return values[np.append(values[1:] > values[:-1] * (1 + NEAR), True)]


def minimise(
    xs: np.ndarray,
    weight: float,
    run: Run,
    floor: float,
    gap: float,
    *,
    cutoff: float = np.inf,
    widest_first: bool = False,
) -> CutWithin | None:
    """The least weight * x + f(x), to within the relative `gap`, if it is below `cutoff`; cost of the answer: that sum.

    xs: sorted candidates. floor: f is never below. widest_first: look at the largest x first (f is cheap there).
    """
    best: CutWithin | None = None
    value = cutoff
    heap = [(weight * float(xs[0]) + floor, 0, len(xs) - 1, floor)] if len(xs) else []
    growth, first = 1.1, widest_first
    while heap:
        bound, lo, hi, least = heapq.heappop(heap)
        slack = gap * value if np.isfinite(value) else 0.0
        if bound >= value - slack:
            break
        if weight > 0 and np.isfinite(value):
            hi = min(hi, int(np.searchsorted(xs, (value - least) / weight, "right")) - 1)
            if hi < lo:
                continue
        if first:
            mid, first = hi, False
        elif np.isfinite(value):
            mid = min(hi, max(lo, int(np.searchsorted(xs, (xs[lo] + xs[hi]) / 2))))
        else:
            mid = min(hi, max(lo, int(np.searchsorted(xs, xs[lo] * growth))))
            growth = growth * 1.5
        if mid < hi:
            heapq.heappush(heap, (weight * float(xs[mid + 1]) + least, mid + 1, hi, least))
        cut = run(float(xs[mid]), value - weight * float(xs[lo]))
        if cut is None:
            continue
        total = weight * cut.x + cut.cost
        if total < value:
            best, value = CutWithin(total, cut.x, cut.pieces), total
        end = min(mid, int(np.searchsorted(xs, cut.x * (1 - 10 * NEAR)))) - 1
        if end >= lo:
            least = max(least, cut.cost - slack)
            heapq.heappush(heap, (weight * float(xs[lo]) + least, lo, end, least))
    return best
