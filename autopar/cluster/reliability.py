"""How often what a cluster is made of fails, and what a failure takes: `reliability:` in a cluster file.

    reliability: {device_mtbf_hours: 50000, detect_s: 60, restart_s: 300, storage_GBps: 2, spare_nodes: 4, repair_hours: 24}

The mean time between failures is that of one device with its share of host, links and switches: of a run on n of them one
fails every device_mtbf / n. Meta's run of Llama 3 405B counted 419 unexpected interruptions in 54 days on 16,384
H100 (Grattafiori et al. 2024, section 3.3.4): 50,700 hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.cluster.checks import MOST_SECONDS, RATE, check_fields, checked
from autopar.runtime.data.schema import Schema, integer, number, optional, positive, record

_SECONDS = number(0, MOST_SECONDS)
_FIELDS: dict[str, Schema[Any]] = {
    "device_mtbf_s": positive(),
    "detect_s": _SECONDS,
    "restart_s": _SECONDS,
    "storage_Bps": RATE,
    "spare_nodes": optional(integer(0, 1 << 20)),
    "repair_s": _SECONDS,
}
_FILE = record(
    {"device_mtbf_hours": positive()},
    {
        "detect_s": _SECONDS,
        "restart_s": _SECONDS,
        "storage_GBps": RATE,
        "spare_nodes": integer(0, 1 << 20),
        "repair_hours": _SECONDS,
    },
)


@dataclass(frozen=True)
class Reliability:
    """detect_s: from a failure until the run ends; restart_s: from there until it computes again; storage_Bps: that one node
    writes to where checkpoints rest; spare_nodes: beside those of a run (None: there is always another); repair_s: until a node
    that failed is back."""

    device_mtbf_s: float
    detect_s: float = 60.0
    restart_s: float = 300.0
    storage_Bps: float = 2e9
    spare_nodes: int | None = None
    repair_s: float = 86400.0

    def __post_init__(self) -> None:
        check_fields(_FIELDS, self, "reliability")

    def to_dict(self) -> dict[str, float | None]:
        """Plain numbers for JSON."""
        return asdict(self)


def reliability_from_file(data: object) -> Reliability:
    """Reads what a cluster file says. Raises ClusterError."""
    given: Mapping[str, Any] = checked(_FILE, data, "", "reliability")
    scales = {"device_mtbf_hours": 3600.0, "storage_GBps": 1e9, "repair_hours": 3600.0}
    names = {"device_mtbf_hours": "device_mtbf_s", "storage_GBps": "storage_Bps", "repair_hours": "repair_s"}
    return Reliability(**{names.get(key, key): value * scales.get(key, 1) for key, value in given.items()})


def reliability_from_dict(data: object) -> Reliability:
    """Reads `to_dict`'s form. Raises ClusterError."""
    required = {"device_mtbf_s": _FIELDS["device_mtbf_s"]}
    schema = record(required, {name: field for name, field in _FIELDS.items() if name not in required})
    return Reliability(**checked(schema, data, "", "reliability"))
