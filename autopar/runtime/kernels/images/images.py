"""Convolutions, pads and resampling of images of which a rank holds a block of rows (columns, planes).

Each is torch's own op on the rows that the rank's block of the result reads (`halos.extended`), without padding there. A
gradient of the input is torch's own for these rows, sent back to whom they belong (`halos.overlapped`): as many rows as
forward brought, and no row of the result is computed twice. Transposed convolutions are the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...comm.axis_comm import Along
from .. import ops
from .halos import Window, all_extended, all_overlapped, dims_of, wanted_shape, without

Tensor = torch.Tensor
aten = torch.ops.aten
LINEAR, CUBIC = 1, 2
"""How many rows beyond a row of the result its resampling reads at most."""


# --- windows: what a block of results reads


def conv_window(block: int, kernel: int, stride: int, padding: int, dilation: int) -> Window:
    """The window of the wide side: the image of a convolution, the result of a transposed one. block: rows of the other side."""
    return Window(block * stride, padding, (block - 1) * stride + dilation * (kernel - 1) + 1)


def conv_size(size: int, kernel: int, dim: int, *window: *ops.Window) -> int:
    """Rows of the result along a dim of the tensor, of which the image has so many."""
    strides, paddings, dilations, transposed, output_padding, _ = window
    stride, padding, reach = strides[dim - 2], paddings[dim - 2], dilations[dim - 2] * (kernel - 1) + 1
    if transposed:
        return (size - 1) * stride - 2 * padding + reach + output_padding[dim - 2]
    return (size + 2 * padding - reach) // stride + 1


def pad_window(size: int, ranks: int, before: int, after: int, outside: str) -> Window:
    """The window of a whole of so many rows."""
    block = (size + before + after) // ranks
    return Window(block, before, block, outside)


def resampled_window(block: int, out: int, taps: int) -> Window:
    """The window of a block of rows that becomes `out` rows, which read so many rows beyond it. The window begins and ends
    where a row of the result does."""
    period = block // math.gcd(block, out)
    beyond = -(-taps // period) * period
    return Window(block, beyond, block + 2 * beyond, "edge")


# --- convolutions


def _conv_windows(
    narrow: Mapping[int, int] | Sequence[int], kernel: Sequence[int], window: ops.Window, along: dict[int, Along]
) -> tuple[dict[int, Window], ops.Window]:
    """Windows of the wide side by dim, and the convolution of these. narrow: rows of the other side by dim."""
    stride, padding, dilation, transposed, output_padding, groups = window
    windows = {
        dim: conv_window(narrow[dim], kernel[dim], stride[dim - 2], padding[dim - 2], dilation[dim - 2])
        for dim in along
    }
    padding, output_padding = without(padding, 2, along), without(output_padding, 2, along)
    return windows, (stride, padding, dilation, transposed, output_padding, groups)


def conv(x: Tensor, w: Tensor, b: Tensor | None, *window: *ops.Window, **along: Along) -> Tensor:
    """x: (n, c, *spatial), w: (o, c/groups, *kernel); transposed where the window says so."""
    dims = dims_of(along)
    out = {
        dim: conv_size(x.shape[dim] * axis.size, w.shape[dim], dim, *window) // axis.size for dim, axis in dims.items()
    }
    transposed = window[3]
    windows, inside = _conv_windows(x.shape if transposed else out, w.shape, window, dims)
    if not transposed:
        return ops.conv(all_extended(x, windows, dims), w, b, *inside)
    y = all_overlapped(ops.conv(x, w, None, *inside), windows, dims, out)
    return y if b is None else y.add_(b.reshape(-1, *[1] * (y.ndim - 2)))


def conv_dx(g: Tensor, w: Tensor, x_shape: list[int], *window: *ops.Window, **along: Along) -> Tensor:
    """Gradient of x, whose block has `x_shape`."""
    dims, transposed = dims_of(along), window[3]
    windows, inside = _conv_windows(x_shape if transposed else g.shape, w.shape, window, dims)
    if transposed:
        return ops.conv_dx(all_extended(g, windows, dims), w, x_shape, *inside)
    dx = ops.conv_dx(g, w, wanted_shape(x_shape, windows), *inside)
    return all_overlapped(dx, windows, dims, x_shape)


def conv_dw(g: Tensor, x: Tensor, w_shape: list[int], *window: *ops.Window, **along: Along) -> Tensor:
    """Gradient of w: this rank's terms of the sum over rows."""
    dims, transposed = dims_of(along), window[3]
    windows, inside = _conv_windows(x.shape if transposed else g.shape, w_shape, window, dims)
    if transposed:
        return ops.conv_dw(all_extended(g, windows, dims), x, w_shape, *inside)
    return ops.conv_dw(g, all_extended(x, windows, dims), w_shape, *inside)


# --- pads


def _pad(op: Any, outside: str, x: Tensor, pad: Sequence[int], *value: float, **along: Along) -> Tensor:
    """pad: rows before and after in the last dim, then in the one before it."""
    dims = dims_of(along)
    x = all_extended(x, _pad_windows(x, pad, outside, dims), dims, *value)
    rest = _rest(pad, x.ndim, dims)
    return op(x, rest, *value) if any(rest) else x


