"""Indexing and searching: gather, scatter, index tensors, histograms, sorted look-ups.

Values that an op adds where an index says so may be sharded along the index: every rank adds its own, and the results are terms
of a sum, of which what is added to is one more (`Rule.added`).
"""

from __future__ import annotations

import torch

from autopar.ir.call import OpCall, Operand
from autopar.ir.rule import Labels, Rule
from autopar.ops.labels import Maker, leading
from autopar.ops.registry import define, named, once, register

define(*named("index index_select gather take_along_dim scatter index_put index_copy"), precision="follow")
define(*named("index _unsafe_index index_select gather take_along_dim"), linear=lambda call: [{0}], picks=once)
define(
    *named("index_put _unsafe_index_put index_add scatter_add index_copy put"),
    linear=lambda call: [{0, len(call.operands) - 1}],
)


def _where_told(call: OpCall) -> list[set[int]]:
    """The tensor that is written to and the one that is written, together; where a number is written, the former if that is 0."""
    if call.get("reduce") is not None:
        return []
    return [{0, 2}] if len(call.operands) == 3 else [{0}] if call["value"] == 0 else []


define(*named("scatter index_fill"), linear=_where_told)
define("aten.take", linear=lambda call: [{0}])


@register(*named("gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill"))
def index_along(call: OpCall) -> Rule:
    """The indexed dim stays whole in what is indexed; dims of equal size elsewhere pass, and those that are added up are cut."""
    make = Maker()
    x = call.shapes[0]
    if not x:
        return make.rule([((),) * len(s) for s in call.shapes], [()])
    dim = int(call["dim"]) % len(x)
    packet = call.op.split(".")[1]
    if not packet.startswith("index_") and any(s and len(s) != len(x) for s in call.shapes[1:]):
        return leading(call, 0)  # an empty index may have any shape
    others = [s for s in call.shapes[1:] if len(s) == len(x)]
    same = [all(s[i] == n for s in others) for i, n in enumerate(x)]
    labels: Labels = tuple(() if i == dim else make.add(f"d{i}", n, whole=not same[i]) for i, n in enumerate(x))
    operands: list[Labels | None] = [labels]
    reading = packet in ("gather", "index_select")
    index = call.shapes[1] if len(call.shapes) > 1 else ()
    named = index[dim if packet in ("gather", "scatter_add") else 0] if index else 1
    as_many = all(s[dim] == named for s in others)
    adding = packet in ("scatter_add", "index_add") and as_many and _of_numbers(call)
    picked = make.add("j", named) if reading or adding else ()
    for s in call.shapes[1:]:
        if len(s) == len(x) and not (len(x) == 1 and packet.startswith("index_")):
            operands.append(tuple(picked if i == dim else d if same[i] else () for i, d in enumerate(labels)))
        else:
            operands.append(tuple(picked for _ in s))
    out = tuple(picked if i == dim else d if same[i] or packet != "gather" else () for i, d in enumerate(labels))
    if reading and not call.out_shape:  # an index that is a number reads a number
        out = ()
    return make.rule(operands, [out if reading else labels], added={0} if adding else ())


def _of_numbers(call: OpCall) -> bool:
    """Whether what is added up is a sum."""
    return call.operands[0].dtype != torch.bool


@register("aten.index", "aten._unsafe_index", "aten.index_put", "aten._unsafe_index_put")
def index(call: OpCall) -> Rule:
    """Dims that are indexed stay whole; dims of the index tensors pass to the result of reading, and are added up by adding."""
    make = Maker()
    x = call.shapes[0]
    indices = list(call["indices"])
    indices += [None] * (len(x) - len(indices))
    where = [i for i, a in enumerate(indices) if a is not None]
    tensors = [call.operands[a.index] for a in indices if a is not None]
    if any(t.dtype.itemsize == 1 for t in tensors):  # masks: how many they pick depends on the data
        return leading(call, 0)
    shape = _broadcast([t.shape for t in tensors])
    reading = not call.op.split(".")[1].endswith("index_put")
    adding = not reading and bool(call.get("accumulate", False)) and _of_numbers(call)
    picked: Labels = tuple(make.add(f"j{i}", n, whole=not reading and not adding) for i, n in enumerate(shape))
    labels: Labels = tuple(() if i in where else make.add(f"d{i}", n) for i, n in enumerate(x))
    at = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    rest = [d for i, d in enumerate(labels) if i not in where]
    value: Labels = (*rest[:at], *picked, *rest[at:])
    operands: list[Labels | None] = [labels]
    operands += [_tail(picked, t.shape) for t in tensors]
    if not reading:
        values = call.operand("values")
        operands.append(_tail(value, values.shape))
        return make.rule(operands, [labels], added={0} if adding else ())
    return make.rule(operands, [value])


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _tail(labels: Labels, shape: tuple[int, ...]) -> Labels:
    own = labels[len(labels) - len(shape) :]
    return tuple(() if n == 1 else d for n, d in zip(shape, own, strict=True))


@register("aten.histc")
def histogram(call: OpCall) -> Rule:
    """With fixed bounds, counts of blocks add up; bounds taken from the data need all of it."""
    make = Maker()
    labels = make.dims(call.shapes[0], whole=not call["min"] < call["max"])
    return make.rule([labels], [((),)])


@register("aten.bucketize", "aten.searchsorted")
def search(call: OpCall) -> Rule:
    """The sorted dim stays whole; what is looked up passes."""
    make = Maker()
    out = call.out_shape
    labels = make.dims(out)
    table = "boundaries" if call.op.startswith("aten.bucketize") else "sorted_sequence"
    rows: list[Labels | None] = []
    for name, argument in call.arguments.items():
        if isinstance(argument, Operand):
            shape = call.operands[argument.index].shape
            along = len(shape) > 1 or name not in (table, "sorter")
            rows.append(
                (*labels[: len(shape) - 1], ()) if name in (table, "sorter") and along else labels if along else ((),)
            )
    return make.rule(rows, [labels])


@register("aten.isin")
def among(call: OpCall) -> Rule:
    """Each element is looked for by itself, in all of the others."""
    make = Maker()
    labels = make.dims(call.out_shape)
    rows: list[Labels | None] = [
        labels if argument == call.get("elements") else ((),) * len(call.operands[argument.index].shape)
        for argument in call.arguments.values()
        if isinstance(argument, Operand)
    ]
    return make.rule(rows, [labels])


@register("aten.masked_scatter", "aten.masked_scatter_backward")
def counted(call: OpCall) -> Rule:
    """Positions depend on how many came before: whole."""
    return leading(call, 0)
