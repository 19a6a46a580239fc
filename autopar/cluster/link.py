"""Links: the levels of a cluster's network, innermost first (node, rack, cluster).

A level joins groups of `group_size` consecutive ranks; inside one group every device has `bandwidth_Bps` in each
direction at once. `oversubscription` of a fat tree divides what a device gets when all talk across the level;
`efficiency` is the share of the nominal rate that large messages reach (70-95 % in practice).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import ClusterError


@dataclass(frozen=True)
class LinkLevel:
    """One level. Bytes/s per device and direction, seconds per hop.

    base_s: launching a collective. ramp_s: what a large message adds per doubling of ranks until its pipeline is full
    (small ones use low-latency protocols). in_switch: switches reduce (NVLink SHARP), an all-reduce sends each byte
    once, at `in_switch_efficiency`. mesh_links: direct links to so many peers share the bandwidth (xGMI), so that a
    small group reaches only its part.
    starts: first rank of each group when groups differ in size; group_bandwidths: one rate per group when they differ.
    """

    name: str
    group_size: int
    bandwidth_Bps: float
    latency_s: float = 5e-6
    efficiency: float = 1.0
    oversubscription: float = 1.0
    in_switch: bool = False
    in_switch_efficiency: float = 1.0
    base_s: float = 0.0
    ramp_s: float = 0.0
    mesh_links: int = 0
    starts: tuple[int, ...] = ()
    group_bandwidths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ClusterError(f"link level {self.name}: group_size must be at least 1, got {self.group_size}")
        if not self.bandwidth_Bps > 0:
            raise ClusterError(f"link level {self.name}: bandwidth must be positive, got {self.bandwidth_Bps}")
        if self.latency_s < 0:
            raise ClusterError(f"link level {self.name}: latency must not be negative, got {self.latency_s}")
        if self.base_s < 0 or self.ramp_s < 0:
            raise ClusterError(f"link level {self.name}: base_s and ramp_s must not be negative")
        if not 0 < self.efficiency <= 1:
            raise ClusterError(f"link level {self.name}: efficiency must be in (0, 1], got {self.efficiency}")
        if self.oversubscription < 1:
            raise ClusterError(f"link level {self.name}: oversubscription is at least 1, got {self.oversubscription}")

    def group_of(self, rank: int) -> int:
        """Which group of this level a rank belongs to."""
        return bisect_right(self.starts, rank) - 1 if self.starts else rank // self.group_size

    def rate_Bps(self, groups: tuple[int, ...] = ()) -> float:
        """Bytes/s that large messages reach, of the slowest among `groups`."""
        nominal = self.bandwidth_Bps
        if self.group_bandwidths and groups:
            nominal = min(self.group_bandwidths[g] for g in groups)
        return nominal * self.efficiency / self.oversubscription

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = dict(self.__dict__)
        data["starts"] = list(self.starts)
        data["group_bandwidths"] = list(self.group_bandwidths)
        return data


def link_from_dict(data: Mapping[str, Any]) -> LinkLevel:
    """Reads `to_dict`'s form. Raises ClusterError for unknown or missing keys."""
    fields = dict(data)
    allowed = LinkLevel.__dataclass_fields__
    for key in fields:
        if key not in allowed:
            raise ClusterError(f"link level: unknown key {key!r}; allowed: {', '.join(allowed)}")
    for key in ("name", "group_size", "bandwidth_Bps"):
        if key not in fields:
            raise ClusterError(f"link level: {key} is missing")
    fields["starts"] = tuple(fields.get("starts", ()))
    fields["group_bandwidths"] = tuple(fields.get("group_bandwidths", ()))
    return LinkLevel(**fields)
