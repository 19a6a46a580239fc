"""Convolutions, plain and transposed, in one to three dims. Batch, channels and groups shard, and so do the image's dims: where a
block of results reads rows of other blocks, these are sent (`rows.py`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Carried, Factor, Labels, Rule
from autopar.ops import rows
from autopar.ops.convolution_copies import forward_bytes, kernel_gradient_bytes
from autopar.ops.dialect import graph_op, lifts
from autopar.ops.labels import Maker
from autopar.ops.registry import Block, Gemm, define, named, resized
from autopar.runtime.kernels import ops as local
from autopar.runtime.kernels.images import images

Tensor = torch.Tensor
aten = torch.ops.aten
_CONFIG = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)

define(
    *named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution"),
    precision="low",
)


def _conv_labels(call: OpCall, owed: tuple[int, ...] = ()) -> tuple[Maker, dict[str, Labels], list[Carried]]:
    """Labels by tensor, and the choices that come with messages. owed: results that are sums over the image."""
    make = Maker()
    x, _, y = _shapes(call)
    groups, transposed = int(call["groups"]), bool(call["transposed"])
    n = make.add("n", x[0])
    g = make.add("g", groups)
    c = make.add("c", x[1] // groups, whole=groups > 1)
    o = make.add("o", y[1] // groups, whole=groups > 1)
    outer, inner = (c, o) if transposed else (o, c)
    space = [(rows.aligned if _alone(call, d) else rows.paired)(make, d, x[d], y[d]) for d in range(2, len(x))]
    table = {
        "x": (n, (*g, *c), *(image for image, _ in space)),
        "y": (n, (*g, *o), *(made for _, made in space)),
        "w": ((*g, *outer), inner, *((),) * len(space)),
        "b": ((*g, *o),),
    }
    return make, table, rows.in_blocks(make, range(2, len(x)), owed)


def _alone(call: OpCall, dim: int) -> bool:
    """Whether the kernel's windows meet neither each other nor the border: patches, and kernels of one row."""
    x, w, y = _shapes(call)
    wide, narrow = (y[dim], x[dim]) if call["transposed"] else (x[dim], y[dim])
    stride, padding, dilation = (int(call[name][dim - 2]) for name in ("stride", "padding", "dilation"))
    return padding == 0 and dilation * (w[dim] - 1) < stride and wide == narrow * stride


