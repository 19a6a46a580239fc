"""The traffic between ranks, the distances between devices, and the cost of a placement: sum over pairs of w * d.

Traffic is a sparse graph: 16,000 ranks on a mesh of three axes have some 50,000 pairs. Devices sit in a tree of link
levels; d of two devices is one number per level, that of the innermost level that joins them (d = 1 in a node, 10 in a
rack, 100 across racks in the texts; by default the seconds per byte of the level, relative to the fastest).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from autopar.cluster import ClusterSpec
from autopar.errors import InputError

Shape = Literal["ring", "all", "chain"]


@dataclass(frozen=True, eq=False)
class Traffic:
    """first, second: (E,) logical ranks, first < second, each pair once. weight: (E,) e.g. bytes per step."""

    ranks: int
    first: np.ndarray
    second: np.ndarray
    weight: np.ndarray

    @staticmethod
    def of(ranks: int, pairs: Iterable[tuple[int, int, float]]) -> Traffic:
        """Traffic from triples (rank, rank, weight); repeated pairs add up. Raises InputError for ranks that do not exist."""
        rows = np.array([p for p in pairs if p[0] != p[1]], float).reshape(-1, 3)
        return _merged(ranks, rows[:, 0].astype(int), rows[:, 1].astype(int), rows[:, 2])

    @cached_property
    def starts(self) -> np.ndarray:
        """(ranks+1,) where each rank's neighbours begin in `neighbours` and `weights`."""
        return np.concatenate([[0], np.cumsum(np.bincount(self._ends[0], minlength=self.ranks))])

    @cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        here = np.concatenate([self.first, self.second])
        there = np.concatenate([self.second, self.first])
        order = np.argsort(here, kind="stable")
        return here[order], there[order], np.concatenate([self.weight, self.weight])[order]

    @property
    def neighbours(self) -> np.ndarray:
        return self._ends[1]

    @property
    def weights(self) -> np.ndarray:
        return self._ends[2]

    def contract(self, label: np.ndarray, size: int) -> Traffic:
        """Traffic between groups of ranks; label: (ranks,) group of each."""
        return _merged(size, label[self.first], label[self.second], self.weight)


def _merged(ranks: int, a: np.ndarray, b: np.ndarray, weight: np.ndarray) -> Traffic:
    if len(a) and (min(a.min(), b.min()) < 0 or max(a.max(), b.max()) >= ranks):
        raise InputError(f"traffic names rank {max(a.max(), b.max())}, there are {ranks}")
    if (weight < 0).any():
        raise InputError("traffic between two ranks cannot be negative")
    apart = a != b
    low, high = np.minimum(a, b)[apart], np.maximum(a, b)[apart]
    keys, where = np.unique(low.astype(np.int64) * ranks + high, return_inverse=True)
    return Traffic(ranks, keys // ranks, keys % ranks, np.bincount(where, weight[apart], minlength=len(keys)))


def mesh_traffic(
    axes: Mapping[str, int], weights: Mapping[str, float], shapes: Mapping[str, Shape] | None = None
) -> Traffic:
    """Traffic of a mesh whose logical ranks count along the axes, last axis fastest.

    weights: per axis, the weight of each pair of neighbours. shapes: "ring" (collectives, the default), "chain"
    (pipeline stages), "all" (all-to-all: every pair of the group).
    """
    sizes = list(axes.values())
    grid = np.arange(int(np.prod(sizes))).reshape(sizes)
    first, second, weight = [], [], []
    for at, (name, size) in enumerate(axes.items()):
        shape = (shapes or {}).get(name, "ring")
        if size < 2 or not weights.get(name):
            continue
        hops = range(1, size) if shape == "all" else (1,)
        for hop in hops:
            ends = range(size - hop) if shape != "ring" or size == 2 else range(size)
            for k in ends:
                a, b = np.take(grid, k, at).ravel(), np.take(grid, (k + hop) % size, at).ravel()
                first.append(a)
                second.append(b)
                weight.append(np.full(len(a), float(weights[name])))
    if not first:
        return Traffic.of(grid.size, [])
    return _merged(grid.size, np.concatenate(first), np.concatenate(second), np.concatenate(weight))


@dataclass(frozen=True, eq=False)
class Tree:
    """Where devices sit. groups: (levels, P) group of device p per level, innermost first, numbered 0..; the last level
    is one group. distance: (levels,) d of devices first joined by that level, never falling outwards."""

    groups: np.ndarray
    distance: np.ndarray

    @staticmethod
    def of(cluster: ClusterSpec, ranks: Sequence[int], distance: Sequence[float] | None = None) -> Tree:
        """The tree of some of a cluster's ranks. distance: one number per cluster level, innermost first."""
        levels = cluster.levels
        if distance is None:
            rates = np.array([level.rate_Bps(tuple({level.group_of(r) for r in ranks})) for level in levels])
            distance = rates.max() / rates
        if len(distance) != len(levels):
            raise InputError(f"{len(distance)} distances for {len(levels)} levels; give one per level, innermost first")
        label = np.zeros(len(ranks), int)
        rows = []
        for level in reversed(levels[:-1]):
            inner = np.array([level.group_of(r) for r in ranks])
            label = np.unique(np.stack([label, inner]), axis=1, return_inverse=True)[1].reshape(-1)
            rows.append(label)
        groups = np.array([*reversed(rows), np.zeros(len(ranks), int)])
        return Tree(groups, np.maximum.accumulate(np.asarray(distance, float)))

    def cost(self, traffic: Traffic, position: np.ndarray) -> float:
        """Sum of w * d with logical rank i on device position[i]."""
        a, b = position[traffic.first], position[traffic.second]
        level = (self.groups[:, a] != self.groups[:, b]).sum(0)
        return float((traffic.weight * self.distance[level]).sum())

    def matrix(self) -> np.ndarray:
        """(P, P) distances; 0 on the diagonal."""
        level = (self.groups[:, :, None] != self.groups[:, None, :]).sum(0)
        d = self.distance[level]
        np.fill_diagonal(d, 0.0)
        return d

    def floor(self, traffic: Traffic) -> float:
        """Lower bound: every rank's heaviest pairs on the devices nearest to it."""
        sizes = [np.bincount(row)[row].max() for row in self.groups]
        here, _, weight = traffic._ends
        order = np.lexsort((-weight, here))
        place = np.arange(len(here)) - traffic.starts[here[order]]
        level = np.searchsorted(np.array(sizes) - 1, place, "right")
        return float((weight[order] * self.distance[np.minimum(level, len(sizes) - 1)]).sum()) / 2
