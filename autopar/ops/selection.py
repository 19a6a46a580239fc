"""The largest and smallest entries along a dim, with their places: max, min, argmax, argmin, topk.

Where the dim is in blocks every rank sends its own candidates (`autopar.runtime.kernels.selection`). Sorts are not among these: a
sorted dim has as many candidates as entries, so it is gathered and sorted whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ir.sent import Sent
from autopar.ops.along_dim import carried_dim, carry, gathers
from autopar.ops.dialect import graph_op, lifts
from autopar.ops.labels import Maker, reduced_dims
from autopar.ops.pointwise import pointwise
from autopar.ops.registry import Sending, define, named, register
from autopar.runtime.kernels import selection as local

Tensor = torch.Tensor
aten = torch.ops.aten

define("aten.topk", result_names=("top", "chosen"))
for _name, _function in {"max": "largest", "min": "smallest", "argmax": "argmax", "argmin": "argmin"}.items():
    define(
        f"aten.{_name}",
        carrier=f"selection.{_function}",
        sends=gathers(rows=1, places=1),
        localize=lambda block: block.told(),
    )


@register(*named("argmax argmin max min"))
def extreme(call: OpCall) -> Rule:
    """One dim is carried; over all dims together nothing is, as a place is then one in the flattened tensor."""
    if len(call.operands) == 2:
        return pointwise(call)
    make, gone = Maker(), set(reduced_dims(call))
    labels = make.dims(call.shapes[0], whole=gone)
    keep = bool(call.get("keepdim", False))
    out: Labels = tuple(() if i in gone else label for i, label in enumerate(labels) if keep or i not in gone)
    return make.rule([labels], [out for _ in call.results], [], carry(gone) if call.get("dim") is not None else ())


def _candidates(sending: Sending) -> list[Sent]:
    shape, dim = sending.call.shapes[0], carried_dim(sending.choice)
    rows = min(int(sending.call["k"]), shape[dim] // sending.ranks)
    return gathers(rows, rows)(sending)


@register("aten.topk", carrier="selection.topk", sends=_candidates, localize=lambda block: block.told())
def topk(call: OpCall) -> Rule:
    """One dim is carried, unless all of it is asked for."""
    make, gone = Maker(), set(reduced_dims(call))
    labels = make.dims(call.shapes[0], whole=gone)
    out: Labels = tuple(() if i in gone else label for i, label in enumerate(labels))
    return make.rule([labels], [out, out], [], carry(gone) if call.out_shape != call.shapes[0] else ())


# --- the way back


@graph_op(
    "put(Tensor g, Tensor index, int dim, SymInt size) -> Tensor",
    local.put,
    lambda g, index, dim, size: g.new_empty([size if i == dim else n for i, n in enumerate(g.shape)]),
    home="selection",
    localize=lambda b: {"size": b.result_shape()[b.call["dim"]], "offset": b.offset("v")},
    globalize=lambda call: {"size": call.out_shape[int(call["dim"])]},
    fresh=True,
)
def put(call: OpCall) -> Rule:
    """Each block of the dim takes the entries that lie in it."""
    make, dim = Maker(), int(call["dim"])
    rows = make.dims(call.shapes[0], whole={dim})
    out = tuple(make.add("v", n) if i == dim else rows[i] for i, n in enumerate(call.out_shape))
    return make.rule([rows, rows], [out], [{0}])


class Chosen(Function):
    """values, places = op(x, …) along a dim, which both keep; gradients go back to the places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, op: Any, *args: Any) -> tuple[Tensor, Tensor]:
        values, places = op(x, *args)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.dim, ctx.size, ctx.rest = dim, x.shape[dim], [None] * (2 + len(args))
        return values, places

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return put(g, places, ctx.dim, ctx.size), *ctx.rest


def _lift_extreme(op: Any) -> None:
    def lift(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        if not x.ndim or not x.is_floating_point():
            return op(x, dim, keepdim)
        dim %= x.ndim
        values, places = Chosen.apply(x, dim, op, dim, True)
        return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))

    lifts(op)(lift)


_lift_extreme(aten.max.dim)
_lift_extreme(aten.min.dim)


@lifts(aten.topk.default)
def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    if not x.ndim or not x.is_floating_point():
        return aten.topk.default(x, k, dim, largest, sorted)
    return Chosen.apply(x, dim % x.ndim, aten.topk.default, k, dim % x.ndim, largest, sorted)
