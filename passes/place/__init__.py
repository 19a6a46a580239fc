"""Placement: which device runs which logical rank, so that ranks that talk much sit on fast links.

Minimises the sum of w_ij * d(place i, place j) (ch25: d = 1 in a node, 10 in a rack, 100 across racks): by boxes of a grid,
packing and swaps, exactly for a few ranks, always beside what no placement costs less than, and never worse than ranks in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.passes.place.bounds import least_cost
from autopar.passes.place.boxes import cheapest_boxes
from autopar.passes.place.exact import place_exactly, worth_trying
from autopar.passes.place.packing import DENSE, pack, swap_dense, swap_sparse
from autopar.passes.place.traffic import Traffic, Tree, mesh_traffic

__all__ = ["Placement", "Traffic", "Tree", "mesh_traffic", "place", "placement_cost"]

PROVEN = 1e-6
"""How far above the bound, relative to it, a cost may be by rounding."""


@dataclass(frozen=True)
class Placement:
    """physical[i]: the cluster's rank that runs logical rank i. cost, identity_cost: sum of w * d of it and of leaving
    ranks in order. bound: no placement costs less. method: what found it, "identity" (ranks in order), "packing" or "exact"."""

    physical: tuple[int, ...]
    cost: float
    identity_cost: float
    bound: float
    method: str

    @property
    def gap(self) -> float:
        """How far above the optimum the cost can be at most, relative to it."""
        return max(0.0, self.cost - self.bound) / self.bound if self.bound > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no placement is cheaper, but for rounding."""
        return self.gap <= PROVEN


def placement_cost(
    traffic: Traffic, cluster: ClusterSpec, physical: Sequence[int], distance: Sequence[float] | None = None
) -> float:
    """Sum of w * d of a placement."""
    ranks = sorted(physical)
    where = {r: p for p, r in enumerate(ranks)}
    return Tree.of(cluster, ranks, distance).cost(traffic, np.array([where[r] for r in physical]))


def place(
    traffic: Traffic,
    cluster: ClusterSpec,
    *,
    ranks: Sequence[int] | None = None,
    distance: Sequence[float] | None = None,
    exact: bool | None = None,
    enough: float = 0.0,
    time_limit_s: float = 2.0,
) -> Placement:
    """A cheap placement of the traffic's logical ranks; logical rank i runs on a device of the kind of the i-th chosen rank's.

    ranks: the cluster's ranks to use, as many as the traffic has (default: the first). distance: d per cluster level,
    innermost first (default: seconds per byte). exact: whether CP-SAT goes on from packing (default: where it is `worth_trying`),
    within time_limit_s of its own clock. enough: how far above the bound a cost is good enough, relative to it, to look no
    further. Raises InputError for too few or repeated ranks.
    """
    chosen = tuple(range(traffic.ranks)) if ranks is None else tuple(ranks)
    if len(chosen) != traffic.ranks or len(set(chosen)) != len(chosen) or max(chosen, default=0) >= cluster.size:
        raise InputError(
            f"{traffic.ranks} logical ranks need as many different ranks of the cluster's {cluster.size}, got {len(chosen)}"
        )
    tree = Tree.of(cluster, chosen, distance)
    position = np.arange(len(chosen))
    identity_cost = cost = tree.cost(traffic, position)
    bound, method = min(cost, least_cost(traffic, tree)), "identity"
    good = bound * (1 + max(enough, PROVEN))
    if cost > good:
        for packed in _packed(traffic, tree):
            if tree.cost(traffic, packed) < cost:
                position, cost, method = packed, tree.cost(traffic, packed), "packing"
            if cost <= good:
                break
    if cost > good and (worth_trying(traffic, tree) if exact is None else exact):
        found, lower = place_exactly(traffic, tree, position, time_limit_s)
        if tree.cost(traffic, found) < cost:
            position, cost, method = found, tree.cost(traffic, found), "exact"
        bound = min(cost, max(bound, lower))
    return Placement(tuple(chosen[p] for p in position), cost, identity_cost, bound, method)


def _packed(traffic: Traffic, tree: Tree) -> Iterator[np.ndarray]:
    """Placements from several starts, swapped while that helps."""
    P = traffic.ranks
    boxes = cheapest_boxes(traffic, tree)
    if P <= DENSE:
        d, seeds = tree.matrix(), range(8 if P <= 64 else 2)
        for start in chain([] if boxes is None else [boxes], [np.arange(P)], (pack(traffic, tree, s) for s in seeds)):
            yield swap_dense(traffic, tree, d, start)
    else:
        if boxes is not None:
            yield boxes
        packed = min((pack(traffic, tree), np.arange(P)), key=lambda p: tree.cost(traffic, p))
        yield swap_sparse(traffic, tree, packed)
