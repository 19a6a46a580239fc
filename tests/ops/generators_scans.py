"""Random small calls of scans, and of the ways back of scans and selections."""

from __future__ import annotations

import torch

from autopar.ops import scan, selection
from tests.ops.execution import Case
from tests.ops.generators import Draw, call, makes


@makes("autopar.cumsum_back")
def _cumsum_back(draw: Draw, _: str) -> Case:
    x = draw.f(*draw.shape())
    return call(scan.cumsum_back, x, draw.pick(*range(x.ndim)))


@makes("autopar.cumextreme_back")
def _cumextreme_back(draw: Draw, _: str) -> Case:
    x = draw.f(*draw.shape())
    dim = draw.pick(*range(x.ndim))
    _, indices = draw.pick(torch.cummax, torch.cummin)(x, dim)
    return call(scan.cumextreme_back, draw.f(*x.shape), indices, dim)


@makes("autopar.linear_scan", "autopar.linear_scan_back")
def _linear_scan(draw: Draw, name: str) -> Case:
    shape = draw.shape(1, 4)
    dim = draw.pick(*range(len(shape)))
    fewer = [n if i == dim else draw.pick(n, n, 1) for i, n in enumerate(shape)]
    a, b = (draw.c(*fewer), draw.c(*shape)) if draw.pick(False, False, True) else (draw.f(*fewer), draw.f(*shape))
    if name.endswith("scan"):
        return call(scan.linear_scan_op, a, b, dim)
    h = scan.linear_scan_op(a, b, dim)
    return call(scan.linear_scan_back, a, h, torch.randn_like(b), dim, draw.pick(0.0, 1.0))


@makes("autopar.put")
def _put(draw: Draw, _: str) -> Case:
    shape = draw.shape()
    dim, size = draw.pick(*range(len(shape))), draw.size()
    shape[dim] = draw.pick(1, size)
    index = draw.f(*[size if i == dim else n for i, n in enumerate(shape)]).argsort(dim).narrow(dim, 0, shape[dim])
    return call(selection.put, draw.f(*shape), index, dim, size)
