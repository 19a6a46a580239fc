"""Grouped products: every row times the matrix of the group that it belongs to (the experts of a mixture).

    y[r] = x[r] @ w[group[r]]          t k, e k n, t -> t n

Which group a row belongs to is data, so an op that takes rows sorted by group would tie all rows together. This one takes
them in any order: rows shard as those of a linear layer do, and so do groups (expert parallelism; a rank has zeros for rows
of groups that it lacks) and both dims of the matrices. `aten._grouped_mm`, whose rows are sorted, becomes this op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import CaptureError
from autopar.ir.call import OpCall
from autopar.ir.rule import Rule
from autopar.ops.contraction import contract
from autopar.ops.dialect import differentiable, graph_op, lifts, shapes
from autopar.ops.labels import Maker
from autopar.ops.registry import Gemm, define
from autopar.runtime.kernels import grouped as local

Tensor = torch.Tensor
aten = torch.ops.aten
STACKED = "autopar.stacked"
"""The op that makes one tensor of the matrices of groups that are parameters of their own. Where it reads such as they rest, they
rest one after another, and nothing is copied (`StoredParameter.room`)."""

define("aten._grouped_mm", precision="low", low_operands=2)


def _work(call: OpCall, rule: Rule) -> Gemm:
    """2 · rows · k · n, whatever the number of groups."""
    rows, k = math.prod(call.shapes[0][:-1]), call.shapes[0][-1]
    return 2.0 * rows * k * call.shapes[1][-1], "matmul", ()


def _dims(call: OpCall, parts: Mapping[str, int], share: int) -> tuple[int, ...]:
    """Rows of one group, n and k: every group's rows are a product of their own."""
    rows, k, n = math.prod(call.shapes[2]), call.shapes[0][-1], call.shapes[1][-1]
    groups = call["groups"] if call.op.startswith("autopar.grouped_mm_dw") else call.shapes[1][0]
    of_groups, of_k, of_n = (parts.get(factor, 1) for factor in "ekn")  # a dim of size one is no factor
    of_rows = share // (of_groups * of_k * of_n)
    return max(rows // (groups * of_rows), 1), n // of_n, k // of_k


@graph_op(
    "grouped_mm(Tensor x, Tensor w, Tensor group) -> Tensor",
    local.grouped_mm,
    lambda x, w, group: x.new_empty([*x.shape[:-1], w.shape[2]]),
    work=_work,
    dims=_dims,
    localize=lambda block: {"first": block.offset("e")},
    linear=lambda call: [{0}, {1}],
    precision="low",
    low_operands=2,
)
def grouped_mm(call: OpCall) -> Rule:
    """Sharded groups leave a partial sum (zero rows elsewhere), and so does k; rows and n pass."""
    make = Maker()
    lead = make.dims(call.shapes[2], "t")
    e, k, n = (make.add(name, size) for name, size in zip("ekn", call.shapes[1], strict=True))
    return make.rule([(*lead, k), (e, k, n), lead], [(*lead, n)])


@graph_op(
    "grouped_mm_dw(Tensor x, Tensor g, Tensor group, SymInt groups) -> Tensor",
    local.grouped_mm_dw,
    lambda x, g, group, groups: x.new_empty([groups, x.shape[-1], g.shape[-1]]),
    work=_work,
    dims=_dims,
    localize=lambda block: {"groups": block.result_shape()[0], "first": block.offset("e")},
    globalize=lambda call: {"groups": call.out_shape[0]},
    linear=lambda call: [{0}, {1}],
    fresh=True,
)
def grouped_mm_dw(call: OpCall) -> Rule:
    """Sums over rows; each block of groups takes its own rows."""
    make = Maker()
    lead = make.dims(call.shapes[2], "t")
    e, k, n = (make.add(name, size) for name, size in zip("ekn", call.out_shape, strict=True))
    return make.rule([(*lead, k), (*lead, n), lead], [(e, k, n)])


def _mm_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w, group = ctx.saved_tensors
    dx = grouped_mm(g, w.transpose(1, 2), group) if ctx.needs_input_grad[0] else None
    return dx, (grouped_mm_dw(x, g, group, w.shape[0]) if ctx.needs_input_grad[1] else None), None


def _dw_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """g: (groups, k, n)."""
    x, y, group = ctx.saved_tensors
    dx = grouped_mm(y, g.transpose(1, 2), group) if ctx.needs_input_grad[0] else None
    return dx, (grouped_mm(x, g, group) if ctx.needs_input_grad[1] else None), None, None


differentiable(grouped_mm, _mm_backward)
differentiable(grouped_mm_dw, _dw_backward)


@graph_op(
    f"{STACKED.removeprefix('autopar.')}(Tensor[] parts) -> Tensor",
    torch.stack,
    lambda parts: parts[0].new_empty([len(parts), *parts[0].shape]),
    carries=True,
    free=True,
    finite=lambda call: True,
    precision="follow",
)
def stacked(call: OpCall) -> Rule:
    """Groups stay whole, all other dims pass."""
    make, parts = Maker(), len(call.shapes)
    dims = make.dims(call.shapes[0])
    return make.rule([dims] * parts, [((), *dims)], [set(range(parts))])


differentiable(stacked, lambda ctx, g: [g.select(0, i) for i in range(g.shape[0])], lambda ctx, inputs, output: None)


def group_of_row(ends: Tensor, rows: int) -> Tensor:
    """(rows,): into which group each falls, where groups end at `ends`; len(ends) for those after the last."""
    return torch.searchsorted(ends.long(), torch.arange(rows, device=ends.device), right=True)


@lifts(aten._grouped_mm.default)
def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """offs: the ends of groups in the dim that both have ragged: rows of a, columns of b, or what is contracted."""
    if bias is not None:
        raise CaptureError("grouped_mm with a bias is not supported; add bias[group of the row] to its result")
    if offs is None:
        y = contract("exk,eky->exy", a, b)
    elif a.ndim == 2 and b.ndim == 3:
        y = grouped_mm(a, b, group_of_row(offs, a.shape[0]))
    elif a.ndim == 3 and b.ndim == 2:
        y = grouped_mm(b.t(), a.transpose(1, 2), group_of_row(offs, b.shape[1])).t()
    else:
        y = grouped_mm_dw(a.t(), b, group_of_row(offs, b.shape[0]), offs.shape[0])
    return y if out_dtype is None else y.to(out_dtype)


def grouped_by_loops(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`aten._grouped_mm` as it is defined, in any dtype: what its kernels are held to where they take a dtype."""
    if offs is None:
        return torch.bmm(a, b)
    ends = [0, *offs.tolist()]
    spans = [slice(start, end) for start, end in itertools.pairwise(ends)]
    if a.ndim == 2 and b.ndim == 3:
        y = a.new_zeros(a.shape[0], b.shape[2])
        for i, rows in enumerate(spans):
            y[rows] = a[rows] @ b[i]
    elif a.ndim == 3:
        y = a.new_zeros(a.shape[1], b.shape[1])
        for i, columns in enumerate(spans):
            y[:, columns] = a[i] @ b[:, columns]
    else:
        y = torch.stack([a[:, inner] @ b[inner] for inner in spans])
    return y


@shapes(aten._grouped_mm.default)
def _grouped_shape(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """An empty result for fake arguments of any dtype; torch's own shape function takes bfloat16 alone."""
    groups = [offs.shape[0]] if offs is not None and a.ndim == b.ndim == 2 else [a.shape[0]] if offs is None else []
    return a.new_empty([*groups, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)
