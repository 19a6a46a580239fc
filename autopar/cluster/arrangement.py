"""Machines in an order that does not depend on how they are listed, where devices are of several kinds.

Ranks of a plan count through machines kind after kind, and stages of a pipeline take kinds in that order: which kind comes first
is a choice, in which order machines were written down is none. Groups of links are moved as a whole, outermost first:

    listed     V100 ×4 | T4 ×4 | V100 ×4           arranged   V100 ×4 | V100 ×4 | T4 ×4      or T4 first
    place      0..3      4..7    8..11             its rank   0..3      8..11     4..7

A plan's `placement` says the rank of every listed place, so machines are started as they were listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, permutations

from autopar.cluster.device import DeviceSpec
from autopar.cluster.link import LinkLevel
from autopar.cluster.spec import ClusterSpec

MOST_PERMUTED = 3
"""Up to so many kinds of devices every order is tried; of more the one from fast to slow, and its reverse."""

Node = tuple[list[int], object]
"""Listed places in their new order, and what they are sorted by."""


@dataclass(frozen=True)
class Arrangement:
    """A cluster with its machines in another order. placement: the rank of every listed place (empty: the same)."""

    cluster: ClusterSpec
    placement: tuple[int, ...]


def arrangements(cluster: ClusterSpec) -> list[Arrangement]:
    """The orders of kinds that plans are searched for, fastest kind first; the same for every order in which the machines of a
    cluster are listed. A cluster of one kind stays as it is."""
    kinds = sorted({device for _, device in cluster.devices}, key=_from_fast_to_slow)
    if len(kinds) == 1:
        return [Arrangement(cluster, ())]
    orders = permutations(kinds) if len(kinds) <= MOST_PERMUTED else (kinds, kinds[::-1])
    return list(dict.fromkeys(_arranged(cluster, order) for order in orders))


def arranged(cluster: ClusterSpec, placement: Sequence[int]) -> ClusterSpec:
    """The cluster in the order that a plan's ranks count in: its arrangement with the devices that the placement says, if any."""
    if cluster.homogeneous_devices:
        return cluster
    ways = arrangements(cluster)
    places = sorted(range(cluster.size), key=placement.__getitem__) if len(placement) == cluster.size else None
    wanted = _runs([cluster.device(place) for place in places or range(cluster.size)])
    return next((way.cluster for way in ways if way.cluster.devices == wanted), cluster)


def placement_onto(cluster: ClusterSpec, other: ClusterSpec) -> tuple[int, ...]:
    """The rank of every place of a cluster, where ranks count through an arrangement of it."""
    ways = () if other is cluster else arrangements(cluster)
    return next((way.placement for way in ways if way.cluster == other), ())


def _from_fast_to_slow(device: DeviceSpec) -> tuple[object, ...]:
    """The key by which kinds are sorted; devices that differ at all differ in it."""
    peaks = sorted(device.peak_flops.values(), reverse=True)
    return [-peak for peak in peaks], -device.memory_bandwidth_Bps, -device.memory_bytes, device.name, repr(device)


def _arranged(cluster: ClusterSpec, kinds: Sequence[DeviceSpec]) -> Arrangement:
    number = {device: k for k, device in enumerate(kinds)}
    order, _ = _sorted(cluster, list(range(cluster.size)), len(cluster.levels) - 1, number)
    levels = tuple(_moved(level, order) for level in cluster.levels)
    moved = replace(cluster, devices=_runs([cluster.device(place) for place in order]), levels=levels)
    ranks = sorted(range(cluster.size), key=order.__getitem__)
    return Arrangement(moved, () if ranks == sorted(ranks) else tuple(ranks))


def _sorted(cluster: ClusterSpec, places: list[int], level: int, number: dict[DeviceSpec, int]) -> Node:
    """Places of one group of a level sorted, groups of the level below moved as a whole."""
    if level < 0:
        kinds = [number[cluster.device(place)] for place in places]
        order = sorted(range(len(places)), key=kinds.__getitem__)
        return [places[i] for i in order], _counts(sorted(kinds))
    link = cluster.levels[level]
    groups = [list(group) for _, group in groupby(places, key=link.group_of)]
    nodes = [_sorted(cluster, group, level - 1, number) for group in groups]
    rates = [link.group_bandwidths[link.group_of(group[0])] if link.group_bandwidths else 0.0 for group in groups]
    keys = [
        (_counts([number[cluster.device(place)] for place in inside]), -rate, key)
        for (inside, key), rate in zip(nodes, rates, strict=True)
    ]
    order = sorted(range(len(groups)), key=keys.__getitem__)
    return [place for i in order for place in nodes[i][0]], [keys[i] for i in order]


def _counts(kinds: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of equal kinds, a long one before a short one."""
    return [(kind, -len(list(run))) for kind, run in groupby(kinds)]


def _runs(devices: Sequence[DeviceSpec]) -> tuple[tuple[int, DeviceSpec], ...]:
    return tuple((len(list(run)), device) for device, run in groupby(devices))


def _moved(level: LinkLevel, order: Sequence[int]) -> LinkLevel:
    """A level whose groups begin elsewhere, as places are in another order."""
    groups = list(_groups(level, order))
    starts = tuple(start for start, _ in groups)
    even = starts == tuple(k * level.group_size for k in range(len(starts)))
    rates = tuple(level.group_bandwidths[group] for _, group in groups) if level.group_bandwidths else ()
    return replace(level, starts=() if even else starts, group_bandwidths=rates)


def _groups(level: LinkLevel, order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first rank, number) of the groups in their new order."""
    start = 0
    for group, places in groupby(order, key=level.group_of):
        yield start, group
        start += len(list(places))
