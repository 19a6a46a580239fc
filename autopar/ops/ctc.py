"""Connectionist temporal classification: the loss of a sequence whose labels have no places. One op, a sample at a time.

The batch alone shards: a label reads a class at every time, and every time reads the one before it. Eager takes targets as
rows, or one after another in one dim; the op has rows, of which it reads as many labels as their lengths say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops.dialect import graph_op, lifts, shapes
from autopar.ops.integers import in_range
from autopar.ops.labels import Maker
from autopar.ops.reduction import mean_all
from autopar.runtime.kernels import ctc as local

Tensor = torch.Tensor
aten = torch.ops.aten
_NONE, _MEAN = 0, 1
_OPERANDS = "Tensor log_probs, Tensor targets, Tensor inputs, Tensor lengths, int blank, bool zero_infinity"


def _labels(call: OpCall) -> tuple[Maker, list[Labels | None]]:
    make = Maker()
    batch = make.add("b", call.operand("log_probs").shape[1])
    return make, [((), batch, ()), (batch, ()), (batch,), (batch,)]


@graph_op(f"ctc({_OPERANDS}) -> Tensor", local.ctc, lambda x, *_: x.new_empty([x.shape[1]]), dear=True, fresh=True)
def ctc(call: OpCall) -> Rule:
    """Samples are independent."""
    make, operands = _labels(call)
    return make.rule(operands, [operands[3]])


@graph_op(
    f"ctc_grad(Tensor g, {_OPERANDS}) -> Tensor",
    local.ctc_grad,
    lambda g, x, *_: x.new_empty(x.shape),
    dear=True,
    fresh=True,
)
def ctc_grad(call: OpCall) -> Rule:
    """Samples are independent."""
    make, operands = _labels(call)
    return make.rule([operands[3], *operands], [operands[0]])


class CTC(Function):
    """Loss per sample; the gradient is torch's, which takes log_probs for those of a log_softmax."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(log_probs, *rest[:3])
        ctx.config = rest[3:]
        return ctc(log_probs, *rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return ctc_grad(g, *ctx.saved_tensors, *ctx.config), *[None] * 5


@lifts(aten.ctc_loss.Tensor)
def _of_tensors(
    log_probs: Tensor,
    targets: Tensor,
    inputs: Tensor,
    lengths: Tensor,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """log_probs: (time, batch, classes), or (time, classes) of one sample."""
    if log_probs.ndim == 2:
        one = _of_tensors(
            log_probs.unsqueeze(1), targets.reshape(1, -1), inputs, lengths, blank, reduction, zero_infinity
        )
        return one.squeeze(0) if reduction == _NONE else one
    inputs, lengths = inputs.long().reshape(-1), lengths.long().reshape(-1)
    rows = targets.long() if targets.ndim == 2 else _rows(targets.long(), lengths)
    loss = CTC.apply(log_probs, rows, inputs, lengths, blank, zero_infinity)
    if reduction == _MEAN:
        return mean_all(loss / lengths.clamp(min=1))
    return loss if reduction == _NONE else loss.sum()


def _rows(targets: Tensor, lengths: Tensor) -> Tensor:
    """Targets that lie one after another in one dim, as rows; what follows a row's own is not read."""
    most = targets.shape[0]
    ends = in_range(lengths.cumsum(0), 0, most + 1)
    places = (ends - lengths).unsqueeze(1) + torch.arange(most)
    return targets.index_select(0, places.clamp(max=most - 1).reshape(-1)).reshape(places.shape)


@shapes(aten._ctc_loss.Tensor)
def _shape(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Torch's table has a column per label of the longest target, which is data; nobody reads it here."""
    time, batch, _classes = log_probs.shape
    return log_probs.new_empty([batch]), log_probs.new_empty([batch, time, 2 * targets.shape[-1] + 1])


@shapes(aten._ctc_loss_backward.Tensor)
def _grad_shape(g: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)
