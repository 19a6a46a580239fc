"""The machines that a program was compiled for, as far as a run can be held to them.

The manifest has them under "machines". Before a run the machines are compared with them (preflight/); while it runs the
arithmetic of a step at the devices' peak is what utilisation is measured against (metrics.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..data.schema import MOST_RANKS, flag, integer, listed, number, optional, positive, record, text


@dataclass(frozen=True)
class LinkRate:
    """One level of links: it joins groups of `group_size` consecutive ranks. bytes_per_s: of one rank in each direction, while
    all send; latency_s: of a small message."""

    name: str
    group_size: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Machines:
    """ranks_per_node: of one machine; device: its name in the cluster's description; gpu: whether it is one; links: innermost
    first; step_flops: of the products of one step of the largest batch, as if nothing were made again; peak_s: seconds that they
    take at the devices' peak, shared by all, None where nobody published or measured that peak; state_bytes: of a checkpoint."""

    ranks_per_node: int
    device: str
    gpu: bool
    links: tuple[LinkRate, ...] = ()
    step_flops: float = 0.0
    peak_s: float | None = None
    state_bytes: float = 0.0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Machines:
        """The machines in what `MACHINES` has read."""
        return cls(**{**data, "links": tuple(LinkRate(**link) for link in data["links"])})


_LINK = {"name": text(), "group_size": integer(1, MOST_RANKS), "bytes_per_s": positive(), "latency_s": number(0, 1e6)}
MACHINES = record(
    {
        "ranks_per_node": integer(1, MOST_RANKS),
        "device": text(),
        "gpu": flag(),
        "links": listed(record(_LINK), most=64),
        "step_flops": number(0),
        "peak_s": optional(number(0)),
        "state_bytes": number(0),
    }
)
"""`Machines` in a manifest."""
