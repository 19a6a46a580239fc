"""Seconds for a collective over some ranks of a cluster: the cheapest of ring, tree, hierarchical and in-switch.

`collective_time_s` looks up how the ranks lie on the cluster's levels and takes the fastest algorithm, level by level:
reduce-scatter inside, all-reduce across on 1/P_local of the bytes, all-gather inside. The levels work on different chunks
at once, as NCCL's do, so the slowest one counts. The texts add the levels up: their formulas are in
`tests/oracles/collectives.py`. Letters are theirs: S bytes, P ranks, B bytes/s, a seconds per hop.

`nbytes` is always the full array S: what each rank has (all_reduce), the gathered output (all_gather), the input
(reduce_scatter), what one rank holds (all_to_all, exchange), the message (broadcast, reduce, p2p; shift: of everyone to the
next).
An exchange is an all_to_all of shares that only the data decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from autopar.cluster.link import LinkLevel
from autopar.errors import ClusterError
from autopar.ir.mesh import Mesh
from autopar.ir.visits import visits
from autopar.runtime.comm.comm import Comm

if TYPE_CHECKING:
    from autopar.cluster import ClusterSpec

Shape = tuple[tuple[int, LinkLevel, tuple[int, ...]], ...]
"""How a group of ranks lies on the levels: (fan-out, level, level groups touched), innermost first, fan-outs above 1."""


@lru_cache(maxsize=65536)
def shape_on_levels(levels: tuple[LinkLevel, ...], ranks: tuple[int, ...]) -> Shape:
    """How a group of ranks lies on the levels.

    The product of the fan-outs is at least the number of ranks; uneven groups count by their largest.
    """
    shape = []
    units = sorted(set(ranks))
    unit_of = {r: r for r in units}
    for level in levels:
        members: dict[int, set[int]] = {}
        for r in units:
            members.setdefault(level.group_of(r), set()).add(unit_of[r])
        fan = max(len(m) for m in members.values())
        if fan > 1:
            shape.append((fan, level, tuple(sorted(members))))
        unit_of = {r: level.group_of(r) for r in units}
        if len(members) == 1:
            break
    return tuple(shape)


RAMP_BYTES = 12e6
"""Message size at which half of a link's ramp is paid (fitted to collectives.json, one value for all links)."""
LevelSeconds = Callable[[float, int, LinkLevel, float, int, float], tuple[float, float]]
"""(S bytes, P ranks, level, B bytes/s, depth of a tree, ramp in seconds) -> seconds that grow with the bytes, and that do not."""


def _all_reduce_s(S: float, P: int, level: LinkLevel, B: float, depth: int, ramp: float) -> tuple[float, float]:
    a = level.latency_s
    options = [(2 * (P - 1) / P * S / B, 2 * (P - 1) * a), (2 * S / B, 2 * depth * a)]
    if level.in_switch and P > 2:
        options.append((S / (B * level.in_switch_efficiency / level.efficiency), 2 * a))
    moved, fixed = min(options, key=sum)
    return moved, fixed + 2 * ramp + level.base_s


def _half_s(S: float, P: int, level: LinkLevel, B: float, depth: int, ramp: float) -> tuple[float, float]:
    return (P - 1) / P * S / B, min(P - 1, 4 * depth) * level.latency_s + ramp + level.base_s


def _to_all_s(S: float, P: int, level: LinkLevel, B: float, depth: int, ramp: float) -> tuple[float, float]:
    return (P - 1) / P * S / B, min(P - 1, 16) * level.latency_s + ramp + level.base_s


def _along_a_tree_s(S: float, P: int, level: LinkLevel, B: float, depth: int, ramp: float) -> tuple[float, float]:
    return S / B, depth * level.latency_s + level.base_s


