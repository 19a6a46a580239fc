"""Random small convolutions, pools, pads and resamplings, of sizes that let blocks of image and result divide."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ops import convolution
from tests.ops.execution import Case
from tests.ops.generators import Draw, call, makes, overload

aten = torch.ops.aten


def _rows(draw: Draw) -> int:
    return draw.pick(4, 6, 8, 12, 5)


@makes("autopar.conv", "autopar.conv_dx", "autopar.conv_dw")
def _conv(draw: Draw, name: str) -> Case:
    rank, groups, transposed = draw.pick(1, 2), draw.pick(1, 2, 4), draw.pick(False, True)
    c, o = groups * draw.pick(1, 2, 3), groups * draw.pick(1, 2, 3)
    x = draw.f(draw.size(), c, *(_rows(draw) for _ in range(rank)))
    kernel = [draw.pick(1, 2, 3, 4) for _ in range(rank)]
    w = draw.f(*((c, o // groups) if transposed else (o, c // groups)), *kernel)
    stride = [draw.pick(1, 2) for _ in range(rank)]
    config = (
        stride,
        [draw.pick(0, 1, (k - 1) // 2) for k in kernel],
        [draw.pick(1, 1, 2) if k < 3 else 1 for k in kernel],
        transposed,
        [draw.pick(0, 1) if transposed and s == 2 else 0 for s in stride],
        groups,
    )
    if name == "autopar.conv":
        return call(convolution.conv, x, w, draw.f(o) if draw.pick(True, False) else None, *config)
    g = draw.f(*convolution.conv(x, w, None, *config).shape)
    if name == "autopar.conv_dx":
        return call(convolution.conv_dx, g, w, list(x.shape), *config)
    return call(convolution.conv_dw, g, x, list(w.shape), *config)


def _image(draw: Draw, rank: int) -> torch.Tensor:
    lead = [draw.size()] if draw.pick(True, True, False) else []
    return draw.f(*lead, draw.size(), *(draw.pick(4, 6, 8) for _ in range(rank)))


@makes(
    *(
        f"aten.{kind}_pool{rank}d{ending}"
        for rank in (2, 3)
        for kind, ending in (
            ("max", "_with_indices"),
            ("max", "_with_indices_backward"),
            ("avg", ""),
            ("avg", "_backward"),
        )
    )
)
def _pool(draw: Draw, name: str) -> Case:
    rank = int(name[name.index("pool") + 4])
    x = _image(draw, rank)
    kernel, stride = [draw.pick(2, 3)] * rank, [draw.pick(1, 2)] * rank
    padding, dilation = [draw.pick(0, 1) for _ in range(rank)], [draw.pick(1, 1, 2) if kernel[0] == 2 else 1] * rank
    ceil = draw.pick(False, True)
    last: tuple[Any, ...] = (dilation, ceil)
    if "avg" in name:
        last = (ceil, draw.pick(False, True), draw.pick(None, 3))
    if "max" in name and draw.pick(False, False, True):
        x = torch.where(x > 0, x, -torch.inf)
    y = overload(name.removesuffix("_backward"))(x, kernel, stride, padding, *last)
    if not name.endswith("_backward"):
        return call(overload(name), x, kernel, stride, padding, *last)
    if "avg" in name:
        return call(overload(name), draw.f(*y.shape), x, kernel, stride, padding, *last)
    return call(overload(name), draw.f(*y[0].shape), x, kernel, stride, padding, *last, y[1])


@makes(
    *(
        f"aten.{kind}_pool{rank}d{ending}"
        for rank in (2, 3)
        for kind in ("_adaptive_avg", "adaptive_max")
        for ending in ("", "_backward")
    )
)
def _adaptive_pool(draw: Draw, name: str) -> Case:
    rank = int(name[name.index("pool") + 4])
    x, size = _image(draw, rank), [draw.pick(2, 3, 4) for _ in range(rank)]
    y = overload(name.removesuffix("_backward"))(x, size)
    if not name.endswith("_backward"):
        return call(overload(name), x, size)
    if "max" in name:
        return call(overload(name), draw.f(*y[0].shape), x, y[1])
    return call(overload(name), draw.f(*y.shape), x)


@makes(
    *(
        f"aten.upsample_{mode}{rank}d{ending}"
        for mode, rank in (
            ("linear", 1),
            ("nearest", 1),
            ("bilinear", 2),
            ("nearest", 2),
            ("bicubic", 2),
            ("trilinear", 3),
            ("nearest", 3),
        )
        for ending in ("", "_backward")
    )
)
def _upsample(draw: Draw, name: str) -> Case:
    rank = int(name.removesuffix("_backward")[-2])
    before, after = draw.pick((3, 5), (4, 8), (4, 12), (6, 4), (8, 4), (6, 9), (2, 6))
    x = draw.f(draw.size(), draw.size(), *([before] * rank))
    corners = () if "nearest" in name else (draw.pick(False, False, True),)
    scales = draw.pick((), (), [after / before] * rank, [after / before + 0.01] * rank)
    if not name.endswith("_backward"):
        return call(overload(name), x, [after] * rank, *corners, *scales)
    g = draw.f(*x.shape[:2], *([after] * rank))
    return call(overload(name), g, [after] * rank, list(x.shape), *corners, *scales)


_PADS = [f"aten.{mode}_pad{rank}d" for mode in ("reflection", "replication") for rank in (1, 2, 3)]


@makes("aten.constant_pad_nd", *_PADS)
def _pad(draw: Draw, name: str) -> Case:
    rank = int(name[-2]) if name.endswith("d") and name[-2].isdigit() else 2
    x = draw.f(draw.size(), draw.size(), *(draw.pick(4, 3, 6) for _ in range(rank)))
    pads = [n for _ in range(rank) for n in draw.pick((0, 0), (1, 0), (2, 2), (-1, 1), (1, 1), (-1, -1), (2, 0))]
    return call(overload(name), x, pads, *((draw.pick(0, 1.5),) if name == "aten.constant_pad_nd" else ()))


@makes(*(f"{name}_backward" for name in _PADS))
def _pad_backward(draw: Draw, name: str) -> Case:
    rank = int(name[name.index("pad") + 3])
    x = draw.f(draw.size(), draw.size(), *(draw.pick(4, 3, 6) for _ in range(rank)))
    pads = [n for _ in range(rank) for n in draw.pick((0, 0), (1, 0), (2, 2), (1, 1), (2, 0))]
    y = overload(name.removesuffix("_backward"))(x, pads)
    return call(overload(name), draw.f(*y.shape), x, pads)
