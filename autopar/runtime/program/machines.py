"""The machines that a program was compiled for, as far as a run can be held to them.

The manifest has them under "machines". Before a run the machines are compared with them (preflight/); while it runs the
arithmetic of a step at the devices' peak is what utilisation is measured against (metrics.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ..data.fields import Length, kept
from ..data.schema import MOST_RANKS, integer, number, positive

GroupSize = Annotated[int, integer(1, MOST_RANKS)]
AtLeastZero = Annotated[float, number(0)]
REQUIRED = kept(required=True)


@dataclass(frozen=True)
class LinkRate:
    """One level of links: it joins groups of `group_size` consecutive ranks. bytes_per_s: of one rank in each direction, while
    all send; latency_s: of a small message."""

    name: str
    group_size: GroupSize
    bytes_per_s: Annotated[float, positive()]
    latency_s: Annotated[float, number(0, 1e6)]


@dataclass(frozen=True)
class Machines:
    """ranks_per_node: of one machine; device: its name in the cluster's description; gpu: whether it is one; links: innermost
    first; step_flops: of the products of one step of the largest batch, as if nothing were made again; peak_s: seconds that they
    take at the devices' peak, shared by all, None where nobody published or measured that peak; state_bytes: of a checkpoint."""

    ranks_per_node: GroupSize
    device: str
    gpu: bool
    links: Annotated[tuple[LinkRate, ...], Length(most=64)] = field(default=(), metadata=REQUIRED)
    step_flops: AtLeastZero = field(default=0.0, metadata=REQUIRED)
    peak_s: AtLeastZero | None = field(default=None, metadata=REQUIRED)
    state_bytes: AtLeastZero = field(default=0.0, metadata=REQUIRED)