def _wide(call: OpCall, dim: int, ranks: int) -> rows.Wide:
    """The image, or the result of a transposed convolution, and what its ranks want."""
    x, w, y = _shapes(call)
    place: dict[str, tuple[Any, Any]] = {"conv": (0, "result"), "conv_dx": ("result", 0), "conv_dw": (1, 0)}
    of = place[call.op.removeprefix("autopar.")][bool(call["transposed"])]
    wide, narrow = (y, x) if call["transposed"] else (x, y)
    sizes = (int(call[name][dim - 2]) for name in ("stride", "padding", "dilation"))
    return images.conv_window(narrow[dim] // ranks, w[dim], *sizes), wide[dim], of


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


def _shapes(call: OpCall) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of image, kernel and result, of which one is what the op makes."""
    out, (first, second, *_) = call.out_shape, call.shapes
    by_op = {"conv": (first, second, out), "conv_dx": (out, second, first), "conv_dw": (second, out, first)}
    return by_op[call.op.removeprefix("autopar.")]


def _local(block: Block) -> dict[str, Any]:
    return {"groups": int(block.call["groups"]) // block.parts("g"), **rows.told(block)}


def _whole_groups(call: OpCall) -> dict[str, Any]:
    x, w, y = _shapes(call)
    return {"groups": (y if call["transposed"] else x)[1] // w[1]}


def _with_shape(name: str) -> dict[str, Any]:
    """The local block of a gradient, which is told the shape of its result."""
    shape = resized(name)
    return {
        "localize": lambda block: {**_local(block), **shape["localize"](block)},
        "globalize": lambda call: {**_whole_groups(call), **shape["globalize"](call)},
    }


@graph_op(
    f"conv(Tensor x, Tensor w, Tensor? b, {_CONFIG}) -> Tensor",
    local.conv,
    aten.convolution.default,
    work=_conv_work,
    localize=_local,
    globalize=_whole_groups,
    workspace=forward_bytes,
)
def conv(call: OpCall) -> Rule:
    """Batch, output channels and groups shard; input channels too when no bias would be added twice."""
    make, table, carried = _conv_labels(call)
    operands: list[Labels | None] = [table["x"], table["w"]]
    if len(call.shapes) == 3:
        operands.append(table["b"])
        if "c" in make.factors:
            make.factors["c"] = Factor(make.factors["c"].size, whole=True)
    return make.rule(operands, [table["y"]], carried=carried)


@graph_op(
    f"conv_dx(Tensor g, Tensor w, SymInt[] x_shape, {_CONFIG}) -> Tensor",
    local.conv_dx,
    lambda g, w, x_shape, *_: g.new_empty(x_shape),
    work=_conv_work,
    workspace=forward_bytes,
    **_with_shape("x_shape"),
)
def conv_dx(call: OpCall) -> Rule:
    """Contracts output channels."""
    make, table, carried = _conv_labels(call)
    return make.rule([table["y"], table["w"]], [table["x"]], carried=carried)


@graph_op(
    f"conv_dw(Tensor g, Tensor x, SymInt[] w_shape, {_CONFIG}) -> Tensor",
    local.conv_dw,
    lambda g, x, w_shape, *_: g.new_empty(w_shape),
    work=_conv_work,
    fresh=True,
    workspace=kernel_gradient_bytes,
    **_with_shape("w_shape"),
)
def conv_dw(call: OpCall) -> Rule:
    """Contracts the batch and the image."""
    make, table, carried = _conv_labels(call, owed=(0,))
    return make.rule([table["y"], table["x"]], [table["w"]], carried=carried)


class Conv(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, *config: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.config = config
        return conv(x, w, b, *config)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need, config = ctx.needs_input_grad, ctx.config
        dx = conv_dx(g, w, list(x.shape), *config) if need[0] else None
        dw = conv_dw(g, x, list(w.shape), *config) if need[1] else None
        db = g.sum([0, *range(2, g.ndim)]) if need[2] else None
        return dx, dw, db, *(None for _ in config)


# --- what ATen's convolutions become


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Tensor:
    n = weight.ndim - 2
    if weight.is_complex():
        real, imag = (
            [
                _conv(part, w, None, stride, padding, dilation, groups, transposed, output_padding)
                for part in (x.real, x.imag)
            ]
            for w in (weight.real, weight.imag)
        )
        y = torch.complex(real[0] - imag[1], real[1] + imag[0])
        return y if bias is None else y + bias.reshape([-1, *([1] * n)])
    unbatched = x.ndim == n + 1
    x = x.unsqueeze(0) if unbatched else x
    config = [_ntuple(v, n) for v in (stride, padding, dilation)]
    y = Conv.apply(x, weight, bias, *config, transposed, _ntuple(output_padding, n), groups)
    return y.squeeze(0) if unbatched else y


def _ntuple(value: Any, n: int) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value * n if len(value) == 1 else value


@lifts(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def _conv_nd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    return _conv(x, weight, bias, stride, padding, dilation, groups)


@lifts(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def _conv_padding(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: str = "valid",
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    n = weight.ndim - 2
    if padding == "valid":
        return _conv(x, weight, bias, stride, 0, dilation, groups)
    total = [step * (k - 1) for step, k in zip(_ntuple(dilation, n), weight.shape[2:], strict=True)]
    if any(t % 2 for t in total):
        pads = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
        return _conv(torch.constant_pad_nd(x, pads, 0.0), weight, bias, stride, 0, dilation, groups)
    return _conv(x, weight, bias, stride, [t // 2 for t in total], dilation, groups)


@lifts(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    return _conv(x, weight, bias, stride, padding, dilation, groups, True, output_padding)


@lifts(aten.convolution.default)
def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    return _conv(x, weight, bias, stride, padding, dilation, groups, transposed, output_padding)


define(
    *(f"autopar.{name}" for name in ("conv", "conv_dx", "conv_dw")),
    linear=lambda call: [{0}, {1}] if len(call.operands) == 2 else [],
    sends=rows.sends_rows(_wide),
)
for _name in ("conv", "conv_dx", "conv_dw"):
    define(f"autopar.{_name}", carrier=f"images.{_name}")