def _to_the_next_s(S: float, P: int, level: LinkLevel, B: float, depth: int, ramp: float) -> tuple[float, float]:
    return S / B, level.latency_s + level.base_s


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of a kind of collective.

    level_s: the cheapest algorithm's seconds on one level. crosses: the bytes that a rank's link carries for each byte of the
    full array in a ring of n. carried: of the full array's bytes, what a level has to carry (`parts`: each further level 1/fan
    of those before it; `whole`: all of them; `to_all`: those whose destination lies across it). inside: the kind that runs on
    every level but the last, once each way. one_way: whether a calibration tells its latency apart from that of the others.
    sample: one call of it for a calibration, given a Comm, the full array and a rank's part (None: measured otherwise). overlap:
    the constant (`Software.exposed_share`) that says how much of one between ops stays exposed where software overlaps them.
    """

    level_s: LevelSeconds
    crosses: Callable[[int], float]
    carried: Literal["parts", "whole", "to_all"] = "parts"
    inside: str = ""
    one_way: bool = False
    sample: Callable[[Comm, Tensor, Tensor], Any] | None = None
    overlap: str = ""


def _of_half(n: int) -> float:
    return (n - 1) / n


def _square(full: Tensor, n: int) -> Tensor:
    """The array as all_to_all takes it, rows for members along dim 1."""
    return full.view(n, -1) if full.numel() % (n * n) else full.view(n, n, -1)


COSTS: dict[str, CollectiveCost] = {
    "all_reduce": CollectiveCost(
        _all_reduce_s,
        lambda n: 2 * (n - 1) / n,
        inside="reduce_scatter",
        sample=lambda comm, full, part: comm.all_reduce(full, "all"),
    ),
    "all_gather": CollectiveCost(
        _half_s, _of_half, sample=lambda comm, full, part: comm.all_gather(part, 0, "all"), overlap="tp_exposed"
    ),
    "reduce_scatter": CollectiveCost(
        _half_s, _of_half, sample=lambda comm, full, part: comm.reduce_scatter(full, 0, "all"), overlap="tp_exposed"
    ),
    "all_to_all": CollectiveCost(
        _to_all_s,
        _of_half,
        carried="to_all",
        sample=lambda comm, full, part: comm.all_to_all(_square(full, comm.group("all").size), 1, 0, "all"),
        overlap="ep_exposed",
    ),
    "exchange": CollectiveCost(_to_all_s, _of_half, carried="to_all", overlap="ep_exposed"),
    "broadcast": CollectiveCost(
        _along_a_tree_s,
        lambda n: 1.0,
        carried="whole",
        one_way=True,
        sample=lambda comm, full, part: comm.broadcast(full, "all"),
    ),
    "reduce": CollectiveCost(_along_a_tree_s, lambda n: 1.0, carried="whole"),
    "p2p": CollectiveCost(_along_a_tree_s, lambda n: 1.0, carried="whole", one_way=True),
    "shift": CollectiveCost(
        _to_the_next_s,
        lambda n: 1.0,
        carried="whole",
        sample=lambda comm, full, part: comm.start_shift(full, "all").wait(),
    ),
}
"""Every kind of collective by its name in `autopar.runtime.comm.collectives`, and messages between two ranks ("p2p")."""


def is_to_all(kind: str) -> bool:
    """Whether every rank sends every other one a part."""
    return COSTS[kind].carried == "to_all"


def one_level_s(kind: str, S: float, P: int, level: LinkLevel, B: float) -> tuple[float, float]:
    """(seconds that grow with the bytes, seconds that do not) of the cheapest algorithm on one level.

    The ramp grows with the bytes too, but saturates: ramp * log2(P) * S / (S + RAMP_BYTES). Where the collective was measured
    on the level it takes what it took, of which the smallest message's seconds do not grow.
    """
    known_s = level.measured_s(kind, P, S) if level.measured else None
    if known_s is not None:
        least_s = min(level.measured_s(kind, P, 0.0) or 0.0, known_s)
        return (known_s - least_s) * level.rate_Bps() / B, least_s
    depth = ceil(log2(P))
    if level.mesh_links:
        B *= min(1.0, (P - 1) / level.mesh_links)
    return COSTS[kind].level_s(S, P, level, B, depth, level.ramp_s * depth * S / (S + RAMP_BYTES))


@lru_cache(maxsize=4096)
def slowest_group(levels: tuple[LinkLevel, ...], mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks of that group along axes of a mesh whose messages take longest, the first one of those that take as long.

    Groups lie alike where the axes' ranks fill the levels' groups or divide them. By threes in nodes of four every group but the
    first one crosses nodes.
    """
    first = mesh.group(axes)
    if len(axes) == 1 and all(
        _are_alike(level, mesh.stride(axes[0]), mesh.sizes[axes[0]], mesh.offset) for level in levels
    ):
        return first
    begins = mesh.group(tuple(axis for axis in mesh.names if axis not in axes), first[0])
    groups = (mesh.group(axes, rank) for rank in begins)
    return max(groups, key=lambda group: _on_shape_s(shape_on_levels(levels, group), "all_reduce", RAMP_BYTES, 1))


def _are_alike(level: LinkLevel, stride: int, count: int, offset: int) -> bool:
    """Whether all groups of count ranks, stride apart, of a mesh that begins at a rank lie alike on a level."""
    size, span = level.group_size, stride * count
    if level.starts or level.group_bandwidths or offset % min(size, span):
        return False
    return size % span == 0 or stride % size == 0 or (size % stride == 0 and span % size == 0)


