"""Reductions, statistics as sums, and ops that work along a dim (softmax, sorts, flips and rolls).

A sharded dim that is summed leaves a partial sum, a sharded maximum a partial maximum; where pieces do not combine like
that the dim stays whole. Means, variances and norms become sums, so that they can be sharded too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops.along_dim import adds, carry, gathers, told_dim, whole_block
from autopar.ops.column_sums import workspace_bytes
from autopar.ops.dialect import lifts
from autopar.ops.labels import Maker, all_float, dims_told, reduced_dims
from autopar.ops.registry import Block, Offset, define, named, register

Tensor = torch.Tensor
aten = torch.ops.aten

define(*named("softmax _softmax sum"), precision="round")
define("aten.sum", workspace=workspace_bytes)
define(*named("amax amin max min argmax argmin topk sort tril triu"), precision="follow")


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
    *named("prod any all mode median logsumexp linalg_vector_norm mean var std norm nansum count_nonzero kthvalue")
)
def whole_reduction(call: OpCall) -> Rule:
    """Reductions whose pieces do not combine by sum, max or min: the reduced dims stay whole."""
    return _reduction(call, None, False)


_SOFTMAX = named("_softmax _log_softmax _safe_softmax")
_SOFTMAX_BACK = named("_softmax_backward_data _log_softmax_backward_data")
define(*_SOFTMAX, sends=gathers(rows=2))
define(*_SOFTMAX_BACK, sends=adds)
for _name in (*_SOFTMAX, *_SOFTMAX_BACK):
    define(_name, carrier=_name.replace("aten.", "softmax."), localize=lambda block: block.told())


@register(*_SOFTMAX)
def softmax(call: OpCall) -> Rule:
    """The class dim is carried, the others pass."""
    make, gone = Maker(), set(reduced_dims(call))
    labels = make.dims(call.shapes[0], whole=gone)
    return make.rule([labels], [labels], [], carry(gone))


@register(*_SOFTMAX_BACK)
def softmax_backward(call: OpCall) -> Rule:
    """Like softmax."""
    make, gone = Maker(), set(reduced_dims(call))
    labels = make.dims(call.shapes[0], whole=gone)
    return make.rule([labels, labels], [labels], [], carry(gone))


@register("aten.sort")
def sort(call: OpCall) -> Rule:
    """The sorted dim stays whole: of a sort over blocks every rank would need every block."""
    make = Maker()
    labels = make.dims(call.shapes[0], whole=set(reduced_dims(call)))
    return make.rule([labels], [labels, labels])


define("aten.flip", sends=whole_block, carrier="moves.flip", localize=lambda block: block.told())
define("aten.roll", sends=whole_block, carrier="moves.roll", localize=told_dim)


@register("aten.flip", "aten.roll")
def moved(call: OpCall) -> Rule:
    """A dim whose entries move is carried (of several dims the first), the others pass."""
    dims = [int(d) % len(call.shapes[0]) for d in call.get("dims") or ()]
    make = Maker()
    flattened = not dims and call.op.startswith("aten.roll")
    labels = make.dims(call.shapes[0], whole=set(dims) or flattened)
    return make.rule([labels], [labels], [{0}] if all_float(call) else [], carry(dims[:1]))


def _diagonal(block: Block) -> dict[str, Any]:
    """Row i of a block of rows from r on is row r + i, so its diagonal is r columns further to the right."""
    rows = block.offset(f"d{len(block.call.shapes[0]) - 2}")
    return {"diagonal": replace(rows, start=block.call["diagonal"])} if isinstance(rows, Offset) else {}


def _whole_diagonal(call: OpCall) -> dict[str, Any]:
    diagonal = call["diagonal"]
    return {"diagonal": diagonal.start if isinstance(diagonal, Offset) else diagonal}


@register("aten.tril", "aten.triu", localize=_diagonal, globalize=_whole_diagonal)
def triangle(call: OpCall) -> Rule:
    """Columns stay whole."""
    make = Maker()
    labels = make.dims(call.shapes[0], whole={len(call.shapes[0]) - 1})
    return make.rule([labels], [labels], [{0}] if all_float(call) else [])


# --- statistics as sums


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
    dims = dims_told(dim, x.ndim)
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
    """The tensor as it is summed: float16 in float32, where squares and sums of it do not overflow."""
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
    return Variance.apply(x, dims_told(dim, x.ndim), 1 if correction is None else correction, keepdim)


@lifts(aten.var.dim)
def var_dim(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    """Variance over dims."""
    return Variance.apply(x, dims_told(dim, x.ndim), int(unbiased), keepdim)


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
    dims = dims_told(dim, x.ndim)
    if ord == 2:
        return Root.apply(_squares(_wide(x)).sum(dims, keepdim)).to(x.dtype.to_real())
    if ord == 1:
        return _wide(x).abs().sum(dims, keepdim).to(x.dtype.to_real())
    return aten.linalg_vector_norm.default(x, ord, dims, keepdim)


class Extreme(Function):
    """The largest or smallest element of all, of shards that of theirs. The gradient is shared by all that are equal to it, of
    which a NaN is one where the result is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Any) -> Tensor:
        value = op(x, tuple(range(x.ndim)))
        ctx.save_for_backward(x, value)
        return value

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, value = ctx.saved_tensors
        same = (x == value) | (x.isnan() & value.isnan())
        return torch.where(same, g / same.sum(), 0), None


@lifts(aten.max.default)
def largest(x: Tensor) -> Tensor:
    """The largest element."""
    return Extreme.apply(x, torch.amax)


@lifts(aten.min.default)
def smallest(x: Tensor) -> Tensor:
    """The smallest element."""
    return Extreme.apply(x, torch.amin)


@lifts(aten.count_nonzero.dim_IntList)
def count_nonzero_over(x: Tensor, dim: Sequence[int]) -> Tensor:
    """The number of elements that are not zero, as a sum."""
    return (x != 0).sum(dims_told(dim, x.ndim))


@lifts(aten.count_nonzero.default)
def count_nonzero(x: Tensor, dim: int | None = None) -> Tensor:
    """The number of elements that are not zero, as a sum."""
    return count_nonzero_over(x, () if dim is None else (dim,))


@lifts(aten.logsumexp.default)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x - max))) + max."""
    dims = dims_told(dim, x.ndim)
    top = x.detach().amax(dims, True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    value = (x - top).exp().sum(dims, True).log() + top
    return value if keepdim else value.sum(dims)


@lifts(aten._is_all_true.default)
def _is_all_true(x: Tensor) -> Tensor:
    """The conjunction of all truths, under its public name."""
    return x.all()


@lifts(aten._is_any_true.default)
def _is_any_true(x: Tensor) -> Tensor:
    """The disjunction of all truths, under its public name."""
    return x.any()
