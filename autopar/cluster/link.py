"""Links: the levels of a cluster's network, innermost first (node, rack, cluster).

A level joins groups of `group_size` consecutive ranks; inside one group every device has `bandwidth_Bps` in each
direction at once. `oversubscription` of a fat tree divides what a device gets when all talk across the level;
`efficiency` is the share of the nominal rate that large messages reach (70-95 % in practice).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from autopar.cluster.checks import OVERSUBSCRIPTION, RANKS, RATE, SECONDS, SHARE, check_fields, checked, name_text
from autopar.cluster.kernels import POINTS, Points, points_of, seconds_at
from autopar.errors import ClusterError
from autopar.runtime.data.schema import MOST_RANKS, Schema, flag, integer, listed, record, row, shown, text

MeasuredCollective = tuple[str, int, Points]
"""A kind of collective, how many ranks took part, and seconds by bytes of the full array."""


@dataclass(frozen=True)
class LinkLevel:
    """One level. Bytes/s per device and direction, seconds per hop.

    base_s: launching a collective. ramp_s: what a large message adds per doubling of ranks until its pipeline is full
    (small ones use low-latency protocols). in_switch: switches reduce (NVLink SHARP), an all-reduce sends each byte
    once, at `in_switch_efficiency`. mesh_links: direct links to so many peers share the bandwidth (xGMI), so that a
    small group reaches only its part.
    measured: collectives whose seconds are known, in place of the formulas; exposed: share of them that computing meanwhile does
    not hide, as the cores that compute also move the bytes.
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
    measured: tuple[MeasuredCollective, ...] = ()
    exposed: float = 1.0

    def __post_init__(self) -> None:
        check_fields(_SCHEMAS, self, f"link level {name_text(self.name, 'link level')}")
        if self.starts and (self.starts[0] != 0 or any(a >= b for a, b in pairwise(self.starts))):
            raise ClusterError(f"link level {self.name}: starts must begin with 0 and grow, got {shown(self.starts)}")

    def group_of(self, rank: int) -> int:
        """Which group of this level a rank belongs to."""
        return bisect_right(self.starts, rank) - 1 if self.starts else rank // self.group_size

    def rate_Bps(self, groups: tuple[int, ...] = ()) -> float:
        """Bytes/s that large messages reach, of the slowest among `groups`."""
        nominal = self.bandwidth_Bps
        if self.group_bandwidths and groups:
            nominal = min(self.group_bandwidths[g] for g in groups)
        return nominal * self.efficiency / self.oversubscription

    def measured_s(self, kind: str, ranks: int, nbytes: float) -> float | None:
        """Seconds of a collective among so many ranks inside a group as it was measured; None where it was not."""
        for known, of, points in self.measured:
            if known == kind and of == ranks:
                return float(seconds_at(points, nbytes))
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = dict(self.__dict__)
        data["measured"] = [[kind, ranks, [list(p) for p in points]] for kind, ranks, points in self.measured]
        data["starts"] = list(self.starts)
        data["group_bandwidths"] = list(self.group_bandwidths)
        return data


_SCHEMAS: dict[str, Schema[Any]] = {
    "name": text(),
    "group_size": RANKS,
    "bandwidth_Bps": RATE,
    "latency_s": SECONDS,
    "efficiency": SHARE,
    "oversubscription": OVERSUBSCRIPTION,
    "in_switch": flag(),
    "in_switch_efficiency": SHARE,
    "base_s": SECONDS,
    "ramp_s": SECONDS,
    "mesh_links": integer(0, MOST_RANKS),
    "starts": listed(integer(0, MOST_RANKS)),
    "group_bandwidths": listed(RATE),
    "measured": listed(row(text(), RANKS, POINTS)),
    "exposed": SHARE,
}
_REQUIRED = ("name", "group_size", "bandwidth_Bps")
LINK = record({name: _SCHEMAS[name] for name in _REQUIRED}, {n: s for n, s in _SCHEMAS.items() if n not in _REQUIRED})
"""`LinkLevel.to_dict`'s form."""


def link_from_dict(data: Mapping[str, Any]) -> LinkLevel:
    """Reads `to_dict`'s form. Raises ClusterError for unknown or missing keys."""
    fields = checked(LINK, data, "link level")
    lists = {key: tuple(fields.get(key, ())) for key in ("starts", "group_bandwidths")}
    return LinkLevel(**{**fields, **lists, "measured": _measured(fields.get("measured", ()))})


def _measured(rows: Iterable[tuple[str, int, Points]]) -> tuple[MeasuredCollective, ...]:
    return tuple((kind, ranks, points_of(points, f"{kind} of {ranks} ranks")) for kind, ranks, points in rows)


_PROFILED = (
    "bandwidth_Bps",
    "base_s",
    "latency_s",
    "ramp_s",
    "efficiency",
    "in_switch_efficiency",
    "measured",
    "exposed",
)
PROFILED_LINK = record({}, {name: _SCHEMAS[name] for name in _PROFILED})
"""The figures of a link that a calibration replaces."""


def profiled_link(level: LinkLevel, figures: Mapping[str, Any]) -> LinkLevel:
    """A level with what a calibration measured of it. Raises ClusterError."""
    return replace(level, **{**figures, "measured": _measured(figures.get("measured", level.measured))})
