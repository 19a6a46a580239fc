"""Placing by packing: fill nodes, then racks, with ranks that talk much to each other; then swap while it pays.

Innermost level first: a group of devices is filled by growing one cluster of ranks, always taking the rank with the most
traffic into it; clusters become the ranks of the next level, where those of one shape (as many devices of every kind, in groups
alike) can change places. Swaps are steepest descent on the dense matrices

    delta(i, j) = A_ij + A_ji - A_ii - A_jj + 2 w_ij d_ij,     A_ij = sum over k of w_ik d(place k, place j)

for up to a few hundred ranks (or nodes, of larger clusters), and pair by pair along the traffic beyond.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

import numpy as np

from autopar.passes.place.traffic import Traffic, Tree

DENSE = 384
"""Up to so many ranks all swaps are looked at together."""

AT_ONCE = 1 << 16
"""Pairs of ranks that are looked at together beyond."""


def pack(traffic: Traffic, tree: Tree, seed: int = 0) -> np.ndarray:
    """(P,) device of each logical rank."""
    P = tree.groups.shape[1]
    members = [np.array([i]) for i in range(P)]
    slots: list[list[int]] = [[p] for p in range(P)]
    shapes: list[int] = tree.kinds.tolist()
    graph, rng = traffic, np.random.default_rng(seed)
    for row in tree.groups:
        parents: dict[int, list[int]] = {}
        for s, devices in enumerate(slots):
            parents.setdefault(int(row[devices[0]]), []).append(s)
        if len(parents) == len(slots):
            continue
        inside = [sorted(parents[g], key=shapes.__getitem__) for g in sorted(parents)]
        wanted = [[shapes[s] for s in group] for group in inside]
        clusters = _grow(graph, shapes, wanted, rng.permutation(len(members)) if seed else None)
        label = np.zeros(len(members), int)
        joined, spots = [], []
        for c, (cluster, group) in enumerate(zip(clusters, inside, strict=True)):
            label[cluster] = c
            joined.append(np.concatenate([members[m] for m in sorted(cluster, key=shapes.__getitem__)]))
            spots.append([p for s in group for p in slots[s]])
        number: dict[tuple[int, ...], int] = {}
        shapes = [number.setdefault(tuple(shape), len(number)) for shape in wanted]
        members, slots, graph = joined, spots, graph.contract(label, len(joined))
    position = np.empty(P, int)
    for ranks, devices in zip(members, slots, strict=True):
        position[ranks] = devices
    return position


def _grow(graph: Traffic, shapes: list[int], wanted: list[list[int]], order: np.ndarray | None) -> list[list[int]]:
    """One cluster per entry of `wanted`, the shapes of the members that it takes."""
    free = np.ones(len(shapes), bool)
    heavy = np.bincount(np.repeat(np.arange(graph.ranks), np.diff(graph.starts)), graph.weights, minlength=graph.ranks)
    queue = np.argsort(-heavy, kind="stable").tolist() if order is None else order.tolist()
    clusters: list[list[int]] = []
    last = None
    for group in wanted:
        need = Counter(group)
        pull: dict[int, float] = {}
        heap: list[tuple[float, int]] = []
        start = _next_start(graph, free, shapes, need, last)
        cluster: list[int] = []
        while sum(need.values()):
            pick = start
            start = None
            while pick is None and heap:
                weight, m = heapq.heappop(heap)
                if free[m] and need[shapes[m]] and -weight == pull[m]:
                    pick = m
            if pick is None:
                pick = next(m for m in queue if free[m] and need[shapes[m]])
            free[pick] = False
            need[shapes[pick]] -= 1
            cluster.append(pick)
            for e in range(graph.starts[pick], graph.starts[pick + 1]):
                m = int(graph.neighbours[e])
                if free[m]:
                    pull[m] = pull.get(m, 0.0) + float(graph.weights[e])
                    heapq.heappush(heap, (-pull[m], m))
        queue = [m for m in queue if free[m]] if len(clusters) % 16 == 15 else queue
        clusters.append(cluster)
        last = cluster
    return clusters


def _next_start(
    graph: Traffic, free: np.ndarray, shapes: list[int], need: Counter, last: list[int] | None
) -> int | None:
    """A free neighbour of the cluster before, so that clusters next to each other talk to each other."""
    best: tuple[float, int] | None = None
    for m in last or ():
        for e in range(graph.starts[m], graph.starts[m + 1]):
            n = int(graph.neighbours[e])
            if free[n] and need[shapes[n]] and (best is None or (-graph.weights[e], n) < best):
                best = (-float(graph.weights[e]), n)
    return None if best is None else best[1]


def swap_dense(traffic: Traffic, tree: Tree, d: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Best swaps of ranks of one kind until none helps. d: (P, P) distances of devices."""
    P = len(position)
    alien = tree.kinds[:, None] != tree.kinds
    w = np.zeros((P, P))
    w[traffic.first, traffic.second] = w[traffic.second, traffic.first] = traffic.weight
    position = position.copy()
    total = float((w * d[np.ix_(position, position)]).sum()) / 2
    for _ in range(4 * P):
        near = d[np.ix_(position, position)]
        A = w @ near
        own = np.diagonal(A)
        delta = A + A.T - own[:, None] - own[None, :] + 2 * w * near
        delta[alien] = 0.0
        i, j = divmod(int(delta.argmin()), P)
        if delta[i, j] >= -1e-9 * max(total, 1e-300):
            break
        position[[i, j]] = position[[j, i]]
        total += float(delta[i, j])
    return position


