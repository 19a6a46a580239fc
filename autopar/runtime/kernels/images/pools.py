"""Pools of images of which a rank holds a block of rows (columns, planes): torch's own on the rows that its block of the
result reads, and its gradient the same way back (`halos`). Places of maxima are those in the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...comm.axis_comm import Along
from ...comm.devices import device_of
from ..kernels import has_pool_of_planes
from .halos import Window, all_extended, all_overlapped, dims_of, wanted_shape, whole_shape, without
from .images import conv_window

Tensor = torch.Tensor
aten = torch.ops.aten
_CHANNELS = 16
"""Fewer do not fill a CPU's vectors."""


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Rows that torch's pools make of so many."""
    out = (size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)) // stride + 1
    return out - 1 if ceil_mode and (out - 1) * stride >= size + padding else out


def each(value: int | Sequence[int], count: int) -> list[int]:
    """A size per dim, as torch takes them."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


@dataclass(frozen=True)
class _Pool:
    """A pool along dims in blocks: axes and windows of the image by dim, torch's arguments of the pool inside these, and the
    image's dims."""

    dims: dict[int, Along]
    windows: dict[int, Window]
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    spatial: range

    @staticmethod
    def of(rank: int, x: Tensor, along: dict[str, Along], ceil_mode: bool, *sizes: Sequence[int] | int) -> _Pool:
        """sizes: kernel, stride, padding, dilation, as torch takes them. x: the image's block."""
        dims, spatial = dims_of(along), range(x.ndim - rank, x.ndim)
        kernel, padding, dilation = (each(sizes[i], rank) for i in (0, 2, 3))
        stride = each(sizes[1] or kernel, rank)
        windows = {}
        for dim, axis in dims.items():
            k, s, p, d = (values[dim - x.ndim] for values in (kernel, stride, padding, dilation))
            out = pooled_size(x.shape[dim] * axis.size, k, s, p, d, ceil_mode) // axis.size
            windows[dim] = conv_window(out, k, s, p, d)
        inside = without(padding, spatial[0], dims)
        return _Pool(dims, windows, kernel, stride, inside, dilation, spatial)

    def starts(self) -> dict[int, int]:
        """The first row that this rank wants, by dim."""
        return {dim: axis.index * self.windows[dim].step - self.windows[dim].before for dim, axis in self.dims.items()}


def _moved(
    index: Tensor,
    image: Sequence[int],
    moves: Mapping[int, int],
    into: Sequence[int],
    spatial: range,
    dilation: Sequence[int],
) -> Tensor:
    """Positions in an image (the last dims of a shape) as positions `moves[dim]` rows further in another. A row before the first
    is the first row of its window that is not: torch takes that where nothing is above the lowest number."""
    rows = {}
    for dim in reversed(spatial):
        row, index = index % image[dim] + moves.get(dim, 0), index // image[dim]
        rows[dim] = row.where(row >= 0, row % dilation[dim - spatial[0]]) if moves.get(dim, 0) < 0 else row
    position = rows[spatial[0]]
    for dim in spatial[1:]:
        position = position * into[dim] + rows[dim]
    return position


def _max_pool2d(x: Tensor, *pool: Any) -> tuple[Tensor, Tensor]:
    """torch's. On a CPU its kernel is vectorized along channels, if these lie together: 2.5 times as fast, with the copies."""
    if x.ndim < 4 or x.shape[1] < _CHANNELS or has_pool_of_planes(device_of(x)):
        return aten.max_pool2d_with_indices(x, *pool)
    together = x.contiguous(memory_format=torch.channels_last)
    kept = together is x and not x.is_contiguous()
    y, index = aten.max_pool2d_with_indices(together, *pool)
    del together
    return (y, index) if kept else (y.contiguous(), index.contiguous())


def _max_pool(
    op: Any,
    rank: int,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    **along: Along,
) -> tuple[Tensor, Tensor]:
    """The maxima and where they are in the whole image."""
    pool = _Pool.of(rank, x, along, ceil_mode, kernel, stride, padding, dilation)
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    rows = all_extended(x, pool.windows, pool.dims, lowest)
    y, index = op(rows, pool.kernel, pool.stride, pool.padding, pool.dilation, ceil_mode)
    if not pool.dims:
        return y, index
    return y, _moved(index, rows.shape, pool.starts(), whole_shape(x.shape, pool.dims), pool.spatial, pool.dilation)


def _max_pool_backward(
    op: Any,
    rank: int,
    g: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    index: Tensor,
    **along: Along,
) -> Tensor:
    """Gradient of x; the index says places in the whole image."""
    pool = _Pool.of(rank, x, along, ceil_mode, kernel, stride, padding, dilation)
    back = {dim: -start for dim, start in pool.starts().items()}
    index = _moved(
        index, whole_shape(x.shape, pool.dims), back, wanted_shape(x.shape, pool.windows), pool.spatial, pool.dilation
    )
    rows = x.new_empty(1).expand(wanted_shape(x.shape, pool.windows))
    dx = op(g, rows, pool.kernel, pool.stride, pool.padding, pool.dilation, ceil_mode, index)
    return all_overlapped(dx, pool.windows, pool.dims, x.shape)


