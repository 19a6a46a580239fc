"""Views and what moves elements: reshapes, permutations, windows, stacks (slices, joins and splits are `pieces`).

Merged and split dims share factors: (b, s, h·d) to (b, s, h, d) is `b s (h d) -> b s h d`. A dim that is cut or grown
stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops.dialect import lifts
from autopar.ops.labels import Maker, all_float, broadcast_labels
from autopar.ops.registry import define, named, register, resized

Tensor = torch.Tensor
aten = torch.ops.aten
_VIEWS = (
    "view reshape permute transpose t numpy_T movedim expand squeeze unsqueeze flatten unflatten select slice narrow "
    "split split_with_sizes chunk unbind alias contiguous detach"
)

define(*named(_VIEWS), view=True, precision="follow")
define(
    *named(
        "_unsafe_view cat stack roll flip repeat repeat_interleave tile unfold expand_as view_as reshape_as slice_scatter "
        "select_scatter diagonal diag_embed lift_fresh_copy unsafe_split unsafe_chunk hstack vstack concat concatenate "
        "swapaxes pad constant_pad_nd"
    ),
    precision="follow",
)
define(*named("diagonal diag_embed as_strided rot90"), linear=lambda call: [{0}])
define("aten.diagonal_scatter", linear=lambda call: [{0, 1}])
define("aten.view.dtype", view=True, precision="follow")  # reads the bytes as another dtype: no regrouping
define("aten.broadcast_tensors", precision="pass")
define(
    *named("cat stack slice_backward select_backward diagonal_backward constant_pad_nd slice_scatter select_scatter"),
    carries=True,
)
define(*named("detach alias lift_fresh_copy contiguous lift_fresh lift resolve_conj resolve_neg"), canonical="copy")
define(
    *named("view _unsafe_view reshape squeeze unsqueeze flatten unflatten _reshape_alias view_as reshape_as"),
    canonical="regroup",
    pieces=True,
)


def _transposed(arguments: tuple[Any, ...], rank: int) -> list[int]:
    order = list(range(rank))
    i, j = (int(a) % rank for a in arguments[:2])
    order[i], order[j] = order[j], order[i]
    return order


def _moved(arguments: tuple[Any, ...], rank: int) -> list[int]:
    sources, places = ([int(d) % rank for d in dims] for dims in arguments[:2])
    rest = iter(d for d in range(rank) if d not in sources)
    return [sources[places.index(i)] if i in places else next(rest) for i in range(rank)]


define(*named("t numpy_T"), reorder=lambda _, rank: list(reversed(range(rank))))
define("aten.transpose", reorder=_transposed)
define("aten.permute", reorder=lambda arguments, rank: [int(d) % rank for d in arguments[0]])
define("aten.movedim", reorder=_moved)


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


@register("aten.reshape", free=True, **resized("shape"))
def reshape(call: OpCall) -> Rule:
    """Only the major factor of a merged or split dim can be sharded."""
    make = Maker()
    out = call.out_shape
    left, right = regroup(make, call.shapes[0], out)
    return make.rule([left], [right], [{0}] if all_float(call) else [])


@register("aten.permute", free=True)
def permute(call: OpCall) -> Rule:
    """Dims change places."""
    make = Maker()
    labels = make.dims(call.shapes[0])
    return make.rule([labels], [tuple(labels[int(d)] for d in call["dims"])], [{0}] if all_float(call) else [])


@register("aten.expand", free=True, **resized("size"))
def expand(call: OpCall) -> Rule:
    """A dim grown from size one is a factor of the result alone."""
    make = Maker()
    out = call.out_shape
    labels = make.dims(out)
    return make.rule([broadcast_labels(call.shapes[0], out, labels)], [labels], [{0}] if all_float(call) else [])


@register("aten.unfold")
def unfold(call: OpCall) -> Rule:
    """Windows along a dim, which stays whole; all others pass."""
    make, shape = Maker(), call.shapes[0]
    dim = int(call["dimension"]) % max(len(shape), 1)
    labels = make.dims(shape, whole={dim})
    result = tuple(() if i == dim else own for i, own in enumerate(labels))
    return make.rule([labels], [(*result, ())], [{0}] if all_float(call) else [])


@register("aten.unfold_backward", **resized("input_sizes"))
def unfold_backward(call: OpCall) -> Rule:
    """The dim of the windows comes back whole."""
    make, out = Maker(), call.out_shape
    dim = int(call["dim"]) % max(len(out), 1)
    labels = tuple(() if i == dim else make.add(f"d{i}", n) for i, n in enumerate(out))
    return make.rule([(*labels, ())], [labels], [{0}] if all_float(call) else [])


@register("aten.select")
def select(call: OpCall) -> Rule:
    """The selected dim stays whole and goes."""
    make = Maker()
    dim = int(call["dim"]) % len(call.shapes[0])
    labels = make.dims(call.shapes[0], whole={dim})
    return make.rule([labels], [tuple(d for i, d in enumerate(labels) if i != dim)], [{0}] if all_float(call) else [])


@register("aten.select_backward", **resized("input_sizes"))
def select_backward(call: OpCall) -> Rule:
    """The selected dim comes back whole."""
    make = Maker()
    out = call.out_shape
    dim = int(call["dim"]) % len(out)
    labels = tuple(() if i == dim else make.add(f"d{i}", n) for i, n in enumerate(out))
    return make.rule([tuple(d for i, d in enumerate(labels) if i != dim)], [labels], [{0}] if all_float(call) else [])


@register("aten.diagonal_backward", **resized("input_sizes"))
def diagonal_backward(call: OpCall) -> Rule:
    """The two dims of the diagonal, which is the gradient's last dim, come back whole."""
    make, out = Maker(), call.out_shape
    across = {int(call[name]) % len(out) for name in ("dim1", "dim2")}
    labels = make.dims(out, whole=across)
    rest = tuple(label for i, label in enumerate(labels) if i not in across)
    return make.rule([(*rest, ())], [labels], [{0}] if all_float(call) else [])


