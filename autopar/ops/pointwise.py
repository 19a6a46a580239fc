"""Pointwise ops, casts and copies: every result dim is a factor, operands broadcast.

Ops that torch tags as pointwise have this rule without being named here. What is named: ops that lack the tag, and ops
that keep the model's dtype under mixed precision.
"""

from __future__ import annotations

import torch

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule
from autopar.ops.dialect import lifts
from autopar.ops.labels import Maker, all_float, broadcast_labels
from autopar.ops.registry import define, named, register

Tensor = torch.Tensor
aten = torch.ops.aten
_LINEAR_IN_ALL = {"aten.add", "aten.sub"}
_LINEAR_IN_FIRST = {"aten.neg", "aten.clone", "aten.conj_physical", "aten.real", "aten.imag"}

define(*named("masked_fill where prelu _prelu_kernel gelu silu relu glu hardswish clone"), precision="follow")
define(
    *named(
        "pow square exp exp2 expm1 log log2 log10 log1p rsqrt reciprocal sinh cosh tan acos asin acosh asinh atanh "
        "erfinv softplus lgamma digamma polygamma xlogy logit log_sigmoid logaddexp logaddexp2"
    ),
    precision="keep",
)
define(*named("to _to_copy type_as copy"), precision="pass")
define(*named("to _to_copy type_as"), canonical="cast")
define("aten.clone", canonical="copy", view=True)
define(*named("add neg _to_copy"), carries=True)
define(*named("add sub rsub"), adds="other")
define("aten._to_copy", linear=lambda call: [{0}])  # but for rounding
define(*named("add sub"), linear=lambda call: [{0, 1}] if len(call.operands) == 2 else [])  # numbers and counts too
define("aten.xlogy", linear=lambda call: [{0}] if isinstance(call["self"], Operand) else [])
define("aten.mul", linear=lambda call: [{0}, {1}] if len(call.operands) == 2 else [{0}])
define(
    "aten.div",
    linear=lambda call: [{0}] if call.get("rounding_mode") is None and isinstance(call["self"], Operand) else [],
)


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
        out, before = call.results[0], call.operands[0].dtype
        return [{0}] if out is not None and torch.promote_types(before, out.dtype) == out.dtype else []
    if call.op == "aten.where.self" and all(t.is_float for t in call.operands[1:]) and tensors == 3:
        return [{1, 2}]
    if packet == "aten.masked_fill" and call.get("value") == 0 and call.operands[0].is_float:
        return [{0}]
    return []


@register(
    "pointwise",
    *named(
        "_to_copy copy fill masked_fill where threshold_backward nan_to_num clone lerp floor_divide polar hardswish "
        "_prelu_kernel log_sigmoid_forward softplus_backward leaky_relu_backward elu_backward hardtanh_backward "
        "hardswish_backward hardsigmoid_backward hardshrink_backward softshrink_backward mish_backward "
        "_prelu_kernel_backward log_sigmoid_backward zeros_like ones_like full_like empty_like"
    ),
)
def pointwise(call: OpCall) -> Rule:
    """Every result dim is a factor; operands broadcast."""
    make = Maker()
    out = next(t for t in call.results if t is not None).shape
    labels = make.dims(out)
    operands: list[Labels | None] = [broadcast_labels(s, out, labels) for s in call.shapes]
    return make.rule(operands, [labels for _ in call.results], _linear_groups(call))


@lifts(aten.copy.default)
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x.dtype).expand(x.shape)
