"""Scans along a dim of which every rank has a block: each scans its block and adds what comes before it.

    cumsum      local cumsum + sum of the blocks before

What comes before is known from one row of every block: these are gathered (a message of one row), never the blocks.
"""

from __future__ import annotations

import torch

from .along import Along

Tensor = torch.Tensor


def cumsum(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, along: Along) -> Tensor:
    """torch.cumsum over blocks: x is this rank's block of dim."""
    own = torch.cumsum(x, dim, dtype=dtype)
    last = own.narrow(dim, own.shape[dim] - 1, 1)
    ends = along.start_all_gather(last, dim).wait()
    return own.add_(ends.narrow(dim, 0, along.index).sum(dim, keepdim=True))
