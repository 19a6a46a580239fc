"""The exact optimum of a factor graph by eliminating variables one after the other, where their tables are small.

Bucket elimination (Dechter 1999): what involves variable v is added up to a table over v and its neighbours N(v), and v goes:

    t[N(v)] = min_s ( sum of what involves v at v = s ),    which then involves all of N(v)

The next variable is always the one with the smallest table. Backwards, every variable takes the state that its minimum is at
beside the states of N(v), so of its table one column is looked at; of states that cost the same the last one, as reduction keeps
it. Where k variables of n states meet at once the table
has n^k numbers, so this is for meshes of one axis and for what pruning has left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping

import numpy as np

from autopar.passes.shard.reduce import Reduced

MOST = 2_000_000
"""Numbers in all tables up to which a graph is solved so: below, this is quicker than pruning by messages first."""

MANY = 8
"""States per variable, on average, from which tables are taken to be too large without a look."""

WIDEST = 27
"""How many numbers the largest table has at most, as a power of two: a gigabyte of them."""

_PARTS = 1 << 20
"""Sizes of tables are counted in so many parts of a bit: whole numbers, whose sums are the same in any order."""

Table = tuple[tuple[int, ...], np.ndarray]
"""The turns of the variables of a table, the lowest first, and its numbers, a dim for each."""


def elimination_order(
    sizes: Mapping[int, int], near: Mapping[int, Collection[int]], most: float | None = None
) -> list[int] | None:
    """The variables in the order in which they go, by number of states and neighbours; None where tables get too large. A
    variable with one state is no part of it. most: numbers in all tables that are worth it (None: as many as always are)."""
    if most is None and sum(sizes.values()) > MANY * len(sizes):
        return None
    order, kept = order_beside(sizes, near, {v: i for i, v in enumerate(near)}, WIDEST, most or MOST)
    return None if kept else order


def order_beside(
    sizes: Mapping[int, int], near: Mapping[int, Collection[int]], rank: Mapping[int, int], widest: float, most: float
) -> tuple[list[int], set[int]]:
    """(order, kept): variables in the order in which they go, and those that keep one state each so that no table has more
    than 2^widest numbers, all of them together not more than `most`. rank: of two tables of one size the lower goes first; of
    the variables of a table that is too large the highest is kept."""
    left = {v: {u for u in us if sizes[u] > 1} for v, us in near.items() if sizes[v] > 1}
    bits = {v: round(math.log2(sizes[v]) * _PARTS) for v in left}
    table = {v: bits[v] + sum(bits[u] for u in us) for v, us in left.items()}
    smallest = [(table[v], rank[v], v) for v in left]
    heapq.heapify(smallest)
    order: list[int] = []
    kept: set[int] = set()
    numbers = 0.0
    while smallest:
        size, _, v = heapq.heappop(smallest)
        if v not in left or size != table[v]:
            continue  # it has another size by now
        in_table = 2.0 ** (size / _PARTS)
        if numbers + in_table > most:
            return order, kept | left.keys()
        too_wide = size > widest * _PARTS
        if too_wide:
            v = max((v, *left[v]), key=rank.__getitem__)
            kept.add(v)
        else:
            numbers += in_table
            order.append(v)
        around = left.pop(v)
        for u in around:
            table[u] -= bits[v]
            left[u].remove(v)
            if not too_wide:
                new = around - left[u]
                new.remove(u)
                table[u] += sum(map(bits.__getitem__, new))
                left[u] |= new
            heapq.heappush(smallest, (table[u], rank[u], u))
    return order, kept


def eliminated(r: Reduced, order: list[int]) -> tuple[dict[int, int], float]:
    """The optimum over the variables that are left, as the place of each one's state, and its cost."""
    chosen = {v: 0 for v, cost in r.cost.items() if len(cost) == 1}
    value = sum(float(r.cost[v][0]) for v in chosen)
    costs = {v: r.cost[v] for v in order}
    for v in chosen:
        for u, m in r.near[v].items():
            if u in costs:
                costs[u] = costs[u] + m[0]
            elif u < v:
                value += float(m[0, 0])
    turn = {v: i for i, v in enumerate(order)}
    buckets: list[list[Table]] = [[((i,), costs[v])] for i, v in enumerate(order)]
    for v, i in turn.items():
        buckets[i] += [((i, turn[u]), m) for u, m in r.near[v].items() if turn.get(u, -1) > i]
    for bucket in buckets:
        scope, total = _added_up(bucket)
        least = np.minimum.reduce(total, 0)
        if len(scope) > 1:
            buckets[scope[1]].append((scope[1:], least))
        else:
            value += float(least)
    places: dict[int, int] = {}
    for i, bucket in reversed([*enumerate(buckets)]):
        cost = np.zeros(len(costs[order[i]]))
        for (_, *others), table in bucket:
            beside: tuple[int | slice, ...] = (slice(None), *map(places.__getitem__, others))
            cost += table[beside]
        places[i] = chosen[order[i]] = len(cost) - 1 - int(cost[::-1].argmin())
    return chosen, value


def _added_up(tables: list[Table]) -> Table:
    """The sum of tables with the same lowest variable, added one after the other: no array is larger than those so far need."""
    scope, total = tables[0]
    for others, table in tables[1:]:
        both = tuple(sorted({*scope, *others}))
        one, other = (
            t[tuple(slice(None) if j in of else None for j in both)] for of, t in ((scope, total), (others, table))
        )
        is_new = both == scope and total is not tables[0][1]
        scope, total = both, np.add(one, other, out=total if is_new else None)
    return scope, total
