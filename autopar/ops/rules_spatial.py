"""Rules of convolution and of the ops that work on images: pooling, resampling, unfolding."""

from __future__ import annotations

import math
from typing import Any

from autopar.ir.call import OpCall
from autopar.ir.rule import Factor, Labels, Rule
from autopar.ops.registry import Block, Gemm, Maker, all_float, leading, register


def _conv_labels(
    call: OpCall, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...]
) -> tuple[Maker, dict[str, Labels]]:
    make = Maker()
    groups, transposed = int(call["groups"]), bool(call["transposed"])
    n = make.add("n", x[0])
    g = make.add("g", groups)
    c = make.add("c", x[1] // groups, whole=groups > 1)
    o = make.add("o", y[1] // groups, whole=groups > 1)
    space = lambda k: ((),) * k  # noqa: E731
    outer, inner = (c, o) if transposed else (o, c)
    table = {
        "x": (n, (*g, *c), *space(len(x) - 2)),
        "y": (n, (*g, *o), *space(len(y) - 2)),
        "w": ((*g, *outer), inner, *space(len(w) - 2)),
        "b": ((*g, *o),),
    }
    return make, table


def _conv_work(call: OpCall, rule: Rule) -> Gemm:
    kernel = call.type_of("w")
    w = kernel.shape if kernel is not None else tuple(call["w_shape"])
    y = call.type_of("g") or call.results[0]
    assert y is not None
    macs = math.prod(y.shape) * math.prod(w[1:])
    if call["transposed"]:
        x = call.type_of("x")
        macs = math.prod(x.shape if x is not None else call["x_shape"]) * math.prod(w[1:])
    return 2.0 * macs, "conv", ()


def _conv_block(block: Block) -> dict[str, Any]:
    changed: dict[str, Any] = {"groups": int(block.call["groups"]) // block.parts("g")}
    if block.call.op == "autopar.conv_dx":
        changed["x_shape"] = block.result_shape()
    elif block.call.op == "autopar.conv_dw":
        changed["w_shape"] = block.result_shape()
    return changed


@register("autopar.conv", work=_conv_work, localize=_conv_block)
def conv(call: OpCall) -> Rule:
    """Batch, output channels and groups shard; input channels too when no bias would be added twice."""
    y = call.out_shapes[0]
    assert y is not None
    make, table = _conv_labels(call, call.shapes[0], call.shapes[1], y)
    operands: list[Labels | None] = [table["x"], table["w"]]
    if len(call.shapes) == 3:
        operands.append(table["b"])
        if "c" in make.factors:
            make.factors["c"] = Factor(make.factors["c"].size, whole=True)
    return make.rule(operands, [table["y"]])


@register("autopar.conv_dx", work=_conv_work, localize=_conv_block)
def conv_dx(call: OpCall) -> Rule:
    """Contracts output channels."""
    x = call.out_shapes[0]
    assert x is not None
    make, table = _conv_labels(call, x, call.shapes[1], call.shapes[0])
    return make.rule([table["y"], table["w"]], [table["x"]])


@register("autopar.conv_dw", work=_conv_work, localize=_conv_block)
def conv_dw(call: OpCall) -> Rule:
    """Contracts the batch."""
    w = call.out_shapes[0]
    assert w is not None
    make, table = _conv_labels(call, call.shapes[1], w, call.shapes[0])
    return make.rule([table["y"], table["x"]], [table["w"]])


def _spatial(name: str, rank: int, *options: str, size: str | None = None) -> None:
    localize = (lambda b: {size: b.result_shape()}) if size else None
    register(name, *options, localize=localize)(lambda call: leading(call, len(call.shapes[0]) - rank))


for _rank in (2, 3):
    _spatial(
        f"aten.max_pool{_rank}d_with_indices",
        _rank,
        f"aten.max_pool{_rank}d_with_indices_backward",
        f"aten.avg_pool{_rank}d",
        f"aten.avg_pool{_rank}d_backward",
        f"aten._adaptive_avg_pool{_rank}d",
        f"aten._adaptive_avg_pool{_rank}d_backward",
        f"aten.adaptive_max_pool{_rank}d",
        f"aten.adaptive_max_pool{_rank}d_backward",
    )
for _rank in (1, 2, 3):
    _spatial(f"aten.reflection_pad{_rank}d_backward", _rank, f"aten.replication_pad{_rank}d_backward")
for _rank, _modes in (
    (1, ("linear", "nearest")),
    (2, ("bilinear", "nearest", "bicubic")),
    (3, ("trilinear", "nearest")),
):
    for _mode in _modes:
        _spatial(f"aten.upsample_{_mode}{_rank}d", _rank)
        _spatial(f"aten.upsample_{_mode}{_rank}d_backward", _rank, size="input_size")
_spatial("aten.pixel_shuffle", 3, "aten.pixel_unshuffle")


@register("aten.glu", "aten.glu_backward")
def glu(call: OpCall) -> Rule:
    """The halved dim stays whole."""
    make = Maker()
    dim = int(call["dim"]) % len(call.shapes[0])

    def labels(shape: tuple[int, ...]) -> Labels:
        return tuple(() if i == dim else make.add(f"d{i}", n) for i, n in enumerate(shape))

    out = call.out_shapes[0]
    assert out is not None
    return make.rule([labels(s) for s in call.shapes], [labels(out)])


@register("aten.im2col", "aten.col2im")
def unfold_image(call: OpCall) -> Rule:
    """(n, c, h, w) to (n, c·kernel, places) and back: batch and channels pass."""
    make = Maker()
    x, y = call.shapes[0], call.out_shapes[0]
    assert y is not None
    image, columns = (x, y) if call.op.startswith("aten.im2col") else (y, x)
    lead = make.add("n", image[0]) if len(image) == 4 else ()
    batch = (lead,) if len(image) == 4 else ()
    c = make.add("c", image[-3])
    kernel = make.add("k", columns[-2] // image[-3], whole=True)
    spread, packed = (*batch, c, (), ()), (*batch, (*c, *kernel), ())
    before, after = (spread, packed) if image is x else (packed, spread)
    return make.rule([before], [after], [{0}] if all_float(call) else [])


@register(
    "aten.grid_sampler_2d", "aten.grid_sampler_3d", "aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward"
)
def grid_sampler(call: OpCall) -> Rule:
    """Batch and channels pass; gradients of the grid are sums over channels."""
    make = Maker()
    image = call.type_of("input")
    assert image is not None
    n, c = make.add("n", image.shape[0]), make.add("c", image.shape[1])
    rest = ((),) * (len(image.shape) - 2)
    pictures, grid = (n, c, *rest), (n, *rest, ())
    if call.op.split(".")[1].endswith("_backward"):
        wanted = call["output_mask"]
        results: list[Labels | None] = [pictures if wanted[0] else None, grid if wanted[1] else None]
        return make.rule([pictures, pictures, grid], results)
    return make.rule([pictures, grid], [pictures], [{0}])
