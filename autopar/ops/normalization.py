"""Norms: RMS and layer norm as ops; group norm as sums, and instance norm as a group norm (batch norm: `batch_norm.py`).

A sharded sum is a partial sum, a sharded mean is nothing: so means are written as sum · 1/n.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule
from autopar.ops.batch_norm import normed_by
from autopar.ops.dialect import empty_like, graph_op, lifts
from autopar.ops.labels import Maker
from autopar.ops.registry import define, named, register
from autopar.runtime.kernels import ops as local

Tensor = torch.Tensor
aten = torch.ops.aten

define(*named("layer_norm rms_norm group_norm instance_norm native_layer_norm native_group_norm"), precision="norm")


def _norm(call: OpCall) -> tuple[Maker, Labels, Labels, Labels]:
    """(make, labels of x, of statistics, of the weight)."""
    x = call.operand("x")
    make = Maker()
    split = len(x.shape) - call["ndim"]
    labels = make.dims(x.shape, whole=set(range(split, len(x.shape))))
    return make, labels, (*labels[:split], *((),) * call["ndim"]), labels[split:]


def _rule(call: OpCall, *results: str) -> Rule:
    """The normalised dims stay whole; gradients of the weight are sums over the others."""
    make, x, stat, weight = _norm(call)
    labels = {"x": x, "g": x, "w": weight, "b": weight, "mean": stat, "rstd": stat}
    operands: list[Labels | None] = [labels[n] for n, a in call.arguments.items() if isinstance(a, Operand)]
    return make.rule(operands, [labels[n] for n in results])


def _lead_ones(x: Tensor, ndim: int) -> Tensor:
    """The shape of statistics: normalised dims are 1."""
    return x.new_empty([*x.shape[: x.ndim - ndim], *([1] * ndim)])


@graph_op(
    "rms_norm(Tensor x, Tensor? w, float eps, int ndim) -> (Tensor, Tensor)",
    local.rms_norm,
    lambda x, w, eps, ndim: (empty_like(x), _lead_ones(x, ndim).to(local.norm_dtype(x))),
    result_names=("normed", "rstd"),
)
def rms_norm(call: OpCall) -> Rule:
    """The norm and 1 / root mean square."""
    return _rule(call, "x", "rstd")


@graph_op(
    "rms_norm_dx(Tensor g, Tensor x, Tensor rstd, Tensor? w, int ndim) -> Tensor",
    local.rms_norm_dx,
    lambda g, x, *_: empty_like(x),
)
def rms_norm_dx(call: OpCall) -> Rule:
    """Gradient of the input."""
    return _rule(call, "x")


@graph_op(
    "norm_dw(Tensor g, Tensor x, Tensor? mean, Tensor rstd, int ndim) -> Tensor",
    local.norm_dw,
    lambda g, x, mean, rstd, ndim: x.new_empty(x.shape[x.ndim - ndim :]),
)
def norm_dw(call: OpCall) -> Rule:
    """Gradient of the weight of either norm."""
    return _rule(call, "w")


@graph_op(
    "layer_norm(Tensor x, Tensor? w, Tensor? b, float eps, int ndim) -> (Tensor, Tensor, Tensor)",
    local.layer_norm,
    lambda x, w, b, eps, ndim: (empty_like(x), _lead_ones(x, ndim), _lead_ones(x, ndim)),
    result_names=("normed", "mean", "rstd"),
)
def layer_norm(call: OpCall) -> Rule:
    """The norm, the mean and 1 / standard deviation."""
    return _rule(call, "x", "mean", "rstd")


@graph_op(
    "layer_norm_dx(Tensor g, Tensor x, Tensor mean, Tensor rstd, Tensor? w, int ndim) -> Tensor",
    local.layer_norm_dx,
    lambda g, x, *_: empty_like(x),
)
def layer_norm_dx(call: OpCall) -> Rule:
    """Gradient of the input."""
    return _rule(call, "x")


@graph_op(
    "layer_norm_backward(Tensor g, Tensor x, Tensor mean, Tensor rstd, Tensor w, int ndim) -> (Tensor, Tensor, Tensor)",
    local.layer_norm_backward,
    lambda g, x, mean, rstd, w, ndim: (empty_like(x), empty_like(w), empty_like(w)),
    result_names=("layer_norm_dx", "norm_dw", "norm_db"),
)
def layer_norm_backward(call: OpCall) -> Rule:
    """Gradients of the input, the weight and the bias."""
    return _rule(call, "x", "w", "b")


@register("aten._weight_norm_interface", "aten._weight_norm_interface_backward")
def weight_norm(call: OpCall) -> Rule:
    """Only the kept dim shards: norms are over all others."""
    make = Maker()
    v = call.type_of("v") or call.type_of("saved_v")
    assert v is not None
    dim = int(call["dim"])
    kept = make.add("d", v.shape[dim])

    def labels(shape: tuple[int, ...]) -> Labels:
        return tuple(kept if i == dim and len(shape) == len(v.shape) else () for i in range(len(shape)))

    return make.rule([labels(s) for s in call.shapes], [labels(t.shape) if t else None for t in call.results])


@register("aten.renorm")
def renorm(call: OpCall) -> Rule:
    """Every slice along `dim` is scaled by its own norm over all other dims."""
    make = Maker()
    dim = int(call["dim"]) % len(call.shapes[0])
    labels: Labels = tuple(make.add("d", n) if i == dim else () for i, n in enumerate(call.shapes[0]))
    return make.rule([labels], [labels])


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, eps: float, ndim: int) -> Tensor:
        y, rstd = rms_norm(x, w, eps, ndim)
        ctx.save_for_backward(x, w, rstd)
        ctx.ndim = ndim
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, rstd = ctx.saved_tensors
        dx = rms_norm_dx(g, x, rstd, w, ctx.ndim) if ctx.needs_input_grad[0] else None
        dw = norm_dw(g, x, None, rstd, ctx.ndim) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, ndim: int) -> Tensor:
        y, mean, rstd = layer_norm(x, w, b, eps, ndim)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.ndim = ndim
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, mean, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad
        lead = list(range(x.ndim - ctx.ndim))
        if all(need[:3]):
            return *layer_norm_backward(g, x, mean, rstd, w, ctx.ndim), None, None
        dx = layer_norm_dx(g, x, mean, rstd, w, ctx.ndim) if need[0] else None
        dw = norm_dw(g, x, mean, rstd, ctx.ndim) if need[1] else None
        db = (g.sum(lead) if lead else g) if need[2] else None
        return dx, dw, db, None, None


# --- what ATen's norms become


@lifts(aten.rms_norm.default)
def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Numbers of 16 bits are normalised in float32, whose eps it is that is not given."""
    eps = torch.finfo(local.norm_dtype(x)).eps if eps is None else eps
    if weight is not None and weight.dtype != x.dtype:
        return RMSNorm.apply(_wide(x), _wide(weight), eps, len(shape)).to(x.dtype)
    return RMSNorm.apply(x, weight, eps, len(shape))


