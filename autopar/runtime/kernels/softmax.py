"""Softmax over a dim of which every rank has a block: one row of statistics is exchanged, never the block.

    m, s    maximum and sum of exp(x - m) of this rank's block; every rank's are gathered in one message
    M, S    maximum of all m, and the sum of all s · exp(m - M)
    y       exp(x - m) · exp(m - M) / S             log y = x - M - log S

A row of -inf alone is NaN, as in torch, also where other ranks have the same row; a block of -inf in a row with finite
entries is 0. Half precision is computed in float32.
"""

from __future__ import annotations

import torch

from ..comm.axis_comm import Along

Tensor = torch.Tensor
_HALF = (torch.float16, torch.bfloat16)


def _softmax(x: Tensor, dim: int, half_to_float: bool = False, *, along: Along) -> Tensor:
    """aten._softmax over blocks."""
    e, factor, total = _statistics(_wide(x), dim, along)
    y = e.mul_(factor.div_(total))
    return y if half_to_float else y.to(x.dtype)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, along: Along) -> Tensor:
    """aten._safe_softmax over blocks: a row of -inf alone becomes zeros."""
    x = x if dtype is None else x.to(dtype)
    e, factor, total = _statistics(_wide(x), dim, along)
    return e.mul_(factor.div_(total.masked_fill_(total == 0, 1))).to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False, *, along: Along) -> Tensor:
    """aten._log_softmax over blocks."""
    wide = _wide(x)
    top, _, total, e = _gathered(wide, dim, along)
    y = torch.sub(wide, top, out=e).sub_(total.log_())
    return y if half_to_float else y.to(x.dtype)


def _softmax_backward_data(g: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype, *, along: Along) -> Tensor:
    """y · (g - sum of g · y)."""
    g, y = _wide(g), _wide(y)
    product = g * y
    total = along.start_all_reduce(product.sum(dim, keepdim=True)).wait()
    return product.sub_(y * total).to(input_dtype)


def _log_softmax_backward_data(g: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype, *, along: Along) -> Tensor:
    """g - exp(y) · sum of g."""
    g = _wide(g)
    total = along.start_all_reduce(g.sum(dim, keepdim=True))
    e = _wide(y).exp()
    return torch.sub(g, e.mul_(total.wait())).to(input_dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x


def _finite(top: Tensor) -> Tensor:
    """The maximum that a row is compared with: 0 for a row of -inf alone, of which exp(x - 0) is 0."""
    return top.masked_fill(top == -torch.inf, 0)


def _gathered(x: Tensor, dim: int, along: Along) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M, m, S and exp(x - m): the maximum of the row and that of the block, the row's sum of exp(x - M), a block's part."""
    m = x.amax(dim, keepdim=True)
    e = (x - _finite(m)).exp_()
    both = along.start_all_gather(torch.stack([m, e.sum(dim, keepdim=True)]), dim + 1 if dim >= 0 else dim).wait()
    tops, sums = both.unbind(0)
    top = tops.amax(dim, keepdim=True)
    total = (sums * (tops - _finite(top)).exp()).sum(dim, keepdim=True)
    return top, m, total, e


def _statistics(x: Tensor, dim: int, along: Along) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - m), exp(m - M) and S."""
    top, m, total, e = _gathered(x, dim, along)
    return e, (m - _finite(top)).exp_(), total
