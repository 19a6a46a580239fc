"""Losses, as compositions of sums, so that a sharded batch or a sharded vocabulary leaves only partial sums.

Cross-entropy over a sharded class dim is three small reductions (maximum, sum of exponentials, the target's logit) and
no gather. `v` is the class factor. Losses that torch computes element by element are torch's own ops, with its guards
where a probability is 0 or 1 and its choice at a kink; only their reduction is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule
from autopar.ops.dialect import empty_like, graph_op, lifts
from autopar.ops.labels import Maker, leading
from autopar.ops.pointwise import pointwise
from autopar.ops.reduction import mean_all
from autopar.ops.registry import Block, define, named, register
from autopar.runtime.kernels import ops as local

Tensor = torch.Tensor
aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def _rows(call: OpCall, shape: tuple[int, ...]) -> tuple[Maker, Labels, Labels]:
    """(make, labels with the class factor v at `dim`, labels of rows)."""
    make = Maker()
    dim = int(call["dim"]) % len(shape)
    labels = tuple(make.add("v" if i == dim else f"d{i}", n) for i, n in enumerate(shape))
    return make, labels, tuple(d for i, d in enumerate(labels) if i != dim)


def _class_offset(block: Block) -> dict[str, Any]:
    return {"offset": block.offset("v")} if "v" in block.rule.factors else {}


@graph_op("sumexp(Tensor x, Tensor m, int dim) -> Tensor", local.sumexp, lambda x, m, dim: empty_like(m))
def sumexp(call: OpCall) -> Rule:
    """A sharded class dim leaves a partial sum; the maximum must be whole."""
    make, x, row = _rows(call, call.shapes[0])
    return make.rule([x, row], [row])


@graph_op(
    "pick(Tensor x, Tensor index, int dim) -> Tensor",
    local.pick,
    lambda x, index, dim: x.new_empty([n for i, n in enumerate(x.shape) if i != dim]),
    localize=_class_offset,
)
def pick(call: OpCall) -> Rule:
    """Each block contributes the entries it holds: a partial sum over a sharded class dim."""
    make, x, row = _rows(call, call.shapes[0])
    return make.rule([x, row], [row])


@graph_op(
    "pick_grad(Tensor g, Tensor index, int dim, SymInt size) -> Tensor",
    local.pick_grad,
    lambda g, index, dim, size: g.new_empty([*g.shape[:dim], size, *g.shape[dim:]]),
    localize=lambda b: {"size": b.result_shape()[b.call["dim"]], **_class_offset(b)},
    globalize=lambda call: {"size": call.out_shape[int(call["dim"])]},
)
def pick_grad(call: OpCall) -> Rule:
    """Each block places the entries it holds."""
    out = call.out_shape
    make, x, row = _rows(call, out)
    return make.rule([row, row], [x])


@graph_op(
    "cross_entropy_grad(Tensor x, Tensor lse, Tensor index, Tensor g, int dim) -> Tensor",
    local.cross_entropy_grad,
    empty_like,
    localize=_class_offset,
)
def cross_entropy_grad(call: OpCall) -> Rule:
    """Local in the class dim once log-sum-exp is whole."""
    make, x, row = _rows(call, call.shapes[0])
    return make.rule([x, row, row, row], [x])


@graph_op(
    "smoothed_cross_entropy_grad(Tensor x, Tensor lse, Tensor index, Tensor g, Tensor g_all, int dim) -> Tensor",
    local.smoothed_cross_entropy_grad,
    empty_like,
    localize=_class_offset,
)
def smoothed_cross_entropy_grad(call: OpCall) -> Rule:
    """The rule of the gradient, which is as for the plain loss."""
    make, x, row = _rows(call, call.shapes[0])
    return make.rule([x, row, row, row, row], [x])


def _log_sum_exp(x: Tensor, dim: int) -> Tensor:
    top = x.amax(dim)
    return sumexp(x, top, dim).log() + top


class CrossEntropy(Function):
    """-log softmax(x)[index] per row, the class dim `dim` of x possibly sharded: three small reductions, no gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int) -> Tensor:
        lse = _log_sum_exp(x, dim)
        ctx.save_for_backward(x, lse, index)
        ctx.dim = dim
        return lse - pick(x, index, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, lse, index = ctx.saved_tensors
        return cross_entropy_grad(x, lse, index, g, ctx.dim), None, None


class SmoothedCrossEntropy(Function):
    """Per row -log softmax(x)[index], and its sum over all classes, each times its weight (a number, or broadcast to x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        lse = _log_sum_exp(x, dim)
        ctx.save_for_backward(x, lse, index, weight)
        ctx.dim = dim
        each = lse.unsqueeze(dim) - x
        return lse - pick(x, index, dim), (each if weight is None else each * weight).sum(dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_all: Tensor) -> tuple[Tensor | None, ...]:
        x, lse, index, weight = ctx.saved_tensors
        of_all = g_all * (x.shape[ctx.dim] if weight is None else weight.sum())
        dx = smoothed_cross_entropy_grad(x, lse, index, g, of_all, ctx.dim)
        each = g_all.unsqueeze(ctx.dim)
        return dx - (each if weight is None else each * weight), None, None, None


class LogSumExp(Function):
    """log of the sum of exp(x) over `dim`, which may be sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        lse = _log_sum_exp(x, dim)
        ctx.save_for_backward(x, lse)
        ctx.dim = dim
        return lse

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, lse = ctx.saved_tensors
        return (x - lse.unsqueeze(ctx.dim)).exp() * g.unsqueeze(ctx.dim), None


class Pick(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.size = dim, x.shape[dim]
        return pick(x, index, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return pick_grad(g, index, ctx.dim, ctx.size), None, None


# --- what ATen's losses become


def _reduced(x: Tensor, reduction: int) -> Tensor:
    if reduction == NONE:
        return x
    return mean_all(x) if reduction == MEAN else x.sum()


@lifts(aten.cross_entropy_loss.default)
def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean over the whole batch's counted targets, as one division of two sums."""
    dim = 0 if x.ndim == 1 else 1
    if target.is_floating_point():
        return _soft_cross_entropy(x, target, weight, reduction, label_smoothing, dim)
    counted, safe, class_scale = counted_rows(target, weight, ignore_index, x.dtype)
    channels = None if weight is None else _channel(weight, x, dim)
    if label_smoothing:
        rows, smooth = SmoothedCrossEntropy.apply(x, safe, dim, channels)
    else:
        rows = CrossEntropy.apply(x, safe, dim)
    loss = rows if weight is None else rows * class_scale
    if label_smoothing:
        loss = loss * (1 - label_smoothing) + smooth * (label_smoothing / x.shape[dim])
    loss = _only(loss, counted)
    if reduction == NONE:
        return loss
    return loss.sum() / class_scale.sum() if reduction == MEAN else loss.sum()


def counted_rows(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Per row whether its target counts, a target that is in range, and the weight of its class, 0 where it does not count."""
    counted = target != ignore_index
    safe = torch.where(counted, target, torch.zeros_like(target))
    scale = counted.to(dtype)
    if weight is not None:
        scale = scale * aten.index_select(weight, 0, safe.reshape(-1)).reshape(safe.shape)
    return counted, safe, scale


def _only(loss: Tensor, counted: Tensor) -> Tensor:
    """Zero, with a zero gradient, where a target is ignored: also where its loss, or the number of all others, says nothing."""
    return torch.where(counted, loss, torch.zeros_like(loss))


def _channel(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.reshape([-1 if i == dim else 1 for i in range(x.ndim)])


def _soft_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float, dim: int
) -> Tensor:
    target = target * (1 - smoothing) + smoothing / x.shape[dim] if smoothing else target
    if weight is not None:
        target = target * _channel(weight, x, dim)
    loss = ((LogSumExp.apply(x, dim).unsqueeze(dim) - x) * target).sum(dim)
    if reduction == NONE:
        return loss
    return loss.sum() / (x.numel() // x.shape[dim]) if reduction == MEAN else loss.sum()


@lifts(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    """Negative log likelihood of log-probabilities x: (n, c, ...)."""
    dim = 0 if x.ndim == 1 else 1
    counted, safe, scale = counted_rows(target, weight, ignore_index, x.dtype)
    loss = -Pick.apply(x, safe, dim)
    loss = _only(loss if weight is None else loss * scale, counted)
    if reduction == NONE:
        return loss
    return loss.sum() / scale.sum() if reduction == MEAN else loss.sum()


@lifts(aten.mse_loss.default)
def mse_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    """Squared error."""
    return _reduced((x - y) * (x - y), reduction)


@lifts(aten.l1_loss.default)
def l1_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    """Absolute error."""
    return _reduced((x - y).abs(), reduction)


@register(
    *named(
        "smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy "
        "binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward"
    )
)
def elementwise_loss(call: OpCall) -> Rule:
    """Pointwise before it is reduced, which is what our programs have of it."""
    return pointwise(call) if call["reduction"] == NONE else leading(call, 0)


@lifts(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Tensor, y: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    """Quadratic below beta, linear above."""
    return _reduced(aten.smooth_l1_loss.default(x, y, NONE, beta), reduction)


@lifts(aten.huber_loss.default)
def huber_loss(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    """Quadratic below delta, linear above."""
    return _reduced(aten.huber_loss.default(x, y, NONE, delta), reduction)


@lifts(aten.binary_cross_entropy_with_logits.default)
def bce_with_logits(
    x: Tensor, y: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """Stable log-loss of logits."""
    return _reduced(aten.binary_cross_entropy_with_logits.default(x, y, weight, pos_weight, NONE), reduction)


@lifts(aten.binary_cross_entropy.default)
def bce(x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    """Log-loss of probabilities, clamped as torch does."""
    return _reduced(aten.binary_cross_entropy.default(x, y, weight, NONE), reduction)


@lifts(aten.soft_margin_loss.default)
def soft_margin_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    """Log-loss of the product of scores and signs."""
    return _reduced(aten.soft_margin_loss.default(x, y, NONE), reduction)


@register(
    *named(
        "multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward multilabel_margin_loss_backward"
    )
)
def margin_loss(call: OpCall) -> Rule:
    """Row by row before it is reduced, which is what our programs have of it; all classes of a row are compared."""
    make, apart = Maker(), call["reduction"] == NONE and len(call.operand("self").shape) == 2
    weight = call.get("weight")

    def labels(shape: tuple[int, ...], has_rows: bool = True) -> Labels:
        return tuple(make.add("n", size) if apart and has_rows and i == 0 else () for i, size in enumerate(shape))

    operands: list[Labels | None] = [labels(s, Operand(k) != weight) for k, s in enumerate(call.shapes)]
    return make.rule(operands, [labels(t.shape) if t is not None else None for t in call.results])


@lifts(aten.multi_margin_loss.default)
def multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """The margins of all classes to the one that is right."""
    each = NONE if x.ndim == 2 else SUM
    return _reduced(aten.multi_margin_loss.default(x, target, p, margin, weight, each), reduction)


@lifts(aten.multilabel_margin_loss.default)
def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """The margins of all classes to those that are right."""
    each = NONE if x.ndim == 2 else SUM
    return _reduced(aten.multilabel_margin_loss.default(x, target, each), reduction)


@lifts(aten.kl_div.default)
def kl_div(x: Tensor, y: Tensor, reduction: int = MEAN, *, log_target: bool = False) -> Tensor:
    """Kullback-Leibler divergence of log-probabilities x against y."""
    return _reduced(aten.kl_div.default(x, y, NONE, log_target=log_target), reduction)


define("autopar.pick", linear=lambda call: [{0}])