def _wide(x: Tensor) -> Tensor:
    return x.to(local.norm_dtype(x))


@lifts(aten.layer_norm.default)
def _layer_norm(
    x: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Tensor:
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        parts = [None if t is None else _wide(t) for t in (x, weight, bias)]
        return LayerNorm.apply(*parts, eps, len(shape)).to(x.dtype)
    return LayerNorm.apply(x, weight, bias, eps, len(shape))


@lifts(aten.native_layer_norm.default)
def _native_layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    return _layer_norm(x, shape, weight, bias, eps), None, None


def _channel(t: Tensor, like: Tensor) -> Tensor:
    return t.reshape([1, -1, *([1] * (like.ndim - 2))])


@lifts(aten.group_norm.default)
def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Tensor:
    n, c, *space = x.shape
    y = _wide(x).reshape(n, groups, c // groups, *space)
    dims = list(range(2, y.ndim))
    count = math.prod(y.shape[2:])
    centered = y - y.sum(dims, keepdim=True) / count
    y = centered * ((centered * centered).sum(dims, keepdim=True) / count + eps).rsqrt()
    y = y.reshape(x.shape)
    y = y * _channel(weight, x) if weight is not None else y
    return (y + _channel(bias, x) if bias is not None else y).to(x.dtype)


@lifts(aten.instance_norm.default)
def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    if not use_input_stats and mean is not None and var is not None:
        return normed_by(x, weight, bias, mean, var, eps)
    return _group_norm(x, x.shape[1], weight, bias, eps)
