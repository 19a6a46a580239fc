"""Rules of pointwise ops, constants and random numbers: every result dim is a factor."""

from __future__ import annotations

import math
from typing import Any

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule
from autopar.ops.registry import Block, Maker, all_float, broadcast_labels, register


def result_size(block: Block) -> dict[str, Any]:
    """The argument `size` on one rank."""
    return {"size": block.result_shape()}


# --- pointwise --------------------------------------------------------------------------------------------------------

_LINEAR_IN_ALL = {"aten.add", "aten.sub"}
_LINEAR_IN_FIRST = {"aten.neg", "aten.clone", "aten._conj", "aten.real", "aten.imag"}


def _linear_groups(call: OpCall) -> list[set[int]]:
    """Operands in which a pointwise op is linear, so that partial sums may pass through."""
    packet = ".".join(call.op.split(".")[:2])
    tensors = len(call.operands)
    floats = all_float(call)
    if packet in _LINEAR_IN_ALL and floats:
        return [{0, 1}] if tensors == 2 else []
    if packet in _LINEAR_IN_FIRST and floats:
        return [{0}]
    if packet in ("aten.mul", "aten.div") and floats and call.get("rounding_mode") is None:
        first = isinstance(call["self"], Operand) and (tensors == 1 or call.shapes[1] == ())
        return [{0}] if first else []
    if packet == "aten._to_copy" and floats:
        out = call.results[0]
        return [{0}] if out is not None and out.dtype.itemsize >= call.operands[0].dtype.itemsize else []
    if call.op == "aten.where.self" and all(t.is_float for t in call.operands[1:]) and tensors == 3:
        return [{1, 2}]
    if packet == "aten.masked_fill" and call.get("value") == 0 and call.operands[0].is_float:
        return [{0}]
    return []


@register(
    "pointwise",
    "aten._to_copy",
    "aten.copy",
    "aten.fill",
    "aten.zeros_like",
    "aten.ones_like",
    "aten.full_like",
    "aten.empty_like",
    "aten.masked_fill",
    "aten.where",
    "aten.threshold_backward",
    "aten.nan_to_num",
    "aten._conj",
    "aten.clone",
    "aten.lerp",
    "aten.floor_divide",
    "aten.polar",
    "aten.hardswish",
    "aten._prelu_kernel",
    "aten.log_sigmoid_forward",
    *(
        f"aten.{name}_backward"
        for name in (
            "softplus",
            "leaky_relu",
            "elu",
            "hardtanh",
            "hardswish",
            "hardsigmoid",
            "hardshrink",
            "softshrink",
            "mish",
            "_prelu_kernel",
            "log_sigmoid",
        )
    ),
)
def pointwise(call: OpCall) -> Rule:
    """Every result dim is a factor; operands broadcast."""
    make = Maker()
    out = next(t for t in call.results if t is not None).shape
    labels = make.dims(out)
    operands: list[Labels | None] = [broadcast_labels(s, out, labels) for s in call.shapes]
    return make.rule(operands, [labels for _ in call.results], _linear_groups(call))


# --- constants --------------------------------------------------------------------------------------------------------


@register("aten.full", "aten.zeros", "aten.ones", "aten.empty", localize=result_size)
def constant(call: OpCall) -> Rule:
    """Every dim of a constant can be made sharded."""
    make = Maker()
    out = call.out_shapes[0]
    assert out is not None
    return make.rule([], [make.dims(out)])


def _contiguous(block: Block) -> dict[str, Any]:
    shape = block.result_shape()
    return {"size": shape, "stride": [math.prod(shape[i + 1 :]) for i in range(len(shape))]}


@register("aten.new_empty_strided", localize=_contiguous)
@register("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", localize=result_size)
def new_constant(call: OpCall) -> Rule:
    """A constant that takes only dtype and device from its operand."""
    make = Maker()
    out = call.out_shapes[0]
    assert out is not None
    return make.rule([((),) * len(call.shapes[0])], [make.dims(out)])


@register("aten.arange", "aten.linspace", "aten.eye", "aten.scalar_tensor", "aten.tril_indices", "aten.triu_indices")
def made_whole(call: OpCall) -> Rule:
    """Made whole on every rank; slicing it afterwards is free."""
    make = Maker()
    return make.rule([], [((),) * len(t.shape) if t is not None else None for t in call.results])


def _dropped(block: Block) -> dict[str, Any]:
    labels = block.rule.results[0]
    type_ = block.call.results[0]
    assert labels is not None
    assert type_ is not None
    return {"shape": type_.shape, "offsets": block.offsets(labels)}


@register("autopar.dropout", localize=_dropped)
def dropout(call: OpCall) -> Rule:
    """Random numbers follow the global position, so every dim passes; linear in its input."""
    make = Maker()
    labels = make.dims(call.shapes[0])
    return make.rule([labels], [labels], [{0}])


@register(
    "autopar.random_uniform", "autopar.random_normal", localize=lambda b: {"size": b.result_shape(), **_dropped(b)}
)
def random_tensor(call: OpCall) -> Rule:
    """Random numbers follow the global position."""
    return constant(call)
