"""Facts about integers: which operands are an index and into how much, and which values a result can have.

Indices are checked where they come from (`autopar.capture.graph.index_guards`); what can be proven in range is not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from autopar.ir.call import OpCall, Operand
from autopar.ir.ranges import Index, Range
from autopar.ops.dialect import empty_like, graph_op, lifts, shapes
from autopar.ops.pointwise import pointwise
from autopar.ops.registry import define, named

Tensor = torch.Tensor
aten = torch.ops.aten
Ranges = tuple[Range, ...]

in_range = graph_op(
    "in_range(Tensor x, int low, int high) -> Tensor",
    lambda x, low, high: x.clone(),
    empty_like,
    free=True,
    home="rt.guards",
    told_source=True,
    indexes=lambda call: (Index(0, Range(call["low"], call["high"])),),
    values=lambda call, operands, _: operands[0],
)(pointwise)


expect = graph_op(
    "expect(Tensor condition, Scalar value) -> Tensor",
    lambda condition, value: condition.clone(),
    empty_like,
    free=True,
    home="rt.guards",
    told_source=True,
)(pointwise)
"""Conditions, or integers, that must have the value that they had for the example, each element where it lies."""


def is_condition(op: str) -> bool:
    """Whether an op holds the data to the example's way."""
    return ".".join(op.split(".")[:2]) == expect.name().replace("::", ".")


@lifts(aten.one_hot.default)
def _one_hot(x: Tensor, classes: int = -1) -> Tensor:
    """torch's own has no check of classes once it is traced. Without their number it depends on the data."""
    if classes < 0:
        return aten.one_hot.default(x, classes)
    checked = in_range(x, 0, classes)
    return (checked.unsqueeze(-1) == torch.arange(classes, device=x.device)).to(torch.int64)


