"""Look-ups in a table, whose rows (the vocabulary) or columns may be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Rule
from autopar.ops.dialect import graph_op, lifts
from autopar.ops.labels import Maker
from autopar.ops.registry import Block, Offset, define, once
from autopar.runtime.kernels import ops as local

Tensor = torch.Tensor
aten = torch.ops.aten

define("aten.embedding", precision="low")
define("autopar.embedding", linear=lambda call: [{0}], picks=once)
define("autopar.embedding_grad", fills=once)


def _table_offset(block: Block) -> dict[str, Any]:
    offset = block.offset("v")
    return {"offset": offset if isinstance(offset, Offset) else None}


@graph_op(
    "embedding(Tensor w, Tensor index) -> Tensor",
    local.embedding,
    lambda w, index: w.new_empty([*index.shape, w.shape[1]]),
    localize=_table_offset,
    dear=True,
)
def embedding(call: OpCall) -> Rule:
    """A sharded vocabulary leaves partial sums (zero rows elsewhere); the hidden dim passes."""
    make = Maker()
    index = tuple(make.add(f"d{i}", n) for i, n in enumerate(call.shapes[1]))
    v, h = make.add("v", call.shapes[0][0]), make.add("h", call.shapes[0][1])
    return make.rule([(v, h), index], [(*index, h)])


@graph_op(
    "embedding_grad(Tensor g, Tensor index, SymInt rows, int padding) -> Tensor",
    local.embedding_grad,
    lambda g, index, rows, padding: g.new_empty([rows, g.shape[-1]]),
    localize=lambda b: {"rows": b.result_shape()[0], **_table_offset(b)},
    globalize=lambda call: {"rows": call.out_shape[0]},
    dear=True,
    fresh=True,
)
def embedding_grad(call: OpCall) -> Rule:
    """Sums over the batch; each block of the vocabulary takes its own rows."""
    make = Maker()
    index = tuple(make.add(f"d{i}", n) for i, n in enumerate(call.shapes[1]))
    out = call.out_shape
    v, h = make.add("v", out[0]), make.add("h", out[1])
    return make.rule([(*index, h), index], [(v, h)])


class Embedding(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, index: Tensor, padding: int, by_frequency: bool = False) -> Tensor:
        """by_frequency: the gradient of a row is over how often the batch reads it."""
        ctx.save_for_backward(index)
        ctx.rows, ctx.padding, ctx.by_frequency = w.shape[0], padding, by_frequency
        return embedding(w, index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        dw = embedding_grad(g, index, ctx.rows, ctx.padding)
        if ctx.by_frequency:
            ones = torch.ones([*index.shape, 1], dtype=torch.float32, device=g.device)
            dw = (dw / embedding_grad(ones, index, ctx.rows, ctx.padding).clamp(min=1)).to(dw.dtype)
        return dw, None, None, None


@lifts(aten.embedding.default)
def _embedding(
    weight: Tensor, index: Tensor, padding: int = -1, scale_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    padding = padding + weight.shape[0] if padding < -1 else padding
    return Embedding.apply(weight, index, padding, scale_by_freq)
