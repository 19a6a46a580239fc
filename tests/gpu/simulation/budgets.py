"""The work that a step asks of the host and the device: waits of the host, kernels, copies and messages, each with its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tests.gpu.simulation.findings import Place

LAUNCH, COPY, MESSAGE, SYNC, LATE = "launch", "copy", "message", "sync", "late"


@dataclass(frozen=True, slots=True)
class Asked:
    """One thing that the host asked for. kind: a launch of a kernel, a copy between host and device, a message (one NCCL
    kernel), or a sync, where the host waits for the device (late: only for what it was told before this step); step, action:
    what the rank was doing; nbytes: that it reads and writes, every tensor once."""

    kind: str
    op: str
    place: Place
    step: int
    action: str
    nbytes: int = 0


class Budget:
    """All that one rank asked for, in order."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.step = 0
        self.action = ""

    def note(self, kind: str, op: str, place: Place, tensors: Iterable[Tensor] = ()) -> None:
        """Note something. tensors: that it reads and writes."""
        nbytes = sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors)
        self.asked.append(Asked(kind, op, place, self.step, self.action, nbytes))

    def of(self, kind: str, step: int, microbatch: int | None = None) -> list[Asked]:
        """The things asked for in a step, or by the actions of one of its microbatches ("F3", "B3.1", …)."""
        return [
            one
            for one in self.asked
            if one.kind == kind and one.step == step and (microbatch is None or _microbatch(one.action) == microbatch)
        ]

    def bytes_of(self, kind: str, step: int, microbatch: int | None = None) -> int:
        """The bytes that these move."""
        return sum(one.nbytes for one in self.of(kind, step, microbatch))

    def by_place(self, kind: str, step: int) -> dict[str, int]:
        """How often each line asked for it, most first."""
        return dict(Counter(f"{one.op} at {one.place}" for one in self.of(kind, step)).most_common())


def _microbatch(action: str) -> int | None:
    """The microbatch of an action by its text, None for what comes once a step."""
    number = action[1:].partition(".")[0]
    return int(number) if action[:1] in ("F", "B", "W") and number.isdigit() else None
