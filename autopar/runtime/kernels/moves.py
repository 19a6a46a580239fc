"""Elements moved along a dim of which every rank has a block: each block goes to the ranks that need it, nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.axis_comm import Along

Tensor = torch.Tensor


def flip(x: Tensor, dims: Sequence[int], *, along: Along) -> Tensor:
    """torch.flip, of whose dims one is in blocks: blocks change places with those opposite, each flipped."""
    opposite = [int(rank == along.size - 1 - along.index) for rank in range(along.size)]
    return along.start_exchange(x.flip(*dims).unsqueeze(0), opposite, opposite).wait().squeeze(0)


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int], *, along: Along, dim: int) -> Tensor:
    """torch.roll, of whose dims `dim` is in blocks: a block comes from two that follow each other, a part of each."""
    size = x.shape[dim]
    by = sum(shift for shift, d in zip(shifts, dims, strict=True) if d % x.ndim == dim)
    inside = [(shift, d) for shift, d in zip(shifts, dims, strict=True) if d % x.ndim != dim]
    if inside:
        x = x.roll(*zip(*inside, strict=True))
    blocks, rows = divmod(by % (size * along.size), size)
    kept = along.start_shift(x.narrow(dim, 0, size - rows), blocks)
    if not rows:
        return kept.wait()
    ahead = along.start_shift(x.narrow(dim, size - rows, rows), blocks + 1)
    return torch.cat([ahead.wait(), kept.wait()], dim)