def _pad_backward(op: Any, outside: str, g: Tensor, x: Tensor, padding: Sequence[int], **along: Along) -> Tensor:
    """Gradient of x."""
    dims = dims_of(along)
    g = all_overlapped(g, _pad_windows(x, padding, outside, dims), dims, x.shape)
    rest = _rest(padding, x.ndim, dims)
    return op(g, x, rest) if any(rest) else g


def _pad_windows(x: Tensor, pad: Sequence[int], outside: str, dims: Mapping[int, Along]) -> dict[int, Window]:
    """By dim; x is a block."""
    windows = {}
    for dim, axis in dims.items():
        before, after = pad[2 * (x.ndim - 1 - dim) :][:2]
        windows[dim] = pad_window(x.shape[dim] * axis.size, axis.size, before, after, outside)
    return windows


def _rest(pad: Sequence[int], rank: int, dims: Mapping[int, Along]) -> list[int]:
    """The padding that is left in dims that are not in blocks."""
    return [0 if rank - 1 - i // 2 in dims else n for i, n in enumerate(pad)]


constant_pad_nd = partial(_pad, aten.constant_pad_nd, "fill")
reflection_pad1d = partial(_pad, aten.reflection_pad1d, "reflect")
reflection_pad2d = partial(_pad, aten.reflection_pad2d, "reflect")
reflection_pad3d = partial(_pad, aten.reflection_pad3d, "reflect")
replication_pad1d = partial(_pad, aten.replication_pad1d, "edge")
replication_pad2d = partial(_pad, aten.replication_pad2d, "edge")
replication_pad3d = partial(_pad, aten.replication_pad3d, "edge")
reflection_pad1d_backward = partial(_pad_backward, aten.reflection_pad1d_backward, "reflect")
reflection_pad2d_backward = partial(_pad_backward, aten.reflection_pad2d_backward, "reflect")
reflection_pad3d_backward = partial(_pad_backward, aten.reflection_pad3d_backward, "reflect")
replication_pad1d_backward = partial(_pad_backward, aten.replication_pad1d_backward, "edge")
replication_pad2d_backward = partial(_pad_backward, aten.replication_pad2d_backward, "edge")
replication_pad3d_backward = partial(_pad_backward, aten.replication_pad3d_backward, "edge")


# --- resampling


def _upsample(op: Any, taps: int, x: Tensor, output_size: Sequence[int], *options: Any, **named: Any) -> Tensor:
    """The rank's block of what torch makes of the window. output_size: of the whole."""
    dims, options_named = _named(named)
    out = {dim: n // dims[dim].size if dim in dims else n for dim, n in enumerate(output_size, 2)}
    windows = {dim: resampled_window(x.shape[dim], out[dim], taps) for dim in dims}
    beyond = _beyond(windows, x.shape, out)
    y = op(
        all_extended(x, windows, dims),
        [n + 2 * beyond.get(dim, 0) for dim, n in out.items()],
        *options,
        **options_named,
    )
    for dim, rows in beyond.items():
        y = y.narrow(dim, rows, out[dim])
    return y.contiguous() if beyond else y


def _upsample_backward(
    op: Any, taps: int, g: Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: Any, **named: Any
) -> Tensor:
    """Gradient of a block of `input_size`."""
    dims, options_named = _named(named)
    windows = {dim: resampled_window(input_size[dim], g.shape[dim], taps) for dim in dims}
    for dim, rows in _beyond(windows, input_size, g.shape).items():
        g = torch.constant_pad_nd(g, [0, 0] * (g.ndim - 1 - dim) + [rows, rows])
    dx = op(g, list(g.shape[2:]), wanted_shape(input_size, windows), *options, **options_named)
    return all_overlapped(dx, windows, dims, input_size)


def _named(named: Mapping[str, Any]) -> tuple[dict[int, Along], dict[str, Any]]:
    """Axes by dim, and what is torch's own."""
    along = {name: value for name, value in named.items() if isinstance(value, Along)}
    return dims_of(along), {name: value for name, value in named.items() if name not in along}


def _beyond(
    windows: Mapping[int, Window], blocks: Sequence[int], out: Mapping[int, int] | Sequence[int]
) -> dict[int, int]:
    """Rows of the result on either side that a window makes beyond those of its block, by dim."""
    return {dim: window.before * out[dim] // blocks[dim] for dim, window in windows.items()}


upsample_linear1d = partial(_upsample, aten.upsample_linear1d, LINEAR)
upsample_bilinear2d = partial(_upsample, aten.upsample_bilinear2d, LINEAR)
upsample_trilinear3d = partial(_upsample, aten.upsample_trilinear3d, LINEAR)
upsample_bicubic2d = partial(_upsample, aten.upsample_bicubic2d, CUBIC)
upsample_linear1d_backward = partial(_upsample_backward, aten.upsample_linear1d_backward, LINEAR)
upsample_bilinear2d_backward = partial(_upsample_backward, aten.upsample_bilinear2d_backward, LINEAR)
upsample_trilinear3d_backward = partial(_upsample_backward, aten.upsample_trilinear3d_backward, LINEAR)
upsample_bicubic2d_backward = partial(_upsample_backward, aten.upsample_bicubic2d_backward, CUBIC)
