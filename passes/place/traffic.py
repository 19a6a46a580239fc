"""The traffic between ranks, the distances between devices, and the cost of a placement: sum over pairs of w * d.

Traffic is a sparse graph: 16,000 ranks on a mesh of three axes have some 50,000 pairs. Devices sit in a tree of link
levels; d of two devices is one number per level, that of the innermost level that joins them (d = 1 in a node, 10 in a
rack, 100 across racks in the texts; by default the seconds per byte of the level, relative to the fastest).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from autopar.cluster import ClusterSpec
from autopar.errors import InputError

Shape = Literal["ring", "all", "chain"]


@dataclass(frozen=True, eq=False)
class Traffic:
    """first, second: (E,) logical ranks, first < second, each pair once. weight: (E,) e.g. bytes per step.

    lines: (axes, ranks) numbers of the lines of a grid that each rank is on, one per axis, where most pairs lie on these: the
    ranks of a line differ in one coordinate alone. Bounds alone read them.
    """

    ranks: int
    first: np.ndarray
    second: np.ndarray
    weight: np.ndarray
    lines: tuple[np.ndarray, ...] = ()

    @staticmethod
    def of(ranks: int, pairs: Iterable[tuple[int, int, float]]) -> Traffic:
        """Traffic from triples (rank, rank, weight), as `summed` has it."""
        rows = np.array([p for p in pairs if p[0] != p[1]], float).reshape(-1, 3)
        return summed(ranks, rows[:, 0].astype(int), rows[:, 1].astype(int), rows[:, 2])

    @cached_property
    def starts(self) -> np.ndarray:
        """(ranks+1,) where each rank's neighbours begin in `neighbours` and `weights`."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.ends[0], minlength=self.ranks))])

    @cached_property
    def ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rank, its neighbour, weight) of every pair from both of its ends, by rank."""
        here = np.concatenate([self.first, self.second])
        there = np.concatenate([self.second, self.first])
        order = np.argsort(here, kind="stable")
        return here[order], there[order], np.concatenate([self.weight, self.weight])[order]

    @property
    def neighbours(self) -> np.ndarray:
        return self.ends[1]

    @property
    def weights(self) -> np.ndarray:
        return self.ends[2]

    def place_on_line(self, axis: int) -> np.ndarray:
        """(ranks,) how many ranks come before each on its line along an axis."""
        line = np.unique(self.lines[axis], return_inverse=True)[1].reshape(-1)
        order = np.argsort(line, kind="stable")
        place = np.empty(self.ranks, int)
        place[order] = np.arange(self.ranks) - np.searchsorted(line[order], line[order])
        return place

    def contract(self, label: np.ndarray, size: int) -> Traffic:
        """Traffic between groups of ranks; label: (ranks,) group of each."""
        return summed(size, label[self.first], label[self.second], self.weight)


def summed(ranks: int, a: np.ndarray, b: np.ndarray, weight: np.ndarray) -> Traffic:
    """Traffic from the ends and weights of pairs; repeated pairs add up. Raises InputError for ranks that do not exist."""
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
    traffic = summed(grid.size, np.concatenate(first), np.concatenate(second), np.concatenate(weight))
    return replace(traffic, lines=grid_lines(sizes))


def grid_lines(sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The lines along every axis of a grid whose ranks count along the axes, last axis fastest: each by its first rank."""
    grid = np.arange(int(np.prod(sizes))).reshape(sizes)
    return tuple(np.broadcast_to(grid.take([0], at), grid.shape).ravel() for at in range(len(sizes)))


@dataclass(frozen=True, eq=False)
class Tree:
    """Where devices sit. groups: (levels, P) group of device p per level, innermost first, numbered 0..; the last level
    is one group. distance: (levels,) d of devices first joined by that level, never falling outwards. kinds: (P,) kind of each
    device, numbered 0..; rank p runs on devices of the kind of device p."""

    groups: np.ndarray
    distance: np.ndarray
    kinds: np.ndarray

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
        number = {device: k for k, device in enumerate(dict.fromkeys(device for _, device in cluster.devices))}
        kinds = np.repeat([number[device] for _, device in cluster.devices], [n for n, _ in cluster.devices])
        return Tree(groups, np.maximum.accumulate(np.asarray(distance, float)), kinds[list(ranks)])

    @cached_property
    def compositions(self) -> list[tuple[int, ...]]:
        """Per innermost group, how many devices of every kind it has."""
        counts = np.zeros((int(self.groups[0].max()) + 1, int(self.kinds.max()) + 1), int)
        np.add.at(counts, (self.groups[0], self.kinds), 1)
        return [tuple(row) for row in counts.tolist()]

    def seated(self, node: Sequence[int]) -> np.ndarray:
        """(P,) devices of ranks that are given their innermost groups, in order, each one of its kind."""
        free: dict[tuple[int, int], list[int]] = {}
        for p in reversed(range(len(self.kinds))):
            free.setdefault((int(self.groups[0, p]), int(self.kinds[p])), []).append(p)
        return np.array([free[g, int(kind)].pop() for g, kind in zip(node, self.kinds, strict=True)])

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
