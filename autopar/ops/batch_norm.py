"""Batch norm as one op forward and one backward, with the statistics of the whole batch.

    n c s2 s3, c, c -> n c s2 s3, c, c      channels shard; a sample's place in the batch and a row's in the image are whole

The carried choices `+n`, `+s2`, … cut the batch, or the image, along an axis: then forward gathers every rank's mean and
variance, and backward adds up two sums, in one message each (`runtime/kernels/batch_norm.py`). The gradients of weight and
bias are such sums already, so nothing is owed. With statistics that are given (eval mode) batch and image are plain factors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Carried, Labels, Rule
from autopar.ir.sent import Sent
from autopar.ops.dialect import empty_like, graph_op, lifts
from autopar.ops.labels import Maker
from autopar.ops.registry import AlongAxis, Block, Sending, define, named
from autopar.runtime.kernels import batch_norm as local
from autopar.runtime.kernels.ops import norm_dtype

Tensor = torch.Tensor
aten = torch.ops.aten
_AXES = 8
"""The most axes that may cut the batch: as many as a mesh has."""


def _training(call: OpCall) -> bool:
    """Whether statistics are those of x."""
    return bool(call.get("training", call.op == "autopar.batch_norm"))


def _batch(call: OpCall) -> tuple[str, ...]:
    """The factors over which statistics are."""
    return ("n", *(f"s{dim}" for dim in range(2, len(call.operand("x").shape))))


def _rule(call: OpCall, *results: str) -> Rule:
    """results: "x" or "c" each."""
    training, names = _training(call), _batch(call)
    make = Maker()
    n, c, *space = call.operand("x").shape
    batch, *image = (make.add(name, size, whole=training) for name, size in zip(names, (n, *space), strict=True))
    channels = make.add("c", c)
    labels: dict[str, Labels] = {"x": (batch, channels, *image), "c": (channels,)}
    operands: list[Labels | None] = [
        labels["x" if name in ("x", "g") else "c"] for name, a in call.arguments.items() if isinstance(a, Operand)
    ]
    carried = [Carried((name,), axes=_AXES, uneven=_AXES) for name in names if name in make.factors] if training else []
    return make.rule(operands, [labels[name] for name in results], carried=carried)


def _told(block: Block) -> dict[str, Any]:
    """The axes along which batch and image are cut: `along_n=rt.along('dp')`."""
    axes: dict[str, tuple[str, ...]] = {}
    for axis, choice in block.carried:
        name = f"along_{choice.removeprefix('+')}"
        axes[name] = (*axes.get(name, ()), axis)
    return {name: AlongAxis(along) for name, along in axes.items()}


def _sends(kind: str) -> Callable[[Sending], list[Sent]]:
    """Two numbers a channel: every rank's are gathered, or they are added up."""

    def sends(sending: Sending) -> list[Sent]:
        own = 2 * sending.result_bytes[1]
        axes = ((sending.axis, sending.ranks), *sending.inner)
        return [Sent(kind, axis, own * ranks if kind == "all_gather" else own) for axis, ranks in axes]

    return sends


def _any_order(call: OpCall) -> tuple[tuple[str, ...], ...]:
    """Statistics are of all rows, in whatever order they are; given ones are for every row alike, as the rule says."""
    return tuple((name,) for name in _batch(call)) if _training(call) else ()


_FACTS: dict[str, Any] = {"localize": _told, "joined": _any_order, "ordered": lambda call, order, held: {}}


def _channels(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=norm_dtype(x))


@graph_op(
    "batch_norm(Tensor x, Tensor? w, Tensor? b, float eps) -> (Tensor, Tensor, Tensor)",
    local.batch_norm,
    lambda x, w, b, eps: (empty_like(x), _channels(x), _channels(x)),
    result_names=("normed", "mean", "var"),
    home="batch_norm",
    sends=_sends("all_gather"),
    **_FACTS,
)
def batch_norm(call: OpCall) -> Rule:
    """The norm, and mean and variance of the whole batch."""
    return _rule(call, "x", "c", "c")


@graph_op(
    "batch_norm_eval(Tensor x, Tensor? w, Tensor? b, Tensor mean, Tensor var, float eps) -> Tensor",
    local.batch_norm_eval,
    lambda x, *_: empty_like(x),
    home="batch_norm",
)
def batch_norm_eval(call: OpCall) -> Rule:
    """The norm by statistics that are given."""
    return _rule(call, "x")


@graph_op(
    "batch_norm_backward(Tensor g, Tensor x, Tensor? w, Tensor mean, Tensor var, float eps, bool training) "
    "-> (Tensor, Tensor, Tensor)",
    local.batch_norm_backward,
    lambda g, x, *_: (empty_like(g), _channels(x), _channels(x)),
    result_names=("dx", "dw", "db"),
    home="batch_norm",
    sends=_sends("all_reduce"),
    **_FACTS,
)
def batch_norm_backward(call: OpCall) -> Rule:
    """Gradients of x, weight and bias."""
    return _rule(call, "x", "c", "c")


class _BatchNorm(Function):
    """The norm by statistics of x, which come out beside it, or by given ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, *given: Tensor) -> Any:
        y, *own = batch_norm(x, w, b, eps) if not given else [batch_norm_eval(x, w, b, *given, eps)]
        ctx.save_for_backward(x, w, *(given or own))
        ctx.eps, ctx.training = eps, not given
        ctx.mark_non_differentiable(*own)
        return y, *own

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, w, mean, var = ctx.saved_tensors
        grads = batch_norm_backward(g, x, w, mean, var, ctx.eps, ctx.training)
        dx, dw, db = (grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False))
        return dx, dw, db, *(None for _ in ctx.needs_input_grad[3:])


def _applied(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *given: Tensor) -> Any:
    """Weight, bias and statistics have the dtype that statistics are computed in."""
    w, b, *statistics = (None if t is None else t.to(norm_dtype(x)) for t in (weight, bias, *given))
    return _BatchNorm.apply(x, w, b, eps, *statistics)


def normed_by(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """The norm by statistics that are given."""
    return _applied(x, weight, bias, eps, mean, var)[0]


# --- what ATen's batch norms become


@lifts(aten._native_batch_norm_legit_functional.default)
def _functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    if not training:
        return normed_by(x, weight, bias, mean, var, eps), None, None, mean, var
    y, batch_mean, batch_var = _applied(x, weight, bias, eps)
    count = x.numel() // x.shape[1]
    unbiased = batch_var * (count / max(count - 1, 1))
    new_mean = batch_mean * momentum + mean * (1 - momentum)
    new_var = unbiased * momentum + var * (1 - momentum)
    return y, None, None, new_mean.to(mean.dtype), new_var.to(var.dtype)


@lifts(aten._native_batch_norm_legit_no_training.default)
def _no_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Any, ...]:
    return normed_by(x, weight, bias, mean, var, eps), None, None


@lifts(aten._native_batch_norm_legit.no_stats)
def _no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    return _applied(x, weight, bias, eps)[0], None, None


@lifts(aten.batch_norm.default)
def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    if training or mean is None or var is None:
        return _applied(x, weight, bias, eps)[0]
    return normed_by(x, weight, bias, mean, var, eps)


define(
    *named("batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional"),
    *named("_native_batch_norm_legit_no_training"),
    precision="norm",
)