def swap_sparse(traffic: Traffic, tree: Tree, position: np.ndarray, passes: int = 2) -> np.ndarray:
    """Swaps that bring a rank into the node of a neighbour, taken as soon as they help."""
    position = position.copy()
    leaf = tree.groups[0]
    inside: list[list[int]] = [[] for _ in range(int(leaf.max()) + 1)]
    for i, p in enumerate(position):
        inside[leaf[p]].append(i)
    for _ in range(passes):
        far = tree.groups[:, position[traffic.first]] != tree.groups[:, position[traffic.second]]
        extra = traffic.weight * (tree.distance[far.sum(0)] - tree.distance[0])
        worst = np.argsort(-extra, kind="stable")[: int((extra > 0).sum())]
        movers = np.stack([traffic.first[worst], traffic.second[worst]], 1).ravel()
        improved = False
        for at in _promising(traffic, tree, position, movers, np.repeat(worst, 2)):
            i, j, weight = movers[at], movers[at ^ 1], traffic.weight[worst[at // 2]]
            home = leaf[position[j]]
            if leaf[position[i]] == home:
                continue
            out = _around(traffic, tree, position, i, position[j], j) - _around(
                traffic, tree, position, i, position[i], j
            )
            if out + weight * (tree.distance[0] - tree.distance[1]) >= 0:
                continue
            for k in inside[home]:
                if (
                    k != j
                    and tree.kinds[i] == tree.kinds[k]
                    and _swap_delta(traffic, tree, position, i, k) < -1e-9 * weight
                ):
                    inside[leaf[position[i]]].remove(i)
                    inside[home].remove(k)
                    position[[i, k]] = position[[k, i]]
                    inside[leaf[position[i]]].append(i)
                    inside[leaf[position[k]]].append(k)
                    improved = True
                    break
        if not improved:
            break
    return position


def _promising(
    traffic: Traffic, tree: Tree, position: np.ndarray, movers: np.ndarray, edges: np.ndarray
) -> Iterator[int]:
    """Places of the ranks that may gain by moving to the node of the other end of their edge, in order. movers: both ends of
    every edge, one after the other. The caller may change positions as it goes: then what follows is looked at again, few at
    first and more and more while nothing changes."""
    most = max(1, AT_ONCE // int(np.diff(traffic.starts).max(initial=1)))
    first, count = 0, 1
    while first < len(movers):
        places, before = np.arange(first, min(first + count, len(movers))), position.copy()
        first, count = first + len(places), min(2 * count, most)
        for at in places[_gains(traffic, tree, position, movers, edges, places)].tolist():
            yield at
            if not np.array_equal(before, position):
                first, count = at + 1, 1
                break


def _gains(
    traffic: Traffic, tree: Tree, position: np.ndarray, movers: np.ndarray, edges: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Which of the movers at some places might gain, many at once: the sum that `swap_sparse` asks for one rank is the same but
    for the order of its terms, and as much as that rounds is let pass."""
    i, j, weight = movers[places], movers[places ^ 1], traffic.weight[edges[places]]
    counts = traffic.starts[i + 1] - traffic.starts[i]
    owner = np.repeat(np.arange(len(i)), counts)
    entries = np.arange(len(owner)) + np.repeat(traffic.starts[i] - np.cumsum(counts) + counts, counts)
    others, weights = traffic.neighbours[entries], traffic.weights[entries]
    theirs = tree.groups[:, position[others]]
    there, here = (tree.distance[(theirs != tree.groups[:, position[end]][:, owner]).sum(0)] for end in (j, i))
    out = np.bincount(owner, weights * (there - here) * (others != j[owner]), len(i))
    rounding = 1e-9 * tree.distance[-1] * np.bincount(owner, weights, len(i))
    return np.flatnonzero(out + weight * (tree.distance[0] - tree.distance[1]) < rounding)


def _around(traffic: Traffic, tree: Tree, position: np.ndarray, i: int, device: int, without: int) -> float:
    """The cost of rank i's traffic when it sits on a device, its pairs with `without` left out."""
    part = slice(traffic.starts[i], traffic.starts[i + 1])
    others, weight = traffic.neighbours[part], traffic.weights[part]
    level = (tree.groups[:, position[others]] != tree.groups[:, [device]]).sum(0)
    return float((weight * tree.distance[level] * (others != without)).sum())


def _swap_delta(traffic: Traffic, tree: Tree, position: np.ndarray, i: int, k: int) -> float:
    a, b = position[i], position[k]
    return (
        _around(traffic, tree, position, i, b, k)
        - _around(traffic, tree, position, i, a, k)
        + _around(traffic, tree, position, k, a, i)
        - _around(traffic, tree, position, k, b, i)
    )