@shapes(aten.bincount.default)
def _bincount_shape(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As many counts as are asked for at least; without a least number they depend on the data."""
    if minlength <= 0:
        raise DynamicOutputShapeException(aten.bincount.default)
    return x.new_empty([minlength], dtype=_count_dtype(weights))


@lifts(aten.bincount.default)
def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """The classes below `minlength`, which the data is held to; eager would give more counts for others."""
    checked = in_range(x, 0, minlength)
    member = checked.unsqueeze(-1) == torch.arange(minlength, device=x.device)
    if weights is None:
        return member.sum(0)
    return (member * weights.to(_count_dtype(weights)).unsqueeze(-1)).sum(0)


def _count_dtype(weights: Tensor | None) -> torch.dtype:
    if weights is None:
        return torch.int64
    return torch.float32 if weights.dtype == torch.float32 else torch.float64


# --- indices


def one_index(
    argument: str, size: Callable[[OpCall], int], negative: bool = False
) -> Callable[[OpCall], tuple[Index, ...]]:
    """The indices of an op that has one index argument, into so many; negative: counted from the end too."""

    def indexes(call: OpCall) -> tuple[Index, ...]:
        place, n = call[argument], size(call)
        return (Index(place.index, Range(-n if negative else 0, n)),) if isinstance(place, Operand) else ()

    return indexes


def _along(call: OpCall) -> int:
    shape = call.shapes[0]
    return shape[int(call["dim"]) % len(shape)] if shape else 1


def _of_each_dim(call: OpCall) -> tuple[Index, ...]:
    """Integer tensors index the dims in order; masks are no indices."""
    indices = []
    for n, place in zip(call.shapes[0], call["indices"], strict=False):
        if isinstance(place, Operand) and call.operands[place.index].dtype not in (torch.bool, torch.uint8):
            indices.append(Index(place.index, Range(-n, n)))
    return tuple(indices)


define("autopar.embedding", indexes=one_index("index", lambda call: call.shapes[0][0]))
define("autopar.pick", indexes=one_index("index", _along))
define("autopar.linear_cross_entropy", indexes=one_index("index", lambda call: call.operand("w").shape[0]))
define(
    *named("gather scatter scatter_add scatter_reduce index_select index_add index_copy index_reduce"),
    indexes=one_index("index", _along),
)
define("aten.index_fill", indexes=one_index("index", _along, negative=True))
define(*named("take put"), indexes=one_index("index", lambda call: math.prod(call.shapes[0]), negative=True))
define(*named("index index_put"), indexes=_of_each_dim)
define(
    *named("_embedding_bag _embedding_bag_forward_only"), indexes=one_index("indices", lambda call: call.shapes[0][0])
)
define(*named("max_unpool2d max_unpool3d"), indexes=one_index("indices", lambda call: math.prod(call["output_size"])))
define("aten.multi_margin_loss", indexes=one_index("target", lambda call: (1, *call.shapes[0])[-1]))


# --- values


def _arange(call: OpCall, operands: Ranges, result: int) -> Range | None:
    numbers = call.get("start", 0), call["end"], call.get("step", 1)
    if not all(isinstance(n, int) for n in numbers):
        return None
    made = range(*numbers)
    return Range(min(made), max(made) + 1) if made else Range(0, 0)


def _constant(argument: str) -> Callable[[OpCall, Ranges, int], Range | None]:
    def values(call: OpCall, operands: Ranges, result: int) -> Range | None:
        n = call[argument]
        return Range(int(n), int(n) + 1) if isinstance(n, (int, bool)) else None

    return values


def _position(call: OpCall, operands: Ranges, result: int) -> Range | None:
    """Places along the dim that is searched, or in the whole tensor."""
    return Range(0, math.prod(call.shapes[0]) if call.get("dim") is None else _along(call))


def _found(call: OpCall, operands: Ranges, result: int) -> Range | None:
    """Elements, and as a second result their places along the dim."""
    if result == 1:
        return Range(0, _along(call))
    return (
        operands[0]
        if len(operands) == 1
        else _corners(max if call.op.startswith("aten.max.") else min)(call, operands, 0)
    )


def _clamped(call: OpCall, operands: Ranges, result: int) -> Range | None:
    low, high = call.get("min"), call.get("max")
    if any(isinstance(end, (float, Operand)) for end in (low, high)):
        return None

    def at(n: int) -> int:
        n = n if low is None else max(n, low)
        return n if high is None else min(n, high)

    return Range(at(operands[0].low), at(operands[0].high - 1) + 1)


def _remainder(call: OpCall, operands: Ranges, result: int) -> Range | None:
    n = call["other"]
    return Range(0, n) if isinstance(n, int) and n > 0 else None


def _sides(call: OpCall, operands: Ranges) -> tuple[Range, Range] | None:
    """Ranges of the arguments `self` and `other` of a binary op."""
    sides = []
    for name in ("self", "other"):
        x = call[name]
        if isinstance(x, Operand):
            sides.append(operands[x.index])
        elif isinstance(x, int):
            sides.append(Range(x, x + 1))
        else:
            return None
    return sides[0], sides[1]


def _corners(f: Callable[[int, int], int]) -> Callable[[OpCall, Ranges, int], Range | None]:
    """The range of a function that is monotonous in either argument: its values at the ends."""

    def values(call: OpCall, operands: Ranges, result: int) -> Range | None:
        sides = _sides(call, operands)
        if sides is None or call.get("alpha", 1) != 1:
            return None
        ends = [f(a, b) for a in (sides[0].low, sides[0].high - 1) for b in (sides[1].low, sides[1].high - 1)]
        return Range(min(ends), max(ends) + 1)

    return values


def _floor_divided(call: OpCall, operands: Ranges, result: int) -> Range | None:
    n = call["other"]
    down = not call.op.startswith("aten.div") or call.get("rounding_mode") == "floor"
    if not down or not isinstance(n, int) or n <= 0:
        return None
    return Range(operands[0].low // n, (operands[0].high - 1) // n + 1)


def _any_of(call: OpCall, operands: Ranges, result: int) -> Range | None:
    return functools.reduce(Range.joined, operands) if operands else None


def _either(call: OpCall, operands: Ranges, result: int) -> Range | None:
    sides = _sides(call, operands)
    return None if sides is None else sides[0].joined(sides[1])


def _filled(call: OpCall, operands: Ranges, result: int) -> Range | None:
    n = call["value"]
    return operands[0].joined(Range(n, n + 1)) if isinstance(n, int) else None


def _summed(call: OpCall, operands: Ranges, result: int) -> Range | None:
    """The range of sums of up to so many elements, as cumulative sums have them."""
    out = math.prod(call.out_shape) or 1
    n = _along(call) if call.op.startswith("aten.cumsum") else math.prod(call.shapes[0]) // out
    low, high = operands[0].low, operands[0].high - 1
    return Range(min(low, low * n), max(high, high * n) + 1)


def _sorted_place(call: OpCall, operands: Ranges, result: int) -> Range | None:
    table = "boundaries" if call.op.startswith("aten.bucketize") else "sorted_sequence"
    return Range(0, call.operand(table).shape[-1] + 1)


define(
    *named("reshape permute expand clone alias flip roll repeat repeat_interleave cat stack _to_copy"),
    values=_any_of,
    rearranges=True,
)
define(*named("slice select gather index index_select diagonal unfold amax amin"), values=lambda c, r, _: r[0])
define(*named("tril triu"), values=lambda c, r, _: r[0].joined(Range(0, 1)))
define(
    "aten.repeat_interleave.Tensor", values=_position, precision="follow"
)  # places of rows, and not how often they come
define("aten.arange", values=_arange)
define("aten.full", values=_constant("fill_value"))
define(*named("full_like new_full"), values=_constant("fill_value"))
define(*named("fill"), values=_constant("value"))
define(*named("zeros zeros_like new_zeros"), values=lambda *_: Range(0, 1))
define(*named("ones ones_like new_ones"), values=lambda *_: Range(1, 2))
define(*named("argmax argmin argsort"), values=_position)
define(*named("topk sort max min median mode kthvalue cummax cummin"), values=_found)
define(*named("clamp clamp_min clamp_max"), values=_clamped)
define("aten.remainder", values=_remainder)
define("aten.add", values=_corners(lambda a, b: a + b))
define("aten.sub", values=_corners(lambda a, b: a - b))
define("aten.mul", values=_corners(lambda a, b: a * b))
define("aten.minimum", values=_corners(min))
define("aten.maximum", values=_corners(max))
define(*named("floor_divide div"), values=_floor_divided)
define("aten.where", values=_either)
define("aten.masked_fill", values=_filled)
define(*named("sum cumsum"), values=_summed)
define(*named("bucketize searchsorted"), values=_sorted_place)
