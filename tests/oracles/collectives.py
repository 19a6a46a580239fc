"""Seconds of collectives in the letters of the texts: S bytes, P ranks, B bytes/s, a seconds per hop."""

from __future__ import annotations

from math import ceil, log2

from autopar.cluster import ClusterSpec
from autopar.costmodel.collective import shape_on_levels


def ring_all_reduce_s(S: float, P: int, B: float, a: float = 0.0) -> float:
    """2(P-1)/P * S/B + 2(P-1) a."""
    return 2 * (P - 1) * (S / (P * B) + a)


def ring_half_s(S: float, P: int, B: float, a: float = 0.0) -> float:
    """Reduce-scatter or all-gather: (P-1)/P * S/B + (P-1) a."""
    return (P - 1) * (S / (P * B) + a)


def tree_all_reduce_s(S: float, P: int, B: float, a: float = 0.0) -> float:
    """Double binary tree, pipelined: 2 log2(P) a + 2 S/B."""
    return 0.0 if P == 1 else 2 * ceil(log2(P)) * a + 2 * S / B


def hierarchical_sum_s(S: float, P_local: int, B_local: float, P_cross: int, B_cross: float) -> float:
    """The texts' simpler sum: an all-reduce inside the groups, then one across them, both on all S bytes."""
    return ring_all_reduce_s(S, P_local, B_local) + ring_all_reduce_s(S, P_cross, B_cross)


def flat_ring_s(cluster: ClusterSpec, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
    """One ring through all ranks at the pace of its slowest link."""
    shape = shape_on_levels(cluster.levels, ranks)
    if not shape:
        return 0.0
    P = len(set(ranks))
    B = min(level.rate_Bps(groups) for _, level, groups in shape)
    a = max(level.latency_s for _, level, _ in shape)
    return ring_all_reduce_s(nbytes, P, B, a) if kind == "all_reduce" else ring_half_s(nbytes, P, B, a)


def compressed_s(S: float, S_small: float, B: float, pack_s: float, unpack_s: float) -> float:
    """Seconds to pack, send the smaller message, and unpack."""
    return pack_s + S_small / B + unpack_s


def compression_speedup(p: float, C: float, delta: float) -> float:
    """Amdahl: p the share of time in communication, C the ratio, delta the loss: 1 / ((1-p) + p / (C (1-delta)))."""
    return 1 / ((1 - p) + p / (C * (1 - delta)))


def aggregated_s(sizes: list[float], B: float, a: float) -> tuple[float, float]:
    """(one message of all bytes, many messages): what a bucket saves is the launches, (n-1) a."""
    return a + sum(sizes) / B, sum(a + S / B for S in sizes)
