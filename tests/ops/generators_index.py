"""Random small calls of ops that read or write at indices: gather and scatter, look-ups, searches, masks."""

from __future__ import annotations

import torch

from tests.ops.execution import Case
from tests.ops.generators import Draw, aten, call, makes, overload


@makes("aten.gather", "aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def _along(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape(1, 3))
    dim = draw.dim(x.ndim)
    shape = [draw.size() if i == dim % x.ndim else draw.pick(n, n, max(n // 2, 1)) for i, n in enumerate(x.shape)]
    if name == "aten.gather":
        return call(aten.gather.default, x, dim, draw.i(x.shape[dim], *shape))
    if name in ("aten.scatter",):
        shape[dim] = draw.pick(1, x.shape[dim])
        index = torch.stack([torch.arange(shape[dim])] * (draw.i(9, *shape).numel() // shape[dim]), 0)
        rest = [n for i, n in enumerate(shape) if i != dim % x.ndim]
        index = index.reshape(*rest, shape[dim]).movedim(-1, dim).contiguous()
        if draw.pick(True, False):
            return call(aten.scatter.value, x, dim, index, 2.0)
        return call(aten.scatter.src, x, dim, index, draw.f(*shape))
    index, source = draw.i(x.shape[dim], *shape), draw.f(*shape)
    if name == "aten.scatter_add":
        return call(aten.scatter_add.default, x, dim, index, source)
    return call(
        aten.scatter_reduce.two,
        x,
        dim,
        index,
        source,
        draw.pick("sum", "amax", "mean", "prod"),
        include_self=draw.pick(True, False),
    )


@makes("aten.index_select", "aten.index_add", "aten.index_copy", "aten.index_fill")
def _index_along(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape(1, 3))
    dim = draw.dim(x.ndim)
    n = x.shape[dim]
    index = torch.randperm(n)[: draw.pick(1, n)] if name == "aten.index_copy" else draw.i(n, draw.size())
    if name == "aten.index_select":
        return call(aten.index_select.default, x, dim, index)
    if name == "aten.index_fill":
        return call(aten.index_fill.int_Scalar, x, dim, index, 1.5)
    source = draw.f(*(len(index) if i == dim % x.ndim else m for i, m in enumerate(x.shape)))
    return call(overload(name), x, dim, index, source)


@makes("aten.index", "aten._unsafe_index", "aten.index_put", "aten._unsafe_index_put")
def _index(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape(1, 3))
    shape = draw.shape(1, 2)
    if name == "aten.index" and draw.pick(False, False, True):
        return call(aten.index.Tensor, x, [draw.b(x.shape[0])])
    where = draw.dims(x.ndim)
    own = [[draw.pick(1, n) for n in shape] if len(where) > 1 else shape for _ in where]
    indices = [draw.i(x.shape[i], *s) for i, s in zip(where, own, strict=True)]
    entries = [indices[where.index(i)] if i in where else None for i in range(max(where) + 1)]
    if "put" not in name:
        return call(overload(name, "Tensor"), x, entries)
    values = draw.f(*aten.index.Tensor(x, entries).shape)
    values = draw.pick(values, values[:1], draw.f())
    return call(overload(name), x, entries, values, True)


@makes("aten.histc")
def _histc(draw: Draw, _: str) -> Case:
    return call(aten.histc.default, draw.f(*draw.shape(1, 2)), 5, *draw.pick((-1.0, 1.0), (0, 0)))


@makes("aten.isin")
def _isin(draw: Draw, _: str) -> Case:
    return call(
        aten.isin.Tensor_Tensor,
        draw.i(6, *draw.shape(0, 3)),
        draw.i(6, *draw.shape(0, 2)),
        invert=draw.pick(True, False),
    )


@makes("aten.bucketize", "aten.searchsorted")
def _search(draw: Draw, name: str) -> Case:
    lead, n, m = draw.shape(1, 2), draw.size(), draw.size()
    if name == "aten.bucketize":
        return call(aten.bucketize.Tensor, draw.f(*lead), draw.f(n).sort()[0])
    table = draw.f(*lead, n) if draw.pick(True, False) else draw.f(n)
    if draw.pick(True, False):
        return call(aten.searchsorted.Tensor, table.sort(-1)[0], draw.f(*lead, m))
    return call(aten.searchsorted.Tensor, table, draw.f(*lead, m), sorter=table.argsort(-1))


@makes("aten.masked_scatter", "aten.masked_scatter_backward")
def _masked(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape(1, 2))
    mask = draw.b(*x.shape)
    if name == "aten.masked_scatter":
        return call(aten.masked_scatter.default, x, mask, draw.f(*x.shape))
    return call(aten.masked_scatter_backward.default, x, mask, list(x.shape))
