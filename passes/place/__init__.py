"""Placement: which device runs which logical rank, so that ranks that talk much sit on fast links.

Minimises the sum of w_ij * d(place i, place j) (ch25: d = 1 in a node, 10 in a rack, 100 across racks): exactly for a few
ranks, by packing and swaps for many, and never worse than leaving ranks where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.passes.place.exact import place_exactly
from autopar.passes.place.packing import DENSE, pack, swap_dense, swap_sparse
from autopar.passes.place.traffic import Traffic, Tree, mesh_traffic

__all__ = ["EXACT_RANKS", "Placement", "Traffic", "Tree", "mesh_traffic", "place", "placement_cost"]

EXACT_RANKS = 16
"""Up to so many ranks `place` asks for the optimum on its own."""


@dataclass(frozen=True)
class Placement:
    """physical[i]: the cluster's rank that runs logical rank i. cost, identity_cost: sum of w * d of it and of leaving
    ranks in order. bound: no placement costs less. method: "identity", "packing" or "exact"."""

    physical: tuple[int, ...]
    cost: float
    identity_cost: float
    bound: float
    method: str

    @property
    def gap(self) -> float:
        """How far above the optimum the cost can be at most, relative to it."""
        return max(0.0, self.cost - self.bound) / self.bound if self.bound > 0 else 0.0


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
    time_limit_s: float = 2.0,
) -> Placement:
    """A cheap placement of the traffic's logical ranks.

    ranks: the cluster's ranks to use, as many as the traffic has (default: the first). distance: d per cluster level,
    innermost first (default: seconds per byte). exact: whether to prove the optimum (default: up to EXACT_RANKS ranks),
    within time_limit_s of the solver's own clock. Raises InputError for too few or repeated ranks.
    """
    chosen = tuple(range(traffic.ranks)) if ranks is None else tuple(ranks)
    if len(chosen) != traffic.ranks or len(set(chosen)) != len(chosen) or max(chosen, default=0) >= cluster.size:
        raise InputError(
            f"{traffic.ranks} logical ranks need as many different ranks of the cluster's {cluster.size}, got {len(chosen)}"
        )
    tree = Tree.of(cluster, chosen, distance)
    identity = np.arange(len(chosen))
    found = [("identity", identity)]
    if len(chosen) > 1 and len(traffic.weight):
        found += [("packing", p) for p in _packed(traffic, tree, identity)]
    costs = [tree.cost(traffic, p) for _, p in found]
    best = int(np.argmin(costs))
    method, position = found[best]
    cost, bound = costs[best], min(tree.floor(traffic), costs[best])
    if exact if exact is not None else len(chosen) <= EXACT_RANKS:
        if cost > bound * (1 + 1e-9):
            proven, lower = place_exactly(traffic, tree, position, time_limit_s)
            if tree.cost(traffic, proven) < cost:
                position, cost = proven, tree.cost(traffic, proven)
            bound = min(cost, max(bound, lower))
        method = "exact" if cost <= bound * (1 + 1e-6) else method
    return Placement(tuple(chosen[p] for p in position), cost, costs[0], bound, method)


def _packed(traffic: Traffic, tree: Tree, identity: np.ndarray) -> list[np.ndarray]:
    P = len(identity)
    if P <= DENSE:
        d = tree.matrix()
        starts = [identity, *(pack(traffic, tree, seed) for seed in range(8 if P <= 64 else 2))]
        return [swap_dense(traffic, d, p) for p in starts]
    packed = min((pack(traffic, tree), identity), key=lambda p: tree.cost(traffic, p))
    return [swap_sparse(traffic, tree, packed)]
