"""How long ops take on the rank that all others wait for.

The cores of a machine are not equally fast at a time: others use them, share their caches and their clocks. A step goes on when
its slowest rank does, and who that is changes from one step to the next. Of ranks that compute alike for as long as between two
messages of a step, the slowest takes

    (1 + late) · (mean of all ranks)

An op is measured on every rank, by itself; so what a step's ops take is that mean, times 1 + late.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from autopar.costmodel.host_kernels import Measured, usual_s
from autopar.runtime.comm.comm import Comm

WINDOW_S = 0.05
"""Seconds that ranks compute between two meetings; the share hardly depends on it from 10 ms to 100."""
SIDE, ELEMENTS = 512, 1 << 20
"""The side of a product that lies in a cache, and the elements of a pass over memory that does not: a window is as many
of each."""


def late_share(comm: Comm, windows: int) -> float:
    """The share of their mean by which the slowest of all ranks is late after a window; every rank must call it."""
    operand, row = torch.randn(SIDE, SIDE), torch.zeros(ELEMENTS)

    def compute_s(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            torch.mm(operand, operand)
            row.add_(1.0)
        return time.perf_counter() - start

    compute_s(2)
    times = max(1, round(WINDOW_S / max(comm.share(compute_s(4) / 4))))
    seconds = []
    for _ in range(windows):
        comm.barrier()
        seconds.append(compute_s(times))
    mean_s = usual_s(np.mean(comm.share(seconds), axis=0))
    return usual_of_slowest_s(comm, seconds) / mean_s - 1


def usual_of_slowest_s(comm: Comm, seconds: Sequence[float]) -> float:
    """Seconds that the slowest rank usually takes. seconds: of this rank, turn by turn; every rank must call it."""
    return usual_s(np.max(comm.share(list(seconds)), axis=0))


def of_ranks(by_rank: Sequence[Sequence[Measured]]) -> list[Measured]:
    """The ops that every rank has measured, as long as they take in the mean of all."""
    return [
        alike[0]._replace(seconds=float(np.mean([one.seconds for one in alike])))
        for alike in zip(*by_rank, strict=True)
    ]


def of_slowest(ops: Sequence[Measured], late: float) -> list[Measured]:
    """Ops as long as they take on the slowest rank."""
    return [one._replace(seconds=(1 + late) * one.seconds) for one in ops]
