"""Slices, joins, splits and repeats: what takes a dim for pieces one after the other.

Where the pieces are equal, `cat` of two batches is `b, b -> (k! b)`, and a slice between their boundaries `(k! b) -> b`: which
piece it is stays whole, and where in a piece an element is goes through. Ranks do not share the latter, as no block of a
dim is the same part of several pieces, but microbatches may: of every piece each has its part (`autopar.passes.batch`).
Pieces of unequal sizes consist of smaller ones, the largest that they all consist of; where these have one element the
dim stays whole. Every second element is the minor end of a dim, `(b k!) -> b`, whose blocks ranks may have too.
"""

from __future__ import annotations

import math
from typing import Any

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops.labels import Maker, all_float
from autopar.ops.registry import Block, named, register, resized

_SHAPE = resized("input_sizes")


def _in_pieces(make: Maker, dim: int, unit: int, name: str, size: int) -> tuple[str, ...]:
    """Labels of a dim, or a run in it, of `size` elements in pieces of `unit`: which piece, under a name of its own, and where in
    it."""
    if unit <= 1 or size == 0:
        return ()
    return (*make.add(name, size // unit, whole=True), *make.add(f"d{dim}", unit))


def _dim(call: OpCall, rank: int) -> int:
    return int(call.get("dim", 0) or 0) % max(rank, 1)


def _run(call: OpCall, size: int) -> range:
    """The elements of a dim that a slice takes."""
    return range(*slice(call.get("start"), call.get("end"), call.get("step", 1)).indices(size))


def _sliced(make: Maker, call: OpCall, dim: int, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of a dim, and of a slice of it: of whole pieces, or of one element of every few."""
    run = _run(call, size)
    if run.step == 1:
        unit = math.gcd(size, run.start, run.stop) if run else 1
        return _in_pieces(make, dim, unit, "piece", size), _in_pieces(make, dim, unit, "sliced", len(run))
    if len(run) * run.step != size or run.stop != size:  # in a block it ends where the block does
        return (), ()
    each = make.add(f"d{dim}", len(run))
    return (*each, *make.add("between", run.step, whole=True)), each


def _labels(make: Maker, shape: tuple[int, ...], dim: int, at: tuple[str, ...]) -> Labels:
    """Labels of a tensor of which the op takes a dim for pieces. at: those of this dim."""
    return tuple(at if i == dim else make.add(f"d{i}", n) for i, n in enumerate(shape))


def _told_slice(block: Block, size: int) -> dict[str, Any]:
    """Where the slice lies in a block of every piece. size: of the dim on the whole."""
    run, factor = _run(block.call, size), f"d{_dim(block.call, len(block.call.shapes[0]))}"
    if len(run) == size or run.step > 1 or not block.axes_of(factor):
        return {}
    parts = block.parts(factor)
    return {"start": run.start // parts, "end": run.stop // parts}


def _sliced_size(call: OpCall) -> int:
    """The size of the dim that is sliced, of its own or of its gradient's result."""
    shape = call.out_shape if call.op.startswith("aten.slice_backward") else call.shapes[0]
    return shape[_dim(call, len(shape))]


@register(
    *named("slice slice_scatter"), localize=lambda block: _told_slice(block, _sliced_size(block.call)), pieces=True
)
def slice_of(call: OpCall) -> Rule:
    """A slice of a dim, or a dim of which a slice is another tensor; all other dims pass."""
    make, shape = Maker(), call.shapes[0]
    dim = _dim(call, len(shape))
    of_whole, of_part = _sliced(make, call, dim, shape[dim])
    whole, part = _labels(make, shape, dim, of_whole), _labels(make, shape, dim, of_part)
    scatters = call.op.startswith("aten.slice_scatter")
    operands, result = ([whole, part], whole) if scatters else ([whole], part)
    return make.rule([*operands], [result], [set(range(len(operands)))] if all_float(call) else [])


@register(
    "aten.slice_backward",
    pieces=True,
    localize=lambda block: _SHAPE["localize"](block) | _told_slice(block, _sliced_size(block.call)),
    globalize=_SHAPE["globalize"],
)
def slice_backward(call: OpCall) -> Rule:
    """The gradient of a slice: zeros but for the slice."""
    make, out = Maker(), call.out_shape
    dim = _dim(call, len(out))
    of_whole, of_part = _sliced(make, call, dim, out[dim])
    whole, part = _labels(make, out, dim, of_whole), _labels(make, out, dim, of_part)
    return make.rule([part], [whole], [{0}] if all_float(call) else [])


@register("aten.cat", pieces=True)
def cat(call: OpCall) -> Rule:
    """The joined dim is in pieces of what the sizes of the operands have in common; all other dims pass."""
    make, out = Maker(), call.out_shape
    dim = _dim(call, len(out))
    ranked = [shape for shape in call.shapes if len(shape) == len(out)]
    unit = math.gcd(*(shape[dim] for shape in ranked))
    operands: list[Labels | None] = []
    for k, shape in enumerate(call.shapes):
        if len(shape) < len(out):
            operands.append(((),))  # `cat` leaves out empty operands of one dim, whatever the rank of the others
        else:
            operands.append(_labels(make, shape, dim, _in_pieces(make, dim, unit, f"pieces{k}", shape[dim])))
    result = _labels(make, out, dim, _in_pieces(make, dim, unit, "piece", out[dim]))
    return make.rule(operands, [result], [set(range(len(operands)))] if all_float(call) else [])


def _told_split(block: Block) -> dict[str, Any]:
    """The sizes of what a split makes, of a block of every piece."""
    call = block.call
    factor = f"d{_dim(call, len(call.shapes[0]))}"
    if not block.axes_of(factor):
        return {}
    parts = block.parts(factor)
    sizes = {name: call.get(name) for name in ("split_size", "split_sizes") if call.get(name) is not None}
    return {
        name: [n // parts for n in size] if isinstance(size, (list, tuple)) else size // parts
        for name, size in sizes.items()
    }


@register(*named("split split_with_sizes unsafe_split"), localize=_told_split, pieces=True)
def split(call: OpCall) -> Rule:
    """The split dim is in pieces of what the sizes of the results have in common; all other dims pass."""
    make, shape = Maker(), call.shapes[0]
    dim = _dim(call, len(shape))
    sizes = [t.shape[dim] for t in call.results if t is not None]
    told = call.get("split_size")
    unit = math.gcd(shape[dim], *sizes, *([told] if isinstance(told, int) else told or []))
    results: list[Labels | None] = [
        None if t is None else _labels(make, t.shape, dim, _in_pieces(make, dim, unit, f"pieces{k}", t.shape[dim]))
        for k, t in enumerate(call.results)
    ]
    operand = _labels(make, shape, dim, _in_pieces(make, dim, unit, "piece", shape[dim]))
    return make.rule([operand], results, [{0}] if all_float(call) else [])


@register("aten.repeat", pieces=True)
def repeat(call: OpCall) -> Rule:
    """A dim that is repeated is one piece of the result's."""
    make, shape, out = Maker(), call.shapes[0], call.out_shape
    lead = len(out) - len(shape)
    own, result = make.dims(shape), []
    for i, (n, grown) in enumerate(zip(shape, out[lead:], strict=True)):
        result.append((*make.add(f"piece{i}", grown // n, whole=True), *own[i]) if n and grown else ())
    return make.rule([own], [((),) * lead + tuple(result)], [{0}] if all_float(call) else [])
