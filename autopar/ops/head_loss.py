"""A head's product and its cross-entropy as one op, which is computed in chunks of tokens (`autopar.runtime.kernels.losses`).

    … h!, v! h!, …, … -> 1, … h!, v! h!         tokens shard (the loss and dw are partial sums); carried: +v, dx is partial

Capture puts the two together where that pays (`autopar.capture.graph.head_losses`); rows that count, class weights and the
mean are those of the loss over logits (`autopar.ops.loss`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Carried, Rule
from autopar.ir.sent import Sent
from autopar.ops.dialect import captured_op, empty_like, graph_op
from autopar.ops.labels import Maker
from autopar.ops.loss import SUM, counted_rows
from autopar.ops.registry import Block, Gemm, Merged, Sending
from autopar.runtime.comm.devices import Device
from autopar.runtime.kernels import losses as local

Tensor = torch.Tensor


def _work(call: OpCall, rule: Rule) -> Gemm:
    """Three products of the same numbers: logits and both gradients."""
    tokens = tuple(name for name in rule.factors if name.startswith("t"))
    return 6.0 * math.prod(f.size for f in rule.factors.values()), "matmul", (tokens, ("v",), ("h",))


def _merged(call: OpCall, parts: Mapping[str, int], device: Device) -> Merged:
    """Three products a chunk, and what is done to a chunk's logits between them: read for maxima and sums, read and written for
    their gradient, twice with smoothing; its part of x is copied, and the sum of dw read and written."""
    sizes = [size // parts.get(f"t{i}", 1) for i, size in enumerate(call.operand("index").shape)]
    x, w = call.operand("x"), call.operand("w")
    tokens, (classes, width) = math.prod(sizes), w.shape
    chunks = math.ceil(tokens / local.chunk_rows(width, device))
    times, launches = (6, 9) if call["each"] else (4, 8)
    moved = tokens * (times * classes // parts.get("v", 1) + 2 * width) * x.dtype.itemsize
    if chunks > 1:
        moved += 2 * chunks * (classes // parts.get("v", 1)) * width * max(w.dtype.itemsize, 4)
    return Merged(3 * chunks, launches * chunks, moved)


def _told(block: Block) -> dict[str, Any]:
    return {"offset": block.offset("v"), **block.told()} if block.carried else {}


def _sends(sending: Sending) -> list[Sent]:
    """Messages of every chunk of rows: maxima, then sums: exponentials, the labels' logits, with smoothing all logits."""
    scale, index = sending.call.operand("scale"), sending.call.operand("index")
    tokens = sending.bytes_of("index") / index.dtype.itemsize
    rows = min(tokens, local.chunk_rows(sending.call.operand("x").shape[-1], sending.device))
    nbytes, times = rows * max(scale.dtype.itemsize, 4), math.ceil(tokens / rows)
    sums = 3 if sending.call["each"] else 2
    return [Sent("all_reduce", sending.axis, n * nbytes, times) for n in (1, sums)]


@graph_op(
    "linear_cross_entropy(Tensor x, Tensor w, Tensor index, Tensor scale, float smoothing, float each)"
    " -> (Tensor, Tensor, Tensor)",
    local.linear_cross_entropy,
    lambda x, w, index, scale, smoothing, each: (scale.new_empty([]), empty_like(x), empty_like(w)),
    home="losses",
    work=_work,
    inside=("v",),
    merged=_merged,
    localize=_told,
    sends=_sends,
    fresh=True,
    kept=True,
    result_names=("loss", "dx", "dw"),
)
def linear_cross_entropy(call: OpCall) -> Rule:
    """Tokens are independent; a vocabulary in blocks exchanges statistics of rows."""
    make = Maker()
    tokens = make.dims(call.operand("index").shape, "t")
    v, h = (make.add(name, n, whole=True) for name, n in zip("vh", call.operand("w").shape, strict=True))
    x, w = (*tokens, h), (v, h)
    return make.rule([x, w, tokens, tokens], [(), x, w], carried=[Carried(("v",), owed=(1,), uneven=1)])


@graph_op(
    "times(Tensor x, Tensor g) -> Tensor", lambda x, g: (x * g).to(x.dtype), empty_like, home="losses", fresh=True
)
def times(call: OpCall) -> Rule:
    """In a graph it writes nowhere, in a program in place: it is for a value that has no other reader."""
    make = Maker()
    labels = make.dims(call.shapes[0])
    return make.rule([labels, ()], [labels], linear=[{0}])


class LinearCrossEntropy(Function):
    """The sum of rows' losses, each times its scale; gradients are there before the loss's own is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, index: Tensor, scale: Tensor, smoothing: float) -> Tensor:
        loss, dx, dw = linear_cross_entropy(x, w, index, scale, smoothing, smoothing / w.shape[0])
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return times(dx, g), times(dw, g), None, None, None


@captured_op(
    "head_loss(Tensor x, Tensor w, Tensor target, Tensor? weight, int reduction, int ignore_index, float smoothing,"
    " ScalarType dtype) -> Tensor",
    lambda x, w, target, weight, reduction, ignore_index, smoothing, dtype: x.new_empty([], dtype=dtype),
)
def head_loss(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    """cross_entropy(linear(x, w).to(dtype), target, …); where no target counts, NaN with gradients of zero, as there."""
    _, safe, scale = counted_rows(target, weight, ignore_index, dtype)
    loss = LinearCrossEntropy.apply(x, w, safe, scale, smoothing)
    if reduction == SUM:
        return loss
    total = scale.sum()
    return torch.where(total != 0, loss, torch.zeros_like(loss)) / total
