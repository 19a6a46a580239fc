"""Vector clocks: what happens before what on one rank, whose host and streams run side by side.

A timeline is the host, a CUDA stream, or the stream on which NCCL runs the messages of one process group. Its clock says, for
every timeline, how many of that one's events happen before whatever comes next here (Lamport 1978, Mattern 1989). The n-th
event of timeline s happens before what comes next on timeline t exactly where t.clock[s] >= n, so an event is a name and a
number, and to order two timelines is to join their clocks:

    a kernel is launched            stream ⊔= host
    an event is recorded            event := stream
    a stream waits for an event     stream ⊔= event
    a collective starts             group ⊔= current stream
    a collective is waited for      current stream ⊔= the group where it ended
    the host waits                  host ⊔= stream
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Clock = Mapping[str, int]


@dataclass(slots=True)
class Timeline:
    """The host or a stream, and its clock."""

    name: str
    clock: dict[str, int] = field(default_factory=dict)

    def tick(self) -> int:
        """The number of an event that happens here now."""
        number = self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return number

    def join(self, clock: Clock) -> None:
        """Let what comes next here happen after all that this clock counts."""
        own = self.clock
        for name, number in clock.items():
            if number > own.get(name, 0):
                own[name] = number

    def follows(self, name: str, number: int) -> bool:
        """Whether the event of this number on a timeline happens before what comes next here."""
        return self.clock.get(name, 0) >= number
