"""Units over ranks of different speed, so that the slowest is done as soon as it can be.

    minimise  max_i n_i · s_i    where  Σ n_i = total,  1 ≤ n_i ≤ most

s_i: seconds of rank i for a unit. A unit more makes a rank later and no other one earlier, so units are given one by one, each to
the rank that will be done with it first: no other way ends sooner.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def apportioned(total: int, seconds: Sequence[float], most: int) -> tuple[int, ...]:
    """Units of every rank. seconds: of a unit, by rank; most: units of a rank. Raises ValueError where they cannot be given."""
    ranks = len(seconds)
    if not ranks <= total <= ranks * most:
        raise ValueError(f"{total} units over {ranks} ranks of 1 to {most} units each")
    units = [1] * ranks
    done = [(2 * s, rank) for rank, s in enumerate(seconds) if most > 1]
    heapq.heapify(done)
    for _ in range(total - ranks):
        _, rank = heapq.heappop(done)
        units[rank] += 1
        if units[rank] < most:
            heapq.heappush(done, ((units[rank] + 1) * seconds[rank], rank))
    return tuple(units)
