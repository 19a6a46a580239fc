"""Rules of reductions, of ops along a dim, and of views."""

from __future__ import annotations

import math

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops.registry import Maker, all_float, broadcast_labels, register
from autopar.ops.rules_pointwise import pointwise, result_size

# --- reductions -------------------------------------------------------------------------------------------------------


def reduced_dims(call: OpCall, name: str = "dim") -> list[int]:
    """Dims that a reduction removes, counted from the front."""
    rank = len(call.shapes[0])
    dim = call.get(name)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return sorted({int(d) % max(rank, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])})


def _reduction(call: OpCall, reduce: str | None, linear: bool) -> Rule:
    make = Maker()
    gone = reduced_dims(call)
    shape = call.shapes[0]
    labels = tuple(
        make.add(f"d{i}", n, whole=i in gone and reduce is None, reduce=(reduce or "sum") if i in gone else "sum")
        for i, n in enumerate(shape)
    )
    keep = bool(call.get("keepdim", False))
    out: Labels = tuple(() if i in gone else dim for i, dim in enumerate(labels) if keep or i not in gone)
    return make.rule([labels], [out for _ in call.results], [{0}] if linear else [])


@register("aten.sum")
def sum_(call: OpCall) -> Rule:
    """A sharded summed dim leaves a partial sum."""
    return _reduction(call, "sum", all_float(call))


@register("aten.amax")
def amax(call: OpCall) -> Rule:
    """A sharded reduced dim leaves a partial max."""
    return _reduction(call, "max", False)


@register("aten.amin")
def amin(call: OpCall) -> Rule:
    """A sharded reduced dim leaves a partial min."""
    return _reduction(call, "min", False)


@register(
    "aten.prod",
    "aten.any",
    "aten.all",
    "aten.argmax",
    "aten.argmin",
    "aten.max",
    "aten.min",
    "aten.mode",
    "aten.median",
    "aten.logsumexp",
    "aten.linalg_vector_norm",
    "aten.mean",
    "aten.var",
    "aten.std",
    "aten.norm",
    "aten.nansum",
    "aten.count_nonzero",
    "aten.kthvalue",
)
def whole_reduction(call: OpCall) -> Rule:
    """Reductions whose pieces do not combine by sum, max or min: the reduced dims stay whole."""
    if len(call.operands) == 2:
        return pointwise(call)
    return _reduction(call, None, False)


@register(
    "aten.cumsum",
    "aten.cumprod",
    "aten.cummax",
    "aten.cummin",
    "aten.sort",
    "aten.topk",
    "aten._softmax",
    "aten._log_softmax",
    "aten._safe_softmax",
    "aten.flip",
    "aten.roll",
    "aten.logcumsumexp",
)
def along_dims(call: OpCall) -> Rule:
    """Ops that work along some dims (kept whole) and independently over the others."""
    make = Maker()
    shape = call.shapes[0]
    gone = set(reduced_dims(call, "dims" if "dims" in call.arguments else "dim"))
    labels = tuple(make.add(f"d{i}", n, whole=i in gone) for i, n in enumerate(shape))
    results: list[Labels | None] = [
        tuple(() if i in gone and n != shape[i] else labels[i] for i, n in enumerate(t.shape)) if t else None
        for t in call.results
    ]
    linear = [{0}] if call.op.split(".")[1] in ("cumsum", "flip", "roll") and all_float(call) else []
    return make.rule([labels], results, linear)


