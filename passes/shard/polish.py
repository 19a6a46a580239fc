"""A better assignment of a factor graph from one that is at hand: most variables are chosen anew together, next to the others.

Keep some variables at their states so that the rest can be eliminated (`autopar.passes.shard.eliminate`): that gives the best
of all assignments that agree with the one at hand where variables were kept, usually on nine of ten variables. Which are
kept changes from round to round. Nothing is proven by it; from a rounded LP a few rounds reach the LP's bound nearly always,
where branch and bound takes minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from autopar.passes.shard.eliminate import eliminated, order_beside
from autopar.passes.shard.reduce import Reduced, assigned, copy_of, keep_states

WIDEST = 18
"""Bits that number the places of a table, at most."""
MOST = 200_000_000
"""Numbers in all tables of a round."""
ROUNDS = 8
PATIENCE = 3
"""Rounds in a row that find nothing better, after which no more are tried."""


def polished(
    r: Reduced,
    chosen: dict[int, int],
    goal: float,
    turns: Iterable[int] = range(ROUNDS),
    widest: float = WIDEST,
    most: float = MOST,
) -> tuple[dict[int, int], float]:
    """An assignment of positions no worse than this one, and its cost. goal: a cost that will do. turns: a round for each, which
    says what is kept. widest, most: as in `order_beside`."""
    cost, idle = assigned(r, chosen), 0
    sizes = {v: len(costs) for v, costs in r.cost.items()}
    for turn in turns:
        if cost <= goal or idle == PATIENCE:
            break
        ranks = list(range(len(sizes)))
        random.Random(turn).shuffle(ranks)
        order, kept = order_beside(sizes, r.near, dict(zip(sizes, ranks, strict=True)), widest, most)
        beside = copy_of(r)
        for v in kept:
            keep_states(beside, v, np.array([chosen[v]]))
        places, value = eliminated(beside, order)
        idle = 0 if value < cost * (1 - 1e-9) else idle + 1
        if value < cost:
            chosen, cost = {v: chosen[v] if v in kept else place for v, place in places.items()}, value
        if not kept:
            break  # the optimum
    return chosen, cost
