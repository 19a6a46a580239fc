"""Memory tiers beyond the device, such as host memory ("ddr") and solid state disks ("nvme"), and what moving bytes costs.

A tier belongs to a rank: its share of the node's capacity, and the bandwidth at which the rank alone moves bytes there
or back (both directions at once: links are full duplex). Moving n bytes in p pieces takes

    t(n) = p·latency + n / bandwidth

and a transfer, asked for ahead of its use, costs only what the computation beside it does not hide. Where device and host
are one memory (a CPU) nothing is hidden. The usual figures of machines, with their sources, are in `data/tiers.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autopar.cluster.checks import Rate, Seconds, check_fields, checked
from autopar.errors import ClusterError, NoRoomError
from autopar.runtime.data.fields import from_data, kept, to_data
from autopar.runtime.data.schema import shown
from autopar.runtime.memory.tiers import TIER_KINDS, tier_names


@dataclass(frozen=True)
class Tier:
    """capacity_bytes: a rank's share. bandwidth_Bps: between this rank's device and the tier, each direction."""

    name: str = field(metadata=kept(absent=True))
    capacity_bytes: Rate = field(metadata=kept(unit=("capacity_GB", 1e9)))
    bandwidth_Bps: Rate = field(metadata=kept(unit=("bandwidth_GBps", 1e9)))
    latency_s: Seconds = field(default=0.0, metadata=kept(unit=("latency_us", 1e-6)))

    def __post_init__(self) -> None:
        _check_name(self.name)
        check_fields(self, "tier")

    def move_s(self, nbytes: float, pieces: int = 1) -> float:
        """Seconds to move bytes to the tier, or back, in so many transfers one after another."""
        return pieces * self.latency_s + nbytes / self.bandwidth_Bps if nbytes else 0.0


def fastest_first(tiers: Iterable[Tier]) -> tuple[Tier, ...]:
    """The tiers in the order of their kinds' ranks."""
    return tuple(sorted(tiers, key=lambda tier: TIER_KINDS[tier.name].rank))


def _check_name(name: object) -> None:
    """Raises ClusterError where there is no such tier."""
    if name not in tier_names():
        raise ClusterError(f"unknown memory tier {shown(name)}; tiers are {', '.join(tier_names())}")


def non_overlapped_s(transfer_s: float, compute_s: float) -> float:
    """Seconds of a transfer that computation of so many seconds beside it does not hide."""
    return max(0.0, transfer_s - compute_s)


def forward_non_overlapped_s(compute_s: Sequence[float], out_s: Sequence[float]) -> float:
    """Seconds that parking adds to a sequence of calls: what call k made leaves, one after another, after call k.

    The last must have left when the next action wants its room: the end of transfers is max over k of (end of call k, end
    of the transfer before) + out_s[k].
    """
    computed = moved = 0.0
    for work, leaving in zip(compute_s, out_s, strict=True):
        computed += work
        if leaving:
            moved = max(moved, computed) + leaving
    return max(0.0, moved - computed)


def backward_non_overlapped_s(compute_s: Sequence[float], in_s: Sequence[float]) -> float:
    """Seconds that fetching adds to a sequence of calls: what call k needs is asked for before call k − 1 begins."""
    now = moved = 0.0
    ready = 0.0
    for k, work in enumerate(compute_s):
        if k == 0:
            moved = ready = in_s[0]
        start = max(now, ready)
        if k + 1 < len(in_s):
            moved = max(moved, now if k == 0 else start) + in_s[k + 1]
            following = moved
        else:
            following = 0.0
        now = start + work
        ready = following
    return max(0.0, now - sum(compute_s))


def parts_non_overlapped_s(compute_s: float, in_s: Sequence[float], out_s: Sequence[float]) -> float:
    """Seconds that working by parts adds: the first part's way in and the last one's out, and what the slower of the two
    directions takes longer than the work."""
    if not in_s:
        return 0.0
    return in_s[0] + out_s[-1] + max(0.0, sum(in_s[1:]) - compute_s, sum(out_s[:-1]) - compute_s)


def place(sizes: Mapping[str, float], tiers: Sequence[Tier], used: Mapping[str, float] | None = None) -> dict[str, str]:
    """Which tier each of some named things rests in: in the order given (most used first), each in the fastest tier that
    has room. used: bytes taken already. Raises InfeasibleError, saying what is short."""
    room = {tier.name: tier.capacity_bytes - (used or {}).get(tier.name, 0.0) for tier in tiers}
    found = {}
    for name, nbytes in sizes.items():
        tier = next((t for t, left in room.items() if nbytes <= left), None)
        if tier is None:
            wanted, had = sum(sizes.values()), sum(t.capacity_bytes for t in tiers) - sum((used or {}).values())
            raise NoRoomError(
                f"{wanted / 1e9:.3g} GB per rank are to rest in {', '.join(t.name for t in tiers)}, where {had / 1e9:.3g} GB "
                f"are free: {max(wanted - had, nbytes - max(room.values(), default=0.0)) / 1e9:.3g} GB short per rank ({name} "
                "found no room); give the cluster larger tiers, use more ranks, or offload less"
            )
        room[tier] -= nbytes
        found[name] = tier
    return found


def tiers_data(tiers: Iterable[Tier]) -> dict[str, Any]:
    """Plain data for JSON: the figures of every tier by its name."""
    return {tier.name: to_data(tier) for tier in tiers}


def tiers_from_dict(data: Any, devices_per_node: int = 1) -> tuple[Tier, ...]:
    """`{ddr: {capacity_GB, bandwidth_GBps, latency_us}, nvme: …}` as in a cluster file (capacity of a node, shared by its
    devices; bandwidth of each), or `tiers_data`'s numbers per rank. Fastest tier first. Raises ClusterError."""
    if not isinstance(data, Mapping):
        raise ClusterError(
            f"tiers: a mapping such as {{ddr: {{capacity_GB: 2000, bandwidth_GBps: 50}}}}, got {shown(data)}"
        )
    tiers = []
    for name, row in data.items():
        _check_name(name)
        tier = checked(partial(from_data, Tier, name=name), row, "", f"tier {name}")
        share = devices_per_node if "capacity_GB" in row else 1
        tiers.append(replace(tier, capacity_bytes=tier.capacity_bytes / share))
    return fastest_first(tiers)
