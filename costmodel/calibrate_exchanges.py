"""Seconds that an exchange of rows adds to a mixture of experts, on CPUs.

Rows go to the experts that they chose and back in bursts: their counts are gathered, then rows, gradients and shares set out
together. What such a burst takes is hardly what its bytes take between idle ranks: the cores that compute also move its many
small messages, ranks come to it one after another, and rows are put in order for it. So a mixture runs forward and backward
with its experts by rank and with experts of its own alone, turn by turn, and the difference is that of its bursts:

    with experts by rank − alone  =  BURSTS · (seconds of an exchange of BLOCKS / BURSTS · rows' bytes)

Ranks compute as much beside few rows as beside many, since what a burst takes depends on that too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from autopar.costmodel.calibrate_lateness import usual_of_slowest_s
from autopar.runtime.comm.axis_comm import Along
from autopar.runtime.comm.comm import Comm
from autopar.runtime.kernels.experts import experts

BURSTS = 4
"""Bursts of a mixture, forward and backward: there and back in each."""
BLOCKS = 5
"""Blocks of rows that they carry: rows and results, then rows with the gradients of results, and the gradients of rows."""
TOKENS = (64, 512, 2048)
"""Tokens of every rank, one measurement for each."""
CHOICES, EXPERTS, WIDTH = 2, 2, 256
"""Experts that a token chooses, experts of every rank, and the width of their layers."""
TOKENS_TIMES_INNER = 1 << 16
"""The fewer tokens, the wider the layers are inside."""


def exchange_seconds(comm: Comm, axis: str, turns: int) -> list[tuple[int, float]]:
    """(bytes of the rows that a rank holds, seconds) of an exchange along the axis; every rank must call it."""
    return [
        (tokens * CHOICES * WIDTH * 4 * BLOCKS // BURSTS, _added_s(comm, axis, tokens, turns) / BURSTS)
        for tokens in TOKENS
    ]


def _added_s(comm: Comm, axis: str, tokens: int, turns: int) -> float:
    """Seconds that experts by rank add to a mixture, forward and backward, on the slowest of ranks that begin together: that
    ranks compute for longer than others is no part of an exchange."""
    mixtures = _mixture(tokens, Along(comm, axis)), _mixture(tokens, None)
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(turns + 1):
        for mixture, times in zip(mixtures, seconds, strict=True):
            comm.barrier()
            start = time.perf_counter()
            mixture()
            if turn:
                times.append(time.perf_counter() - start)
    apart_s, alone_s = (usual_of_slowest_s(comm, times) for times in seconds)
    return max(apart_s - alone_s, 1e-6)


def _mixture(tokens: int, along: Along | None) -> Callable[[], Any]:
    """Forward and backward of a mixture whose tokens choose among all experts of the axis, or of this rank."""
    count = EXPERTS * (1 if along is None else along.size)
    x, g, shares = torch.randn(tokens, WIDTH), torch.randn(tokens, WIDTH), torch.rand(tokens, CHOICES)
    inner = TOKENS_TIMES_INNER // tokens
    w_in, w_out = torch.randn(EXPERTS, WIDTH, 2, inner), torch.randn(EXPERTS, inner, WIDTH)
    chosen = torch.randint(0, count, (tokens, CHOICES))
    operands, gate = (x, w_in, None, w_out, None, chosen, shares), ("silu", 1.0, None, 0.0, float(count), "chunk")
    forward = functools.partial(experts.experts, *operands, *gate, along=along)
    backward = functools.partial(experts.experts_grad, g, *operands, True, *gate, along=along)
    return lambda: (forward(), backward())
