"""Bags of look-ups in a table, whose rows (the vocabulary) or columns may be sharded as those of single look-ups.

A bag's sum is an op of its own, and not look-ups that are added up: these would be a tensor of all rows that are read, as many
times the sum's size as a bag has indices. A mean is the sum over how many indices count. Where bags are the rows of an index of
two dims these are the batch, and indices of a bag may be sharded too; where they begin at offsets, which bag an index is in has
only the data, and what is sharded is the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall, Operand
from autopar.ir.ranges import Range
from autopar.ir.rule import Labels, Rule
from autopar.ops.dialect import captured_op, graph_op
from autopar.ops.integers import one_index
from autopar.ops.labels import Maker
from autopar.ops.registry import Block, Offset, define
from autopar.runtime.kernels import bags as local

Tensor = torch.Tensor
aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2


def _table_offset(block: Block) -> dict[str, Any]:
    offset = block.offset("v")
    return {"offset": offset if isinstance(offset, Offset) else None}


def _bags(make: Maker, call: OpCall, bags: int) -> tuple[Labels, tuple[str, ...]]:
    """Labels of the index, and of the dim of bags."""
    shape = call.operand("index").shape
    if len(shape) == 2:
        rows = make.add("b", shape[0])
        return (rows, make.add("n", shape[1])), rows
    return (make.add("n", shape[0], whole=True),), make.add("b", bags, whole=True)


def _operands(call: OpCall, labels: dict[str, Labels]) -> list[Labels | None]:
    """The labels of operands in their order, by argument."""
    known: dict[int, Labels] = {
        place.index: labels[name] for name, place in call.arguments.items() if isinstance(place, Operand)
    }
    return [known[i] for i in range(len(call.operands))]


def _linear(*names: str) -> Any:
    """Groups of one operand each, of the arguments of these names that are tensors."""

    def groups(call: OpCall) -> list[set[int]]:
        places = (call.get(name) for name in names)
        return [{place.index} for place in places if isinstance(place, Operand)]

    return groups


@graph_op(
    "embedding_bag(Tensor w, Tensor index, Tensor? offsets, Tensor? weights, int padding, bool last) -> Tensor",
    local.embedding_bag,
    lambda w, index, offsets, weights, padding, last: w.new_empty([_count(index, offsets, last), w.shape[1]]),
    localize=_table_offset,
    linear=_linear("w", "weights"),
    dear=True,
    home="bags",
)
def embedding_bag(call: OpCall) -> Rule:
    """A sharded vocabulary leaves partial sums, as do sharded bags; the hidden dim passes."""
    make = Maker()
    index, bags = _bags(make, call, call.out_shape[0])
    v, h = make.add("v", call.shapes[0][0]), make.add("h", call.shapes[0][1])
    labels = {"w": (v, h), "index": index, "weights": index, "offsets": _whole(make, call)}
    return make.rule(_operands(call, labels), [(bags, h)])


@graph_op(
    "embedding_bag_grad(Tensor g, Tensor index, Tensor? offsets, Tensor? weights, SymInt rows, int padding, bool last)"
    " -> Tensor",
    local.embedding_bag_grad,
    lambda g, index, offsets, weights, rows, padding, last: g.new_empty([rows, g.shape[1]]),
    localize=lambda b: {"rows": b.result_shape()[0], **_table_offset(b)},
    globalize=lambda call: {"rows": call.out_shape[0]},
    linear=_linear("g", "weights"),
    fills=lambda call: call.operand("index").numel / max(call.operand("g").shape[0], 1),
    dear=True,
    fresh=True,
    home="bags",
)
def embedding_bag_grad(call: OpCall) -> Rule:
    """Sums over bags and their indices; each block of the vocabulary takes its own rows."""
    make = Maker()
    index, bags = _bags(make, call, call.shapes[0][0])
    v, h = make.add("v", call.out_shape[0]), make.add("h", call.out_shape[1])
    labels = {"g": (bags, h), "index": index, "weights": index, "offsets": _whole(make, call)}
    return make.rule(_operands(call, labels), [(v, h)])


@graph_op(
    "embedding_bag_dweights(Tensor w, Tensor g, Tensor index, Tensor? offsets, int padding, bool last) -> Tensor",
    local.embedding_bag_dweights,
    lambda w, g, index, offsets, padding, last: g.new_empty(index.shape),
    localize=_table_offset,
    linear=_linear("w", "g"),
    dear=True,
    fresh=True,
    home="bags",
)
def embedding_bag_dweights(call: OpCall) -> Rule:
    """Products over the hidden dim; a block of the vocabulary gives those of its own rows."""
    make = Maker()
    index, bags = _bags(make, call, call.shapes[1][0])
    v, h = make.add("v", call.shapes[0][0]), make.add("h", call.shapes[0][1])
    labels = {"g": (bags, h), "w": (v, h), "index": index, "offsets": _whole(make, call)}
    return make.rule(_operands(call, labels), [index])


@graph_op(
    "embedding_bag_max(Tensor w, Tensor index, Tensor? offsets, int padding, bool last) -> (Tensor, Tensor)",
    local.embedding_bag_max,
    lambda w, index, offsets, padding, last: (
        w.new_empty([_count(index, offsets, last), w.shape[1]]),
        index.new_empty([_count(index, offsets, last), w.shape[1]], dtype=torch.int64),
    ),
    dear=True,
    home="bags",
)
def embedding_bag_max(call: OpCall) -> Rule:
    """Which row is the largest takes the whole vocabulary and the whole bag to say."""
    make = Maker()
    index, bags = _bags(make, call, call.out_shape[0])
    v, h = make.add("v", call.shapes[0][0], whole=True), make.add("h", call.shapes[0][1])
    if len(index) == 2:
        make.add("n", call.shapes[1][1], whole=True)
    labels = {"w": (v, h), "index": index, "offsets": _whole(make, call)}
    return make.rule(_operands(call, labels), [(bags, h), (bags, h)])


def _whole(make: Maker, call: OpCall) -> Labels:
    """Labels of offsets, which every rank has."""
    return (
        (make.add("o", call.operand("offsets").shape[0], whole=True),) if isinstance(call["offsets"], Operand) else ()
    )


def _count(index: Tensor, offsets: Tensor | None, last: bool) -> int:
    """How many bags there are."""
    return index.shape[0] if offsets is None else offsets.shape[0] - last


def _rows_of_each(call: OpCall) -> float:
    """The rows that a bag reads, on average."""
    return call.operand("index").numel / max(call.out_shape[0], 1)


_LOOK_UPS = ("autopar.embedding_bag", "autopar.embedding_bag_max")
_DWEIGHTS = "autopar.embedding_bag_dweights"
define(*_LOOK_UPS, picks=_rows_of_each)
define(_DWEIGHTS, picks=lambda call: call.shapes[0][1])
define(*_LOOK_UPS, indexes=one_index("index", lambda call: call.shapes[0][0]))
define(*_LOOK_UPS, _DWEIGHTS, "autopar.embedding_bag_grad", alone=True)
define("autopar.embedding_bag_max", values=lambda call, operands, result: Range(-1, call.shapes[0][0]))


class EmbeddingBag(Function):
    @staticmethod
    def forward(
        ctx: Any, w: Tensor, index: Tensor, offsets: Tensor | None, weights: Tensor | None, padding: int, last: bool
    ) -> Tensor:
        ctx.save_for_backward(w if weights is not None else None, index, offsets, weights)
        ctx.rows, ctx.padding, ctx.last = w.shape[0], padding, last
        return embedding_bag(w, index, offsets, weights, padding, last)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        w, index, offsets, weights = ctx.saved_tensors
        dw = dweights = None
        if ctx.needs_input_grad[0]:
            dw = embedding_bag_grad(g, index, offsets, weights, ctx.rows, ctx.padding, ctx.last)
        if ctx.needs_input_grad[3]:
            dweights = embedding_bag_dweights(w, g, index, offsets, ctx.padding, ctx.last)
        return dw, None, None, dweights, None, None


class EmbeddingBagMax(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, index: Tensor, offsets: Tensor | None, padding: int, last: bool) -> Tensor:
        largest, places = embedding_bag_max(w, index, offsets, padding, last)
        ctx.save_for_backward(places)
        ctx.rows = w.shape[0]
        return largest

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        zeros = torch.zeros([ctx.rows, g.shape[1]], dtype=g.dtype, device=g.device)
        dw = aten.scatter_add.default(zeros, 0, places.clamp(min=0), g.masked_fill(places < 0, 0))
        return dw, None, None, None, None


@captured_op(
    "look_up_bags(Tensor w, Tensor index, Tensor? offsets, Tensor? weights, int mode, int padding, bool last)"
    " -> Tensor",
    lambda w, index, offsets, weights, mode, padding, last: w.new_empty([_count(index, offsets, last), w.shape[1]]),
)
def look_up_bags(
    w: Tensor, index: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: int, padding: int, last: bool
) -> Tensor:
    """aten.embedding_bag of bags that are the rows of an index of two dims, or begin at offsets."""
    if mode == MAX:
        return EmbeddingBagMax.apply(w, index, offsets, padding, last)
    sums: Tensor = EmbeddingBag.apply(w, index, offsets, weights, padding, last)
    return sums if mode == SUM else sums / _sizes(index, offsets, padding, last)


def _sizes(index: Tensor, offsets: Tensor | None, padding: int, last: bool) -> Tensor | int:
    """(bags, 1): how many indices of a bag count, 1 of an empty one; a number where all bags have as many."""
    counted = (index != padding) if padding >= 0 else None
    if offsets is None:
        return index.shape[1] if counted is None else counted.sum(1, keepdim=True).clamp(min=1)
    begins = offsets[:-1] if last else offsets
    ends = torch.cat([begins[1:], torch.full([1], index.shape[0], dtype=begins.dtype, device=begins.device)])
    if counted is not None:
        before = torch.cat([torch.zeros([1], dtype=torch.int64, device=index.device), counted.cumsum(0)])
        begins, ends = before[begins], before[ends]
    return (ends - begins).clamp(min=1).unsqueeze(1)
