"""Cutting a chain into p runs by the plain recurrences, one device per run.

    slowest run:  dp[i][j] = min over k of max(dp[k][j-1], cost(k+1..i, device j))
    sum of runs:  dp[i][j] = min over k of     dp[k][j-1] + cost(k+1..i, device j)

Every run has at least one unit. With prefix sums cost(k+1..i) is O(1), so both are O(L² p); the minimum over k is one
numpy row. They know nothing of memory, meshes or microbatches: `autopar.passes.stage.best_cut` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import InputError


def min_max_partition(
    costs: Sequence[float] | np.ndarray, p: int, *, boundary: Sequence[float] | np.ndarray | None = None
) -> tuple[tuple[int, ...], float]:
    """Cut L units into p runs so that the slowest run is as fast as can be.

    costs: (L,) seconds per unit, or (p, L) when devices differ (row j for the device of run j). boundary: (L,) seconds
    added to a run that starts at unit l > 0. Returns (first units of runs 1..p-1, seconds of the slowest run). Raises
    InputError when p runs cannot be cut from L units.
    """
    return _partition(costs, p, boundary, np.maximum)


def additive_partition(
    costs: Sequence[float] | np.ndarray, p: int, *, boundary: Sequence[float] | np.ndarray | None = None
) -> tuple[tuple[int, ...], float]:
    """The same for the sum over runs (the latency of one microbatch). Arguments, result and errors as above."""
    return _partition(costs, p, boundary, np.add)


def _partition(
    costs: Sequence[float] | np.ndarray, p: int, boundary: Sequence[float] | np.ndarray | None, join: Callable
) -> tuple[tuple[int, ...], float]:
    table = np.asarray(costs, float)
    table = np.broadcast_to(table, (max(p, 1), table.shape[-1])) if table.ndim == 1 else table
    L = table.shape[1]
    if not 1 <= p <= L:
        raise InputError(f"{L} units cannot be cut into {p} runs of at least one unit; use between 1 and {L} runs")
    if table.shape[0] != p:
        raise InputError(f"costs have {table.shape[0]} rows for {p} runs; give one row per run, or one row for all")
    enter = np.zeros(L) if boundary is None else np.array(boundary, float)
    enter[0] = 0.0
    sums = np.concatenate([np.zeros((p, 1)), np.cumsum(table, axis=1)], axis=1)
    dp = np.full((p + 1, L + 1), np.inf)
    dp[0, 0] = 0.0
    cut = np.zeros((p + 1, L + 1), int)
    for j in range(1, p + 1):
        for i in range(j, L - (p - j) + 1):
            values = join(dp[j - 1, j - 1 : i], sums[j - 1, i] - sums[j - 1, j - 1 : i] + enter[j - 1 : i])
            k = int(values.argmin())
            dp[j, i], cut[j, i] = values[k], j - 1 + k
    starts, i = [], L
    for j in range(p, 1, -1):
        i = int(cut[j, i])
        starts.append(i)
    return tuple(reversed(starts)), float(dp[p, L])
