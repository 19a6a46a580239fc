"""Random small calls of views, joins, splits and paddings."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ops import order as order_ops
from tests.ops.execution import Case
from tests.ops.generators import Draw, aten, broadcast, call, makes, overload


@makes("aten.reshape")
def _reshape(draw: Draw, _: str) -> Case:
    shape = draw.shape(1, 4)
    x = draw.f(*shape)
    factors = [p for n in shape for p in {1: (), 2: (2,), 3: (3,), 4: (2, 2), 6: (2, 3), 12: (2, 2, 3)}[n]]
    factors = factors if draw.pick(True, False) else list(reversed(factors))
    after: list[int] = []
    for p in factors:
        if after and draw.pick(True, False):
            after[-1] *= p
        else:
            after.append(p)
    for _ in range(draw.pick(0, 1, 2)):
        after.insert(draw.pick(*range(len(after) + 1)), 1)
    return call(aten.reshape.default, draw.pick(x, x > 0), after)


@makes("autopar.reorder")
def _reorder(draw: Draw, _: str) -> Case:
    order, inner, size = draw.pick(1, 2, 3), draw.pick(1, 2), draw.pick(1, 2)
    size *= 2 * order
    lead, shape = draw.size(), draw.shape()
    at = draw.pick(*range(len(shape)))
    shape[at] = lead * size * inner
    return call(order_ops.reorder, draw.any(*shape), at, order, draw.pick(True, False), size, inner)


@makes("aten.permute")
def _permute(draw: Draw, _: str) -> Case:
    x = draw.any(*draw.shape(1, 4))
    return call(aten.permute.default, x, draw.order(x.ndim))


@makes("aten.expand")
def _expand(draw: Draw, _: str) -> Case:
    shape = draw.shape()
    x = draw.f(*broadcast(draw, shape))
    return call(aten.expand.default, x, shape)


@makes("aten.slice", "aten.slice_scatter")
def _slice(draw: Draw, name: str) -> Case:
    x = draw.any(*draw.shape())
    dim = draw.dim(x.ndim)
    start, step = draw.pick(0, 1, -1), draw.pick(1, 2)
    stop = draw.pick(x.shape[dim], 2**63 - 1, max(x.shape[dim] - 1, 1))
    if name == "aten.slice":
        return call(aten.slice.Tensor, x, dim, start, stop, step)
    source = aten.slice.Tensor(x, dim, start, stop, step)
    return call(aten.slice_scatter.default, x, draw.f(*source.shape).to(x.dtype), dim, start, stop, step)


@makes("aten.slice_backward")
def _slice_backward(draw: Draw, _: str) -> Case:
    x = draw.f(*draw.shape())
    dim = draw.dim(x.ndim)
    run = draw.pick(
        (1, 9, 2), (0, x.shape[dim], 1), (0, max(x.shape[dim] // 2, 1), 1), (x.shape[dim] // 2, x.shape[dim], 1)
    )
    g = aten.slice.Tensor(x, dim, *run)
    return call(aten.slice_backward.default, g.clone(), list(x.shape), dim, *run)


@makes("aten.unfold")
def _unfold(draw: Draw, _: str) -> Case:
    x = draw.f(*draw.shape())
    dim = draw.dim(x.ndim)
    return call(aten.unfold.default, x, dim, min(2, x.shape[dim]), draw.pick(1, 2))


@makes("aten.unfold_backward")
def _unfold_backward(draw: Draw, _: str) -> Case:
    x = draw.f(*draw.shape())
    dim = draw.pick(*range(x.ndim))
    size, step = min(2, x.shape[dim]), draw.pick(1, 2)
    return call(aten.unfold_backward.default, draw.f(*x.unfold(dim, size, step).shape), list(x.shape), dim, size, step)


@makes("aten.repeat")
def _repeat(draw: Draw, _: str) -> Case:
    x = draw.any(*draw.shape(1, 3))
    return call(aten.repeat.default, x, [draw.pick(1, 2) for _ in range(x.ndim + draw.pick(0, 1))])


@makes("aten.select", "aten.select_backward", "aten.select_scatter")
def _select(draw: Draw, name: str) -> Case:
    x = draw.any(*draw.shape(1, 3)) if name == "aten.select" else draw.f(*draw.shape(1, 3))
    dim = draw.dim(x.ndim)
    index = draw.pick(0, -1)
    if name == "aten.select":
        return call(aten.select.int, x, dim, index)
    g = draw.f(*x.select(dim, index).shape)
    if name == "aten.select_scatter":
        return call(aten.select_scatter.default, x, g, dim, index)
    return call(aten.select_backward.default, g, list(x.shape), dim, index)


@makes("aten.diagonal_backward")
def _diagonal_backward(draw: Draw, name: str) -> Case:
    shape = draw.shape(2, 4)
    dim1 = draw.pick(*range(len(shape)))
    dim2 = draw.pick(*(d for d in range(-len(shape), 0) if d + len(shape) != dim1))
    offset = draw.pick(0, 0, 1, -1)
    g = draw.f(*torch.empty(shape).diagonal(offset, dim1, dim2).shape)
    return call(aten.diagonal_backward.default, g, list(shape), offset, dim1, dim2)


@makes("aten.cat", "aten.stack")
def _join(draw: Draw, name: str) -> Case:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    parts = []
    for _ in range(draw.pick(1, 2, 3)):
        own = list(shape)
        if name == "aten.cat":
            own[dim] = draw.size()
        parts.append(draw.f(*own) if draw.pick(True, True, False) else draw.i(5, *own))
    if name == "aten.cat" and draw.pick(True, False, False):
        parts.insert(draw.pick(0, len(parts)), draw.f(0))
    return call(overload(name), parts, dim)


@makes("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unbind")
def _split(draw: Draw, name: str) -> Case:
    x = draw.any(*draw.shape(1, 3))
    dim = draw.dim(x.ndim)
    n = x.shape[dim]
    if name == "aten.unbind":
        return call(aten.unbind.int, x, dim)
    size: Any = draw.pick(1, n, max(n // 2, 1))
    if name == "aten.split_with_sizes":
        size = [size, n - size] if n > size else [n]
    return call(overload(name, "Tensor"), x, size, dim)
