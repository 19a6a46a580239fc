"""Chunks of a tensor along a dim, as collectives send them: one after another along a dim of their own in front."""

from __future__ import annotations

from torch import Tensor


def front_chunks(x: Tensor, dim: int, n: int) -> Tensor:
    """x cut into n chunks along dim, as a view (n, *chunk)."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def join_chunks(chunks: Tensor, dim: int) -> Tensor:
    """(n, *chunk) joined along dim: the inverse of front_chunks; contiguous, copied only when dim is not 0."""
    return chunks.movedim(0, dim).flatten(dim, dim + 1).contiguous()
