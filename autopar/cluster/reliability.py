"""How often what a cluster is made of fails, and what a failure takes: `reliability:` in a cluster file.

    reliability: {device_mtbf_hours: 50000, detect_s: 60, restart_s: 300, storage_GBps: 2, spare_nodes: 4, repair_hours: 24}

The mean time between failures is that of one device with its share of host, links and switches: of a run on n of them one
fails every device_mtbf / n. Meta's run of Llama 3 405B counted 419 unexpected interruptions in 54 days on 16,384
H100 (Grattafiori et al. 2024, section 3.3.4): 50,700 hours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from autopar.cluster.checks import Rate, Seconds, check_fields
from autopar.runtime.data.fields import kept
from autopar.runtime.data.schema import integer


@dataclass(frozen=True)
class Reliability:
    """detect_s: from a failure until the run ends; restart_s: from there until it computes again; storage_Bps: that one node
    writes to where checkpoints rest; spare_nodes: beside those of a run (None: there is always another); repair_s: until a node
    that failed is back."""

    device_mtbf_s: Rate = field(metadata=kept(unit=("device_mtbf_hours", 3600.0)))
    detect_s: Seconds = 60.0
    restart_s: Seconds = 300.0
    storage_Bps: Rate = field(default=2e9, metadata=kept(unit=("storage_GBps", 1e9)))
    spare_nodes: Annotated[int, integer(0)] | None = None
    repair_s: Seconds = field(default=86400.0, metadata=kept(unit=("repair_hours", 3600.0)))

    def __post_init__(self) -> None:
        check_fields(self, "reliability")