@register("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(call: OpCall) -> Rule:
    """Like softmax: the class dim stays whole."""
    make = Maker()
    shape = call.shapes[0]
    dim = int(call["dim"]) % max(len(shape), 1)
    labels = tuple(make.add(f"d{i}", n, whole=i == dim) for i, n in enumerate(shape))
    return make.rule([labels, labels], [labels])


@register("aten.tril", "aten.triu")
def triangle(call: OpCall) -> Rule:
    """The matrix dims stay whole."""
    make = Maker()
    rank = len(call.shapes[0])
    labels = make.dims(call.shapes[0], whole={rank - 2, rank - 1})
    return make.rule([labels], [labels], [{0}] if all_float(call) else [])


# --- views --------------------------------------------------------------------------------------------------------------


def regroup(make: Maker, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Labels, Labels]:
    """Factors common to two groupings of the same row-major elements.

    (b, s, h·d) to (b, s, h, d): `b s (h d) -> b s h d`. Where boundaries do not nest, the common leading part of the
    group is a factor and the rest has none.
    """
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    i = j = k = 0
    a = before[0] if before else 1
    b = after[0] if after else 1
    while i < len(before) or j < len(after):
        if i < len(before) and a == 1:
            i += 1
            a = before[i] if i < len(before) else 1
        elif j < len(after) and b == 1:
            j += 1
            b = after[j] if j < len(after) else 1
        elif i >= len(before) or j >= len(after):
            break
        else:
            common = math.gcd(a, b)
            nested = common in (a, b)
            if common > 1:
                name = f"f{k}"
                make.add(name, common)
                left[i].append(name)
                right[j].append(name)
                k += 1
            if nested and common > 1:
                a, b = a // common, b // common
                continue
            a, b = (a // common, b // common) if common > 1 else (a, b)
            while a != b:  # skip to the end of the group
                if a < b:
                    i += 1
                    a *= before[i]
                else:
                    j += 1
                    b *= after[j]
            a = b = 1
    return tuple(map(tuple, left)), tuple(map(tuple, right))


@register("aten.reshape", localize=lambda b: {"shape": b.result_shape()}, free=True)
def reshape(call: OpCall) -> Rule:
    """Only the major factor of a merged or split dim can be sharded."""
    make = Maker()
    out = call.out_shapes[0]
    assert out is not None
    left, right = regroup(make, call.shapes[0], out)
    return make.rule([left], [right], [{0}] if all_float(call) else [])


@register("aten.permute", free=True)
def permute(call: OpCall) -> Rule:
    """Dims change places."""
    make = Maker()
    labels = make.dims(call.shapes[0])
    return make.rule([labels], [tuple(labels[int(d)] for d in call["dims"])], [{0}] if all_float(call) else [])


@register("aten.expand", localize=result_size, free=True)
def expand(call: OpCall) -> Rule:
    """A dim grown from size one is a factor of the result alone."""
    make = Maker()
    out = call.out_shapes[0]
    assert out is not None
    labels = make.dims(out)
    return make.rule([broadcast_labels(call.shapes[0], out, labels)], [labels], [{0}] if all_float(call) else [])


@register(
    "aten.slice",
    "aten.constant_pad_nd",
    "aten.unfold",
    "aten.repeat",
    "aten.reflection_pad1d",
    "aten.reflection_pad2d",
    "aten.replication_pad1d",
    "aten.replication_pad2d",
    "aten.slice_scatter",
)
def resize(call: OpCall) -> Rule:
    """Dims that keep their size pass; dims that change stay whole."""
    make = Maker()
    out = call.out_shapes[0]
    assert out is not None
    shape = call.shapes[0]
    lead = len(out) - len(shape) if call.op.startswith("aten.repeat") else 0
    changed = {i for i, n in enumerate(shape) if i + lead >= len(out) or out[i + lead] != n}
    if "dim" in call.arguments:
        changed.add(int(call["dim"]) % len(shape))
    if "dimension" in call.arguments:
        changed.add(int(call["dimension"]) % len(shape))
    labels = tuple(make.add(f"d{i}", n, whole=i in changed) for i, n in enumerate(shape))
    result: Labels = tuple(
        labels[i - lead] if 0 <= i - lead < len(shape) and i - lead not in changed else () for i in range(len(out))
    )
    operands: list[Labels | None] = [labels]
    for other in call.shapes[1:]:
        operands.append(tuple(labels[i] if n == shape[i] and i not in changed else () for i, n in enumerate(other)))
    linear = [set(range(len(operands)))] if call.get("value") in (None, 0, 0.0) and all_float(call) else []
    return make.rule(operands, [result], linear)


@register("aten.slice_backward", "aten.unfold_backward", localize=lambda b: {"input_sizes": b.result_shape()})
def slice_backward(call: OpCall) -> Rule:
    """The sliced dim is whole in the result."""
    make = Maker()
    out = call.out_shapes[0]
    assert out is not None
    dim = int(call["dim"]) % len(out)
    labels = tuple(() if i == dim else make.add(f"d{i}", n) for i, n in enumerate(out))
    own = labels if len(call.shapes[0]) == len(out) else (*labels, ())
    return make.rule([own], [labels], [{0}] if all_float(call) else [])


@register("aten.select")
def select(call: OpCall) -> Rule:
    """The selected dim stays whole and goes."""
    make = Maker()
    dim = int(call["dim"]) % len(call.shapes[0])
    labels = make.dims(call.shapes[0], whole={dim})
    return make.rule([labels], [tuple(d for i, d in enumerate(labels) if i != dim)], [{0}] if all_float(call) else [])


@register("aten.select_backward", localize=lambda b: {"input_sizes": b.result_shape()})
def select_backward(call: OpCall) -> Rule:
    """The selected dim comes back whole."""
    make = Maker()
    out = call.out_shapes[0]
    assert out is not None
    dim = int(call["dim"]) % len(out)
    labels = tuple(() if i == dim else make.add(f"d{i}", n) for i, n in enumerate(out))
    return make.rule([tuple(d for i, d in enumerate(labels) if i != dim)], [labels], [{0}] if all_float(call) else [])


@register("aten.select_scatter")
def select_scatter(call: OpCall) -> Rule:
    """Writes a slice into a copy; the dim stays whole."""
    make = Maker()
    dim = int(call["dim"]) % len(call.shapes[0])
    labels = make.dims(call.shapes[0], whole={dim})
    return make.rule(
        [labels, tuple(d for i, d in enumerate(labels) if i != dim)], [labels], [{0, 1}] if all_float(call) else []
    )


@register("aten.cat", "aten.stack", "aten.split", "aten.split_with_sizes", "aten.unbind", "aten.unsafe_split")
def join_or_split(call: OpCall) -> Rule:
    """The dim of a join or split stays whole, all others pass."""
    make = Maker()
    first = call.shapes[0]
    result = next(t for t in call.results if t is not None).shape
    inside = call.op.split(".")[1] in ("stack",)
    dim = int(call.get("dim", 0) or 0) % max(len(result) if inside else len(first), 1)

    def labels(shape: tuple[int, ...], has_dim: bool) -> Labels:
        dims: list[tuple[str, ...]] = []
        for i, n in enumerate(shape):
            if has_dim and i == dim:
                dims.append(())
            else:
                position = i if has_dim or i < dim else i + 1
                dims.append(make.add(f"d{position}", n))
        return tuple(dims)

    unbinding = call.op.split(".")[1] == "unbind"
    operands: list[Labels | None] = [labels(s, not inside) for s in call.shapes]
    results: list[Labels | None] = [labels(t.shape, not unbinding) if t is not None else None for t in call.results]
    linear = [set(range(len(operands)))] if all_float(call) else []
    return make.rule(operands, results, linear)