@lru_cache(maxsize=65536)
def strided_shape(levels: tuple[LinkLevel, ...], stride: int, count: int) -> Shape:
    """`shape_on_levels` of the ranks 0, stride, 2 stride, ... without listing them (levels of equal groups)."""
    shape, units, span = [], count, stride
    for level in levels:
        size = max(span, level.group_size)
        inside = min(units, max(1, size // span))
        if inside > 1:
            shape.append((inside, level, (0,)))
            units = -(-units // inside)
        span = size
        if units == 1:
            break
    return tuple(shape)


def strided_time_s(
    cluster: ClusterSpec, kind: str, nbytes: float, stride: int, count: int, *, concurrent: int = 1
) -> float:
    """Seconds of a collective over `count` ranks `stride` apart: the groups of a mesh axis."""
    if count < 2 or nbytes <= 0:
        return 0.0
    return _on_shape_s(strided_shape(cluster.levels, stride, count), kind, nbytes, concurrent)


def _on_shape_s(shape: Shape, kind: str, nbytes: float, concurrent: int) -> float:
    """Levels work on different chunks at the same time: the slowest level's bytes, plus every level's latency.

    all_reduce on an inner level is a reduce-scatter and an all-gather; the next level carries 1/fan of the bytes. An
    all_to_all loads every level with the bytes whose destination lies across it: it is one between `fan` units that hold
    what goes to any of them. A ring of n ranks crosses a link that `inner` of them share once, with (n - 1)/n of the bytes
    and not with the (fan - 1)/fan that parts of them would have there.
    """
    slowest, latency, S, inner, P, row = 0.0, 0.0, nbytes, 1, 1, COSTS[kind]
    for fan, _, _ in shape:
        P *= fan
    for i, (fan, level, groups) in enumerate(shape):
        B = level.rate_Bps(groups) / concurrent
        if row.inside and i < len(shape) - 1:
            moved, fixed = (2 * x for x in one_level_s(row.inside, S, fan, level, B))
        else:
            carried = {"parts": S, "whole": nbytes, "to_all": nbytes * inner * fan / P}[row.carried]
            moved, fixed = one_level_s(kind, carried, fan, level, B)
            if level.shared and row.carried == "parts":
                moved *= (inner * fan - 1) / (inner * (fan - 1))
        slowest = max(slowest, moved)
        latency += fixed
        S /= fan
        inner *= fan
    return slowest + latency


def dispatch_time_s(shape: Shape, nbytes: float, choices: int, ranks: int, once: bool = True) -> float:
    """Seconds to send every token of a rank to the ranks of its choices (or back), once to each group of a level that has any, or
    for every choice.

    nbytes: of a rank's tokens. Of the groups that a token visits of G, (G - 1)/G are across the level.
    """
    slowest, latency, inner = 0.0, 0.0, 1
    for fan, level, touched in shape:
        groups = ranks // inner
        elsewhere = (visits(groups, choices) if once else choices) * (groups - 1) / groups
        across = 1.0 if inner > 1 else (fan - 1) / fan * groups / max(1, groups - 1)
        slowest = max(slowest, nbytes * elsewhere * across / level.rate_Bps(touched))
        latency += level.base_s + min(fan - 1, 16) * level.latency_s
        inner *= fan
    return slowest + latency


def message_time_s(cluster: ClusterSpec, nbytes: float, ranks: tuple[int, int], senders: int) -> float:
    """Seconds of a message between two ranks. senders: ranks of a node that send one at once, and share its link if it is one."""
    shape, per_node = shape_on_levels(cluster.levels, ranks), cluster.levels[0].group_size
    share = min(1.0, senders / per_node) if shape and shape[-1][1].shared else 1.0
    return collective_time_s(cluster, "p2p", share * nbytes, ranks)


def collective_time_s(
    cluster: ClusterSpec, kind: str, nbytes: float, ranks: tuple[int, ...], *, concurrent: int = 1
) -> float:
    """Seconds for one collective by the fastest algorithm.

    concurrent: how many such groups share each device's links at the same time. Raises ClusterError for an unknown
    kind or a rank outside the cluster.
    """
    if kind not in COSTS:
        raise ClusterError(f"unknown collective {kind!r}; known: {', '.join(COSTS)}")
    if len(ranks) < 2 or nbytes <= 0:
        return 0.0
    if max(ranks) >= cluster.size or min(ranks) < 0:
        raise ClusterError(f"rank {max(ranks)} is outside the cluster of {cluster.size} devices")
    return _on_shape_s(shape_on_levels(cluster.levels, ranks), kind, nbytes, concurrent)
