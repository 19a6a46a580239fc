"""Batch norm with statistics of the whole batch, of which every rank has a block (of samples, of rows of the image).

    forward    mean and variance of this rank's block; every rank's are gathered in one message and merged:
               var = mean of (var_r + (mean_r - mean)²), weighted by how much ranks have where that is unequal
    backward   torch's own dx for a batch that is this block alone, with the two sums over it that are the gradients of weight
               and bias; these are added up over the ranks in one message, and dx is moved by what that changes in them

Where one rank has it all that is torch's kernels and no message. Statistics of numbers of 16 bits are in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from ..comm.axis_comm import Along
from ..comm.devices import device_of
from .kernels import has_fused_norm
from .ops import norm_dtype

Tensor = torch.Tensor
aten = torch.ops.aten
_LITTLE = 1e-12
"""Is added to a variance whose inverse root a kernel gives."""


def batch_norm(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, **along: Along) -> tuple[Tensor, ...]:
    """The norm, and mean and variance over all but the channels. x: (n, c, *space); w, b: (c,), of the statistics' dtype."""
    if not along and has_fused_norm(device_of(x)):
        y, mean, rstd = aten.native_batch_norm(x, w, b, None, None, True, 0.0, eps)
        return y, mean, _variance(rstd, eps)
    mean, var = _moments(x)
    axes = list(_axes(along.values()))
    if any(axis.uneven for axis in axes):
        mean, var = _merged_by_counts(mean, var, _count(x), axes)
    else:
        for axis in axes:
            means, variances = axis.start_all_gather(torch.stack([mean, var]).unsqueeze(0), 0).wait().unbind(1)
            mean = means.mean(0)
            var = variances.add_((means - mean).square_()).mean(0)
    return batch_norm_eval(x, w, b, mean, var, eps), mean, var


def batch_norm_eval(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """The norm by statistics that are given."""
    return aten.native_batch_norm(x, w, b, mean, var, False, 0.0, eps)[0]


def batch_norm_backward(
    g: Tensor, x: Tensor, w: Tensor | None, mean: Tensor, var: Tensor, eps: float, training: bool, **along: Along
) -> tuple[Tensor, ...]:
    """Gradients of x, w and b. training: mean and var are those of x."""
    if not training:
        dx, *sums = aten.native_batch_norm_backward(g, x, w, mean, var, None, None, False, eps, [True] * 3)
        return dx, *(each.to(mean.dtype) for each in sums)
    rstd = (var + eps).rsqrt_()
    dx, *sums = aten.native_batch_norm_backward(g, x, w, None, None, mean, rstd, True, eps, [True] * 3)
    dw, db = (each.to(mean.dtype) for each in sums)
    axes = list(_axes(along.values()))
    if not axes:
        return dx, dw, db
    rows = [dw, db, torch.full_like(dw, _count(x))] if any(axis.uneven for axis in axes) else [dw, db]
    total = torch.stack(rows)
    for axis in axes:
        total = axis.start_all_reduce(total).wait()
    scale = (rstd if w is None else rstd * w) / _count(x)
    parts = math.prod(axis.size for axis in axes) if len(rows) == 2 else total[2] / _count(x)
    slope, shift = (torch.stack([dw, db]) - total[:2] / parts) * scale
    slope = slope * rstd
    return dx.add_(torch.addcmul(_channels(shift - slope * mean, x), x, _channels(slope, x))), *total[:2].unbind(0)


def _axes(first: Iterable[Along]) -> Iterator[Along]:
    """All axes over which the batch is cut."""
    for axis in first:
        yield axis
        if axis.inner is not None:
            yield from _axes([axis.inner])


def _merged_by_counts(mean: Tensor, var: Tensor, count: int, axes: Iterable[Along]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the blocks of all ranks along axes, of unequal size. count: numbers of a channel in this one."""
    counts = torch.full_like(mean, count)
    for axis in axes:
        gathered = axis.start_all_gather(torch.stack([mean, var, counts]).unsqueeze(0), 0).wait()
        means, variances, each = gathered.unbind(1)
        counts = each.sum(0)
        weights = each / counts
        mean = (means * weights).sum(0)
        var = (variances.add_((means - mean).square_()) * weights).sum(0)
    return mean, var


def _count(x: Tensor) -> int:
    """Numbers of a channel."""
    return x.numel() // x.shape[1]


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of this rank's block. On a CPU two passes of sums, which are vectorized; torch's statistics are not."""
    if has_fused_norm(device_of(x)):
        _, mean, rstd = aten.native_batch_norm(x, None, None, None, None, True, 0.0, _LITTLE)
        return mean, _variance(rstd, _LITTLE)
    dims, count = [0, *range(2, x.ndim)], _count(x)
    mean = x.sum(dims, dtype=norm_dtype(x)).div_(count)
    apart = x - _channels(mean, x)
    return mean, apart.mul_(apart).sum(dims).div_(count)


def _variance(rstd: Tensor, eps: float) -> Tensor:
    return rstd.pow(-2).sub_(eps).clamp_min_(0)


def _channels(t: Tensor, like: Tensor) -> Tensor:
    return t.reshape([-1, *([1] * (like.ndim - 2))])
