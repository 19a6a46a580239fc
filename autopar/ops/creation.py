"""Tensors made from nothing: constants, of which every block can be made alone, and index ranges, made whole."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.ir.call import OpCall
from autopar.ir.rule import Rule
from autopar.ops.dialect import lifts
from autopar.ops.labels import Maker
from autopar.ops.registry import Block, define, named, register, resized

aten = torch.ops.aten

define(*named("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"), precision="pass")


@register(*named("full zeros ones empty"), factory=True, **resized("size"))
def constant(call: OpCall) -> Rule:
    """Every dim of a constant can be made sharded."""
    make = Maker()
    out = call.out_shape
    return make.rule([], [make.dims(out)])


def _contiguous(block: Block) -> dict[str, Any]:
    shape = block.result_shape()
    return {"size": shape, "stride": [math.prod(shape[i + 1 :]) for i in range(len(shape))]}


@register("aten.new_empty_strided", localize=_contiguous, globalize=resized("size")["globalize"])
@register(*named("new_zeros new_ones new_full new_empty"), **resized("size"))
def new_constant(call: OpCall) -> Rule:
    """A constant that takes only dtype and device from its operand."""
    make = Maker()
    out = call.out_shape
    return make.rule([((),) * len(call.shapes[0])], [make.dims(out)])


@lifts(aten._new_zeros_with_same_feature_meta.default)
def _no_tangent(tangent: torch.Tensor, primal: torch.Tensor, self_num_batch_dims: int = 0) -> torch.Tensor:
    """The zeros that forward-mode differentiation begins with: the batch dims of the tangent, the shape of the primal."""
    batch = tangent.shape[:self_num_batch_dims]
    return torch.zeros_like(primal if not batch else primal.expand(*batch, *primal.shape), dtype=tangent.dtype)


@register(*named("arange linspace eye scalar_tensor tril_indices triu_indices"), factory=True)
def made_whole(call: OpCall) -> Rule:
    """Made whole on every rank, of ends that may be tensors; slicing it afterwards is free."""
    make = Maker()
    return make.rule([()] * len(call.operands), [((),) * len(t.shape) if t is not None else None for t in call.results])
