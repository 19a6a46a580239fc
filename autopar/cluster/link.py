"""Links: the levels of a cluster's network, innermost first (node, rack, cluster).

A level joins groups of `group_size` consecutive ranks; inside one group every device has `bandwidth_Bps` in each
direction at once. `oversubscription` of a fat tree divides what a device gets when all talk across the level;
`efficiency` is the share of the nominal rate that large messages reach (70-95 % in practice).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated

from autopar.cluster.checks import Oversubscription, Ranks, Rate, Seconds, Share, check_fields
from autopar.cluster.kernels import Points, seconds_at
from autopar.errors import ClusterError
from autopar.runtime.data.fields import kept
from autopar.runtime.data.schema import MOST_RANKS, integer, shown

Rank = Annotated[int, integer(0, MOST_RANKS)]
MeasuredCollective = tuple[str, Ranks, Points]
"""A kind of collective, how many ranks took part, and seconds by bytes of the full array."""


@dataclass(frozen=True)
class LinkLevel:
    """One level. Bytes/s per device and direction, seconds per hop.

    base_s: launching a collective. ramp_s: what a large message adds per doubling of ranks until its pipeline is full
    (small ones use low-latency protocols). in_switch: switches reduce (NVLink SHARP), an all-reduce sends each byte
    once, at `in_switch_efficiency`. mesh_links: direct links to so many peers share the bandwidth (xGMI), so that a
    small group reaches only its part.
    shared: whether the devices of a group of the level inside send over one link, of which `bandwidth_Bps` is a device's part (a
    network card of a node, Ethernet); a ring then crosses it once, with all of its bytes.
    measured: collectives whose seconds are known, in place of the formulas; exposed: share of them that computing meanwhile does
    not hide, as the cores that compute also move the bytes.
    starts: first rank of each group when groups differ in size; group_bandwidths: one rate per group when they differ.
    """

    name: str
    group_size: Ranks
    bandwidth_Bps: Rate
    latency_s: Seconds = 5e-6
    efficiency: Share = 1.0
    oversubscription: Oversubscription = 1.0
    in_switch: bool = False
    in_switch_efficiency: Share = 1.0
    base_s: Seconds = 0.0
    ramp_s: Seconds = 0.0
    mesh_links: Rank = 0
    starts: tuple[Rank, ...] = ()
    group_bandwidths: tuple[Rate, ...] = ()
    measured: tuple[MeasuredCollective, ...] = ()
    exposed: Share = 1.0
    shared: bool = field(default=False, metadata=kept(sparse=True))

    def __post_init__(self) -> None:
        check_fields(self, "link level")
        if self.starts and (self.starts[0] != 0 or any(a >= b for a, b in pairwise(self.starts))):
            raise ClusterError(f"link level {self.name}: starts must begin with 0 and grow, got {shown(self.starts)}")

    def group_of(self, rank: int) -> int:
        """Which group of this level a rank belongs to."""
        return bisect_right(self.starts, rank) - 1 if self.starts else rank // self.group_size

    def place_of(self, first: int, count: int) -> tuple[int, float]:
        """How so many ranks from one on lie: after how many others of the first one's group, and at which rate."""
        groups = range(self.group_of(first), self.group_of(first + count - 1) + 1)
        start = self.starts[groups[0]] if self.starts else groups[0] * self.group_size
        return first - start, self.rate_Bps(tuple(groups) if self.group_bandwidths else ())

    def rate_Bps(self, groups: tuple[int, ...] = ()) -> float:
        """Bytes/s that large messages reach, of the slowest among `groups`."""
        nominal = self.bandwidth_Bps
        if self.group_bandwidths and groups:
            nominal = min(self.group_bandwidths[g] for g in groups)
        return nominal * self.efficiency / self.oversubscription

    def slower(self, factor: float) -> LinkLevel:
        """A level over which every message takes `factor` times as long."""
        return replace(
            self,
            bandwidth_Bps=self.bandwidth_Bps / factor,
            group_bandwidths=tuple(rate / factor for rate in self.group_bandwidths),
            latency_s=self.latency_s * factor,
            base_s=self.base_s * factor,
            ramp_s=self.ramp_s * factor,
            measured=tuple(
                (kind, ranks, tuple((nbytes, seconds * factor) for nbytes, seconds in points))
                for kind, ranks, points in self.measured
            ),
        )

    def measured_s(self, kind: str, ranks: int, nbytes: float) -> float | None:
        """Seconds of a collective among so many ranks inside a group as it was measured; None where it was not."""
        for known, of, points in self.measured:
            if known == kind and of == ranks:
                return float(seconds_at(points, nbytes))
        return None


PROFILED = (
    "bandwidth_Bps",
    "base_s",
    "latency_s",
    "ramp_s",
    "efficiency",
    "in_switch_efficiency",
    "measured",
    "exposed",
)
"""The figures of a link that a calibration replaces."""
