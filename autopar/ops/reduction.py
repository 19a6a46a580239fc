"""Reductions, statistics as sums, and ops that work along a dim (softmax, cumulative sums, sorts).

A sharded dim that is summed leaves a partial sum, a sharded maximum a partial maximum; where pieces do not combine like
that the dim stays whole. Means, variances and norms become sums, so that they can be sharded too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.lines import Sent
from autopar.ir.rule import Carried, Labels, Rule
from autopar.ops.dialect import lifts
from autopar.ops.labels import Maker, all_float, reduced_dims
from autopar.ops.pointwise import pointwise
from autopar.ops.registry import Sending, define, named, register

Tensor = torch.Tensor
aten = torch.ops.aten

define(*named("softmax _softmax sum"), precision="round")
define(*named("amax amin max min argmax argmin topk sort tril triu"), precision="follow")
define("aten.topk", result_names=("top", "chosen"))


def _reduction(call: OpCall, reduce: str | None, linear: bool) -> Rule:
    make = Maker()
    gone = reduced_dims(call)
    shape = call.shapes[0]
    labels = tuple(
        make.add(f"d{i}", n, whole=i in gone and reduce is None, reduce=(reduce or "sum") if i in gone else "sum")
        for i, n in enumerate(shape)
    )
    keep = bool(call.get("keepdim", False))
    out: Labels = tuple(() if i in gone else dim for i, dim in enumerate(labels) if keep or i not in gone)
    return make.rule([labels], [out for _ in call.results], [{0}] if linear else [])


@register("aten.sum")
def sum_(call: OpCall) -> Rule:
    """A sharded summed dim leaves a partial sum."""
    return _reduction(call, "sum", all_float(call))


@register("aten.amax")
def amax(call: OpCall) -> Rule:
    """A sharded reduced dim leaves a partial max."""
    return _reduction(call, "max", False)


@register("aten.amin")
def amin(call: OpCall) -> Rule:
    """A sharded reduced dim leaves a partial min."""
    return _reduction(call, "min", False)


@register(
    *named(
        "prod any all argmax argmin max min mode median logsumexp linalg_vector_norm mean var std norm nansum "
        "count_nonzero kthvalue"
    )
)
def whole_reduction(call: OpCall) -> Rule:
    """Reductions whose pieces do not combine by sum, max or min: the reduced dims stay whole."""
    if len(call.operands) == 2:
        return pointwise(call)
    return _reduction(call, None, False)


def _one_row(sending: Sending) -> list[Sent]:
    """The last row of every block is gathered."""
    shape = sending.call.shapes[0]
    block = sending.result_bytes[0] * sending.ranks / shape[int(sending.call["dim"])]
    return [Sent("all_gather", sending.axis, block * sending.ranks)]


define("aten.cumsum", sends=_one_row, carrier="scans.cumsum", localize=lambda block: block.told())


@register(*named("cumsum cumprod cummax cummin sort topk _softmax _log_softmax _safe_softmax flip roll logcumsumexp"))
def along_dims(call: OpCall) -> Rule:
    """Ops that work along some dims (kept whole) and independently over the others."""
    make = Maker()
    shape = call.shapes[0]
    gone = set(reduced_dims(call, "dims" if "dims" in call.arguments else "dim"))
    labels = tuple(make.add(f"d{i}", n, whole=i in gone) for i, n in enumerate(shape))
    results: list[Labels | None] = [
        tuple(() if i in gone and n != shape[i] else labels[i] for i, n in enumerate(t.shape)) if t else None
        for t in call.results
    ]
    linear = [{0}] if call.op.split(".")[1] in ("cumsum", "flip", "roll") and all_float(call) else []
    carried = [Carried((f"d{i}",)) for i in gone] if call.op.startswith("aten.cumsum") else []
    return make.rule([labels], results, linear, carried)


@register("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(call: OpCall) -> Rule:
    """Like softmax: the class dim stays whole."""
    make = Maker()
    shape = call.shapes[0]
    dim = int(call["dim"]) % max(len(shape), 1)
    labels = tuple(make.add(f"d{i}", n, whole=i == dim) for i, n in enumerate(shape))
    return make.rule([labels, labels], [labels])


@register("aten.tril", "aten.triu")
def triangle(call: OpCall) -> Rule:
    """The matrix dims stay whole."""
    make = Maker()
    rank = len(call.shapes[0])
    labels = make.dims(call.shapes[0], whole={rank - 2, rank - 1})
    return make.rule([labels], [labels], [{0}] if all_float(call) else [])


# --- statistics as sums


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.ndim))
    return [d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)]


@lifts(aten.mean.default)
def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over everything · 1/n."""
    x = x if dtype is None else x.to(dtype)
    return (_wide(x).sum() / x.numel()).to(x.dtype)


@lifts(aten.mean.dim)
def mean_dim(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over dims · 1/n."""
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    return (_wide(x).sum(dims, keepdim) / math.prod(x.shape[d] for d in dims)).to(x.dtype)


class Root(Function):
    """The square root of a sum of squares, whose gradient where it is zero is zero, as that of torch's norms is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return (g / (root * 2)).masked_fill(root == 0, 0)


def _wide(x: Tensor) -> Tensor:
    """What is summed: float16 in float32, where squares and sums of it do not overflow."""
    return x.float() if x.dtype == torch.float16 else x


def _squares(x: Tensor) -> Tensor:
    """|x|² of every element."""
    return x.real.square() + x.imag.square() if x.is_complex() else x * x


class Variance(Function):
    """Two passes over x: (x - mean)² summed. Its gradient, (x - mean) · 2 / (n - correction), sums nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], correction: float, keepdim: bool) -> Tensor:
        n = math.prod(x.shape[d] for d in dims)
        ctx.freedom, ctx.dims, ctx.keepdim = max(n - correction, 0.0), dims, keepdim
        mean = _wide(x).sum(dims, True) / n
        ctx.save_for_backward(x, mean)
        return (_squares(_wide(x) - mean).sum(dims, keepdim) / ctx.freedom).to(x.dtype.to_real())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        g = g if ctx.keepdim else g.reshape(mean.shape)
        return ((_wide(x) - mean) * _wide(g) * (2 * _inverse(ctx.freedom))).to(x.dtype), None, None, None


def _inverse(n: float) -> float:
    return 1 / n if n else math.inf


@lifts(aten.var.correction)
def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Variance."""
    return Variance.apply(x, _dims(x, dim), 1 if correction is None else correction, keepdim)


@lifts(aten.var.dim)
def var_dim(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    """Variance over dims."""
    return Variance.apply(x, _dims(x, dim), int(unbiased), keepdim)


@lifts(aten.std.correction)
def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Square root of the variance."""
    return Root.apply(var(x, dim, correction=correction, keepdim=keepdim))


@lifts(aten.var_mean.correction)
def var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    return var(x, dim, correction=correction, keepdim=keepdim), mean_dim(x, dim, keepdim)


@lifts(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The 1-norm and the 2-norm are sums."""
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    if ord == 2:
        return Root.apply(_squares(_wide(x)).sum(dims, keepdim)).to(x.dtype.to_real())
    if ord == 1:
        return _wide(x).abs().sum(dims, keepdim).to(x.dtype.to_real())
    return aten.linalg_vector_norm.default(x, ord, dims, keepdim)


@lifts(aten.logsumexp.default)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x - max))) + max."""
    dims = _dims(x, dim)
    top = x.detach().amax(dims, True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    value = (x - top).exp().sum(dims, True).log() + top
    return value if keepdim else value.sum(dims)
