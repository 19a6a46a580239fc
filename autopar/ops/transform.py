"""Transforms and small linear algebra: Fourier, complex views, distances, triangular solves."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops.dialect import empty_like, graph_op, lifts
from autopar.ops.labels import Maker, all_float, leading, reduced_dims
from autopar.ops.registry import define, named, register
from autopar.runtime.kernels import ops as local

Tensor = torch.Tensor
aten = torch.ops.aten


@register("aten._fft_r2c", "aten._fft_c2c", "aten._fft_c2r", linear=lambda call: [{0}])
def fourier(call: OpCall) -> Rule:
    """Transformed dims stay whole (and may change size), the others pass."""
    make = Maker()
    along = reduced_dims(call)
    labels: Labels = tuple(() if i in along else make.add(f"d{i}", n) for i, n in enumerate(call.shapes[0]))
    return make.rule([labels], [labels])


@register("aten.view_as_real", "aten.view_as_complex", free=True, linear=lambda call: [{0}])
def complex_view(call: OpCall) -> Rule:
    """A last dim of two numbers is or was a complex one."""
    return leading(call, min(len(call.shapes[0]), len(call.out_shapes[0] or ())))


@register("aten._euclidean_dist", "aten._cdist_forward")
def distances(call: OpCall) -> Rule:
    """(..., p, d) against (..., r, d): rows of both pass, the feature dim stays whole."""
    make = Maker()
    a, b = call.shapes[0], call.shapes[1]
    lead: Labels = tuple(make.add(f"b{i}", n) for i, n in enumerate(a[:-2])) if a[:-2] == b[:-2] else ()
    p, r = make.add("p", a[-2]), make.add("r", b[-2])
    if a[:-2] != b[:-2]:
        return leading(call, 0)
    return make.rule([(*lead, p, ()), (*lead, r, ())], [(*lead, p, r)])


@lifts(aten.cdist.default)
def cdist(a: Tensor, b: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Every batch has points of its own on both sides, also where one side has the same ones in all."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return aten.cdist.default(a.expand(*lead, -1, -1), b.expand(*lead, -1, -1), p, compute_mode)


@register("aten._cdist_backward")
def distances_backward(call: OpCall) -> Rule:
    """Gradient of the first: each of its elements sums over the rows of the second, and looks at that element of them alone."""
    make = Maker()
    a, b = call.operand("x1").shape, call.operand("x2").shape
    if a[:-2] != b[:-2]:
        return leading(call, 0)
    lead: Labels = tuple(make.add(f"b{i}", n) for i, n in enumerate(a[:-2]))
    p, r, d = make.add("p", a[-2]), make.add("r", b[-2]), make.add("d", a[-1])
    pairs = (*lead, p, r)
    return make.rule([pairs, (*lead, p, d), (*lead, r, d), pairs], [(*lead, p, d)])


define("aten.linalg_cross", linear=lambda call: [{0}, {1}])
define("aten._trilinear", linear=lambda call: [{0}, {1}, {2}])
define("aten.cholesky_solve", linear=lambda call: [{0}])
define(*named("linalg_lu_solve ormqr"), linear=lambda call: [{2}])


@register("aten.linalg_solve_triangular")
def solve_triangular(call: OpCall) -> Rule:
    """Batch dims pass; so do right-hand sides (columns of B, or rows when X A = B)."""
    make = Maker()
    a, b = call.shapes
    if a[:-2] != b[:-2]:
        return leading(call, 0)
    lead: Labels = tuple(make.add(f"b{i}", n) for i, n in enumerate(a[:-2]))
    side = make.add("r", b[-1] if call["left"] else b[-2])
    right: Labels = (*lead, (), side) if call["left"] else (*lead, side, ())
    return make.rule([(*lead, (), ()), right], [right], [{1}] if all_float(call) else [])


@register(
    *named("_linalg_solve_ex linalg_inv_ex linalg_cholesky_ex cholesky_solve cholesky_inverse linalg_lu_factor_ex"),
    *named("linalg_lu_solve linalg_qr _linalg_eigh _linalg_svd _linalg_det _linalg_slogdet linalg_matrix_exp"),
)
def of_matrices(call: OpCall) -> Rule:
    """Batch dims of matrices pass where all operands have them; the matrices stay whole."""
    first = call.shapes[0]
    lead = first[:-2]
    alike = all(t is not None and t.shape[: len(lead)] == lead for t in (*call.operands, *call.results))
    of_lists = first[:-1] if call.op.startswith("aten._linalg_solve") else None  # on the right, one for each matrix
    matrices = (t.shape for t in call.operands if t.is_float)  # pivots are lists
    batched = all(len(s) == len(first) or s == of_lists for s in matrices)
    return leading(call, len(lead) if alike and batched else 0)


@graph_op(
    "matrix_exp_grad(Tensor x, Tensor g) -> Tensor",
    local.matrix_exp_grad,
    empty_like,
    linear=lambda call: [{1}],
    dear=True,
)
def matrix_exp_grad(call: OpCall) -> Rule:
    """Batch dims of matrices pass; in the gradient that comes in it is linear, which nobody sees in an exponential of both."""
    return leading(call, len(call.shapes[0]) - 2)


class MatrixExponential(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return aten.linalg_matrix_exp.default(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return matrix_exp_grad(*ctx.saved_tensors, g)


@lifts(aten.linalg_matrix_exp.default, aten.matrix_exp.default)
def matrix_exp(x: Tensor) -> Tensor:
    """The exponential of square matrices."""
    return MatrixExponential.apply(x)