def _avg_pool(
    op: Any,
    rank: int,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    **along: Along,
) -> Tensor:
    pool = _Pool.of(rank, x, along, ceil_mode, kernel, stride, padding, 1)
    rows = all_extended(x, pool.windows, pool.dims)
    y = op(rows, pool.kernel, pool.stride, pool.padding, ceil_mode, count_include_pad, divisor_override)
    return y if divisor_override else _averaged(y, x, pool, padding, count_include_pad)


def _avg_pool_backward(
    op: Any,
    rank: int,
    g: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    **along: Along,
) -> Tensor:
    """Gradient of x."""
    pool = _Pool.of(rank, x, along, ceil_mode, kernel, stride, padding, 1)
    g = g if divisor_override else _averaged(g, x, pool, padding, count_include_pad)
    rows = x.new_empty(1).expand(wanted_shape(x.shape, pool.windows))
    dx = op(g, rows, pool.kernel, pool.stride, pool.padding, ceil_mode, count_include_pad, divisor_override)
    return all_overlapped(dx, pool.windows, pool.dims, x.shape)


def _averaged(y: Tensor, x: Tensor, pool: _Pool, padding: int | Sequence[int], count_include_pad: bool) -> Tensor:
    """Means over all rows that a window has, as means over those that count: at the image's border there may be fewer."""
    paddings = each(padding, len(pool.spatial))
    for dim, size in ((dim, whole_shape(x.shape, pool.dims)[dim]) for dim in pool.dims):
        i = dim - pool.spatial[0]
        kernel, stride, pad = pool.kernel[i], pool.stride[i], paddings[i]
        first = pool.dims[dim].index * y.shape[dim] * stride - pad
        counted = []
        for start in range(first, first + y.shape[dim] * stride, stride):
            end = min(start + kernel, size + pad)
            counted.append(end - start if count_include_pad else min(end, size) - max(start, 0))
        if any(count != kernel for count in counted):
            scale = torch.tensor([kernel / count for count in counted], dtype=y.dtype, device=y.device)
            y = y * scale.reshape([-1, *[1] * (y.ndim - 1 - dim)])
    return y


def _adaptive_max_pool(
    op: Any, rank: int, x: Tensor, output_size: Sequence[int], **along: Along
) -> tuple[Tensor, Tensor]:
    """Blocks of the result are those of the image: nothing is sent. Positions are those in the whole image."""
    dims, spatial = dims_of(along), range(x.ndim - rank, x.ndim)
    out = [n // dims[dim].size if dim in dims else n for dim, n in zip(spatial, output_size, strict=True)]
    y, index = op(x, out)
    return y, _in_whole(index, x, dims, spatial)


def _adaptive_max_pool_backward(op: Any, rank: int, g: Tensor, x: Tensor, index: Tensor, **along: Along) -> Tensor:
    """Gradient of x; the index says places in the whole image."""
    return op(g, x, _in_whole(index, x, dims_of(along), range(x.ndim - rank, x.ndim), -1))


def _in_whole(index: Tensor, x: Tensor, dims: dict[int, Along], spatial: range, way: int = 1) -> Tensor:
    """Places in a block x as those in the whole image, or (way -1) back."""
    whole = whole_shape(x.shape, dims)
    moves = {dim: way * axis.index * x.shape[dim] for dim, axis in dims.items()}
    before, after = (x.shape, whole) if way == 1 else (whole, x.shape)
    return _moved(index, before, moves, after, spatial, [1] * len(spatial))


max_pool2d_with_indices = partial(_max_pool, _max_pool2d, 2)
max_pool3d_with_indices = partial(_max_pool, aten.max_pool3d_with_indices, 3)
max_pool2d_with_indices_backward = partial(_max_pool_backward, aten.max_pool2d_with_indices_backward, 2)
max_pool3d_with_indices_backward = partial(_max_pool_backward, aten.max_pool3d_with_indices_backward, 3)
avg_pool2d = partial(_avg_pool, aten.avg_pool2d, 2)
avg_pool3d = partial(_avg_pool, aten.avg_pool3d, 3)
avg_pool2d_backward = partial(_avg_pool_backward, aten.avg_pool2d_backward, 2)
avg_pool3d_backward = partial(_avg_pool_backward, aten.avg_pool3d_backward, 3)
adaptive_max_pool2d = partial(_adaptive_max_pool, aten.adaptive_max_pool2d, 2)
adaptive_max_pool3d = partial(_adaptive_max_pool, aten.adaptive_max_pool3d, 3)
adaptive_max_pool2d_backward = partial(_adaptive_max_pool_backward, aten.adaptive_max_pool2d_backward, 2)
adaptive_max_pool3d_backward = partial(_adaptive_max_pool_backward, aten.adaptive_max_pool3d_backward, 3)
