"""The best placement of a few ranks, with CP-SAT: by nodes here, by the ways to fill them (`cover.py`) where these are few.

Devices of one kind in one node are interchangeable, so x[i, g] puts rank i into node g, X[i, l, g] sums it over the nodes of a
group of level l, and a pair is apart at level l when apart >= X[i, l, g] - X[j, l, g] for some g: the quadratic objective is
linear in `apart`, since distances never fall outwards. Groups that look alike are told apart by their smallest rank,
which rises from one to the next.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from autopar.passes.place.cover import few_ways, place_by_cover
from autopar.passes.place.traffic import Traffic, Tree
from autopar.passes.solvers.cp_sat import counted_solver, cp_sat, solved

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


ALWAYS_RANKS = 16
"""Up to so many ranks the optimum is asked for whatever they send."""

FEW_TERMS = 256
"""Pairs of ranks times nodes times levels up to which it is of more ranks: beyond, a second of CP-SAT brings nothing."""


def worth_trying(traffic: Traffic, tree: Tree) -> bool:
    """Whether CP-SAT has a prospect of a proof, or of a better placement, in about a second."""
    terms = len(traffic.weight) * len(tree.compositions) * (len(tree.groups) - 1)
    return traffic.ranks <= ALWAYS_RANKS or terms <= FEW_TERMS or few_ways(tree)


def place_exactly(
    traffic: Traffic, tree: Tree, start: np.ndarray, time_limit_s: float, seed: int = 0
) -> tuple[np.ndarray, float]:
    """(device of each rank, proven lower bound of the cost); `start` is the first guess and the answer of last resort."""
    if few_ways(tree):
        return place_by_cover(traffic, tree, start, time_limit_s, seed)
    cp = cp_sat()
    model, P = cp.CpModel(), traffic.ranks
    leaf = tree.groups[0]
    nodes = int(leaf.max()) + 1
    x = [[model.new_bool_var(f"x{i}_{g}") for g in range(nodes)] for i in range(P)]
    for i in range(P):
        model.add_exactly_one(x[i])
    for g, places in enumerate(tree.compositions):
        for kind, count in enumerate(places):
            model.add(sum(x[i][g] for i in range(P) if tree.kinds[i] == kind) == count)
    device = [int(np.flatnonzero(leaf == g)[0]) for g in range(nodes)]
    inside = [
        {h: [g for g in range(nodes) if row[device[g]] == h] for h in sorted(set(row.tolist()))} for row in tree.groups
    ]
    X = [{h: [sum(x[i][g] for g in under) for i in range(P)] for h, under in level.items()} for level in inside]
    _break_symmetry(model, tree, inside, X, P)

    steps = np.diff(tree.distance, append=tree.distance[-1])[:-1]
    scale = 1e6 / max(float(traffic.weight.max(initial=0.0) * steps.max(initial=0.0)), 1e-300)
    terms, exact_sum = [], 0.0
    for i, j, w in zip(traffic.first.tolist(), traffic.second.tolist(), traffic.weight.tolist(), strict=True):
        exact_sum += w * float(tree.distance[0])
        for l, step in enumerate(steps):
            price = round(w * float(step) * scale)
            if not price:
                continue
            apart = model.new_bool_var(f"apart{i}_{j}_{l}")
            for h in inside[l]:
                model.add(apart >= X[l][h][i] - X[l][h][j])
            terms.append(price * apart)
    model.minimize(sum(terms))
    for i in range(P):
        for g in range(nodes):
            model.add_hint(x[i][g], int(leaf[start[i]] == g))
    solver = counted_solver(time_limit_s, seed)
    status = solved(solver, model)
    bound = exact_sum + (solver.best_objective_bound - 0.5 * len(terms)) / scale
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return start, bound
    position = tree.seated([next(g for g in range(nodes) if solver.value(x[i][g])) for i in range(P)])
    if status == cp.OPTIMAL and tree.cost(traffic, position) <= tree.cost(traffic, start):
        bound = min(tree.cost(traffic, position), bound + len(terms) / scale)
    return position, bound


def _break_symmetry(model: cp_model.CpModel, tree: Tree, inside: list, X: list, P: int) -> None:
    """Neighbouring groups of one parent and one shape: the later one's smallest rank is larger."""
    levels = len(inside)

    def shape(l: int, h: int) -> tuple:
        if l == 0:
            return tree.compositions[h]
        below = sorted({_parent(tree, 0, l - 1, g) for g in inside[l][h]})
        return tuple(shape(l - 1, b) for b in below)

    for l in range(levels - 1):
        names = sorted(inside[l])
        for a, b in pairwise(names):
            if _parent(tree, l, l + 1, a) != _parent(tree, l, l + 1, b) or shape(l, a) != shape(l, b):
                continue
            for i in range(P):
                model.add(X[l][b][i] <= sum(X[l][a][k] for k in range(i)))


def _parent(tree: Tree, l: int, above: int, group: int) -> int:
    return int(tree.groups[above][np.flatnonzero(tree.groups[l] == group)[0]])
