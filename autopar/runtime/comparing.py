"""What ranks tell each other now and then: whether they were given the same data, and which of them are slow.

Every rank is to get the same global batch. One that reads another file, or shuffles otherwise, trains on and spoils the run
without a word, so checksums of batches are compared. A rank is *busy* while it waits for nobody; where one is busy for
longer than the others, they wait for it in every step.
"""

from __future__ import annotations

import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLOW = 1.15
"""Times the median's busy seconds."""


@dataclass(frozen=True)
class Told:
    """Of one rank: a checksum of the batch; seconds of steps since it last told, and of them those that it waited in."""

    batch: int
    seconds: float
    waited_s: float
    host: str = ""

    @property
    def busy_s(self) -> float:
        return self.seconds - self.waited_s


def checksum(tensors: Sequence[Tensor]) -> int:
    """Of their contents, shapes and dtypes."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        total = zlib.crc32(flat.view(torch.uint8).numpy().data if flat.numel() else b"", total)
    return total


def odd_ranks(told: Sequence[Told]) -> list[int]:
    """Ranks whose batch is not that of most (of equally many: of rank 0)."""
    counts = Counter(one.batch for one in told)
    usual = max(counts, key=lambda batch: (counts[batch], batch == told[0].batch))
    return [rank for rank, one in enumerate(told) if one.batch != usual]


def slow_ranks(told: Sequence[Told]) -> list[int]:
    """Ranks that are busy for much longer than the others, the slowest first."""
    usual_s = statistics.median(one.busy_s for one in told)
    slow = [rank for rank, one in enumerate(told) if one.busy_s > SLOW * usual_s]
    return sorted(slow, key=lambda rank: -told[rank].busy_s)


def slow_text(told: Sequence[Told], steps: int) -> str:
    """What is to be said of slow ranks; nothing where there are none."""
    slow = slow_ranks(told)
    if not slow:
        return ""
    usual_s = statistics.median(one.busy_s for one in told) / steps
    shown = ", ".join(
        f"rank {rank} ({told[rank].host}): busy for {told[rank].busy_s / steps * 1e3:.1f} ms a step"
        for rank in slow[:4]
    )
    return f"slow: {shown}; the median is {usual_s * 1e3:.1f} ms, and everybody waits for the slowest"