@register("aten.select_scatter")
def select_scatter(call: OpCall) -> Rule:
    """Writes a slice into a copy; the dim stays whole."""
    make = Maker()
    dim = int(call["dim"]) % len(call.shapes[0])
    labels = make.dims(call.shapes[0], whole={dim})
    return make.rule(
        [labels, tuple(d for i, d in enumerate(labels) if i != dim)], [labels], [{0, 1}] if all_float(call) else []
    )


@register(*named("stack unbind"))
def stack_or_unbind(call: OpCall) -> Rule:
    """The dim that comes or goes is that of the tensors' numbers, which stays whole; all others pass."""
    make, stacks = Maker(), call.op.startswith("aten.stack")
    several = call.out_shape if stacks else call.shapes[0]
    dim = int(call.get("dim", 0) or 0) % max(len(several), 1)
    own = tuple(make.add(f"d{i}", n) for i, n in enumerate(several) if i != dim)
    joined: Labels = (*own[:dim], (), *own[dim:])
    operands: list[Labels | None] = [own] * len(call.shapes) if stacks else [joined]
    results: list[Labels | None] = [joined] if stacks else [None if t is None else own for t in call.results]
    return make.rule(operands, results, [set(range(len(operands)))] if all_float(call) else [])


def _scatter(op: Any) -> None:
    """On pairs of real numbers where they are complex, for which torch has no gradient."""

    def scattered(x: Tensor, source: Tensor, dim: int = 0, *where: Any, **named_where: Any) -> Tensor:
        if not x.is_complex():
            return op(x, source, dim, *where, **named_where)
        pairs = [torch.view_as_real(t.resolve_conj()) for t in (x, source.to(x.dtype))]
        return torch.view_as_complex(op(*pairs, dim % x.ndim, *where, **named_where))

    lifts(op)(scattered)


_scatter(aten.slice_scatter.default)
_scatter(aten.select_scatter.default)


@lifts(aten.view.default, aten._unsafe_view.default)
def _view(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.reshape(shape)
