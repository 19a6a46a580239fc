"""The best placement where nodes can be filled in few ways, with CP-SAT: every way to fill one is a column.

z[S] says that the ranks S fill a node. Every rank is in one chosen S, as many are chosen of every composition (devices of each
kind) as nodes have it, and the traffic inside all that are chosen is as large as can be. Where one level of links is above the
nodes, it does not matter which node an S fills, so there is no symmetry left, and the relaxation is nearly whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product
from math import comb, prod

import numpy as np

from autopar.passes.place.traffic import Traffic, Tree
from autopar.passes.solvers.cp_sat import counted_solver, cp_sat, solved

FEW = 2500
"""Ways to fill nodes up to which this is tried."""


def few_ways(tree: Tree) -> bool:
    """Whether a placement is who shares a node, of more than two, and nodes can be filled in few ways."""
    steps = np.diff(tree.distance)
    if not steps[0] or steps[1:].any() or len(tree.compositions) < 3:
        return False
    ranks = np.bincount(tree.kinds).tolist()
    return sum(prod(map(comb, ranks, composition)) for composition in set(tree.compositions)) <= FEW


def place_by_cover(
    traffic: Traffic, tree: Tree, start: np.ndarray, time_limit_s: float, seed: int = 0
) -> tuple[np.ndarray, float]:
    """(device of each rank, proven lower bound of the cost), as `place_exactly` has them."""
    cp = cp_sat()
    model, P = cp.CpModel(), traffic.ranks
    w = np.zeros((P, P))
    w[traffic.first, traffic.second] = w[traffic.second, traffic.first] = traffic.weight
    compositions = tree.compositions
    ways = {one: list(_ways(tree, one)) for one in dict.fromkeys(compositions)}
    inside = {one: [float(w[np.ix_(S, S)].sum()) / 2 for S in sets] for one, sets in ways.items()}
    scale = 1e9 / max(1e-300, *chain(*inside.values()))
    z = {(one, S): model.new_bool_var("") for one, sets in ways.items() for S in sets}
    for i in range(P):
        model.add_exactly_one(z[one, S] for one, sets in ways.items() for S in sets if i in S)
    for one, sets in ways.items():
        model.add(sum(z[one, S] for S in sets) == compositions.count(one))
    model.maximize(
        sum(round(w * scale) * z[one, S] for one in ways for S, w in zip(ways[one], inside[one], strict=True))
    )
    leaf = tree.groups[0]
    filled = {tuple(np.flatnonzero(leaf[start] == g).tolist()) for g in range(len(compositions))}
    for (_, S), chosen in z.items():
        model.add_hint(chosen, int(S in filled))
    solver = counted_solver(time_limit_s, seed)
    status = solved(solver, model)
    total, step = float(traffic.weight.sum()), float(tree.distance[1] - tree.distance[0])
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return start, 0.0
    most = (solver.best_objective_bound + 0.5 * len(compositions)) / scale
    nodes = {one: [g for g, other in enumerate(compositions) if other == one] for one in ways}
    node = np.empty(P, int)
    for (one, S), chosen in z.items():
        if solver.value(chosen):
            node[list(S)] = nodes[one].pop()
    return tree.seated(node.tolist()), total * float(tree.distance[0]) + step * (total - most)


def _ways(tree: Tree, composition: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All sets of ranks that fill a node, ascending."""
    of_kind = [np.flatnonzero(tree.kinds == kind).tolist() for kind in range(len(composition))]
    for parts in product(*map(combinations, of_kind, composition)):
        yield tuple(sorted(chain(*parts)))
