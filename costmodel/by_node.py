"""Collectives of processes on CPUs whose group spans nodes: flat, or inside the nodes and then between them.

Gloo knows no nodes. With k nodes of r ranks, n = k r and S bytes, what leaves a node is

                      flat            by node
    all_reduce        2 (n-1)/n S     2 (k-1)/k S     flat: a ring, which leaves a node once
    all_gather        r (k-1)/k S     (k-1)/k S       flat: every rank sends its part to every other one
    reduce_scatter    r (k-1)/k S     (k-1)/k S

The ranks of a node share its link: B is the rate of one of them while all send, so the one that closes a ring has r B. By node
(`runtime/comm/hierarchical.py`) two or three collectives follow each other, each with latencies of its own, so what is small goes
flat. `least_bytes` decides from which size on; emitted programs are told it, and `gloo_time_s` is the price of what they then
do. NCCL does all this by itself: groups of GPUs have the price of `collective.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from autopar.cluster import ClusterSpec
from autopar.cluster.link import LinkLevel
from autopar.costmodel.collective import collective_time_s, one_level_s, shape_on_levels
from autopar.runtime.comm.gloo import EXCHANGE_BYTES
from autopar.runtime.comm.hierarchical import KINDS, grid_of

SIZES = tuple(2**i for i in range(10, 31))
"""Bytes at which the two ways are compared."""
FLAT = "flat "
"""The prefix of a kind that a calibration measured among all ranks of several nodes."""
Levels = tuple[LinkLevel, ...]


def gloo_time_s(cluster: ClusterSpec, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
    """Seconds of a collective as emitted programs do it. Raises ClusterError as `collective_time_s` does."""
    alike = kind not in KINDS or nbytes <= 0 or cluster.device(ranks[0]).kind != "cpu"
    if alike or len(set(nodes_of(cluster.levels, ranks))) in (1, len(ranks)):
        return collective_time_s(cluster, kind, nbytes, ranks)
    least = least_bytes(cluster.levels, kind, ranks)
    way = flat_s if least is None or nbytes < least else by_node_s
    return way(cluster.levels, kind, nbytes, ranks)


def least_bytes(levels: Levels, kind: str, ranks: tuple[int, ...]) -> int | None:
    """Bytes of the full array from which on the collective goes by node; None where it never does. ranks: physical ones, in
    member order."""
    return _least_bytes(levels, kind, ranks) if grid_of(nodes_of(levels, ranks)) is not None else None


def nodes_of(levels: Levels, ranks: Sequence[int]) -> tuple[int, ...]:
    """The node of every rank."""
    return tuple(levels[0].group_of(rank) for rank in ranks)


@lru_cache(maxsize=4096)
def _least_bytes(levels: Levels, kind: str, ranks: tuple[int, ...]) -> int | None:
    least = None
    for nbytes in reversed(SIZES):
        if saved_s(levels, kind, nbytes, ranks) <= 0:
            break
        least = nbytes
    return least


def saved_s(levels: Levels, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
    """Seconds that going by node saves: those that grow with the bytes, less what the rounds inside nodes take of themselves. One
    round between nodes either way has; that a calibration found it shorter one way is chance."""
    flat_grown_s, by_node_grown_s = (
        way(levels, kind, nbytes, ranks) - way(levels, kind, 1.0, ranks) for way in (flat_s, by_node_s)
    )
    inside = tuple(rank for rank in ranks if levels[0].group_of(rank) == levels[0].group_of(ranks[0]))
    rounds = 2 if kind == "all_reduce" else 1
    return flat_grown_s - by_node_grown_s - rounds * _level_s(levels, "all_gather", 1.0, inside)


def flat_s(levels: Levels, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
    """Seconds of one collective among ranks of several nodes."""
    (_, inner, _), *_, (_, outer, touched) = shape_on_levels(levels, ranks)
    n, nodes = len(ranks), len(set(nodes_of(levels, ranks)))
    known_s = outer.measured_s(FLAT + kind, n, nbytes)
    if known_s is not None:
        return known_s
    each, B = n / nodes, outer.rate_Bps(touched)
    if _is_exchange(kind, nbytes, n):
        whole = nbytes if kind == "all_reduce" else nbytes / n
        return _exchange_s(outer, whole * (n - each), B)
    return sum(one_level_s(kind, nbytes, n, replace(outer, measured=()), min(B * each, inner.rate_Bps())))


def by_node_s(levels: Levels, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
    """Seconds of its parts, one after the other. The group's ranks are spread evenly (`grid_of`)."""
    nodes = nodes_of(levels, ranks)
    inside = tuple(rank for rank, node in zip(ranks, nodes, strict=True) if node == nodes[0])
    between = tuple(ranks[nodes.index(node)] for node in dict.fromkeys(nodes))
    part = nbytes / len(inside)
    if kind != "all_reduce":
        return _level_s(levels, kind, nbytes, inside) + _level_s(levels, kind, part, between)
    halves_s = sum(_level_s(levels, half, nbytes, inside) for half in ("reduce_scatter", "all_gather"))
    return halves_s + _level_s(levels, "all_reduce", part, between)


def _level_s(levels: Levels, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
    """Seconds among ranks of one node, or of different ones, over the outermost links that they touch."""
    _, level, touched = shape_on_levels(levels, ranks)[-1]
    n, B = len(ranks), level.rate_Bps(touched)
    if _is_exchange(kind, nbytes, n) and level.measured_s(kind, n, nbytes) is None:
        return _exchange_s(level, (nbytes if kind == "all_reduce" else nbytes / n) * (n - 1), B)
    return sum(one_level_s(kind, nbytes, n, level, B))


def _is_exchange(kind: str, nbytes: float, n: int) -> bool:
    """Whether every rank sends to every other one at once (`runtime/comm/gloo.py`); large all_reduces are rings."""
    return kind != "all_reduce" or nbytes * (n - 1) <= EXCHANGE_BYTES


def _exchange_s(level: LinkLevel, sent: float, B: float) -> float:
    """Seconds of one round in which ranks send so many bytes each."""
    return level.base_s + level.latency_s + sent / B
