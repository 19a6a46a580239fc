"""Products: linear layers, matrix products, einsums.

A linear layer and each of its two gradients is one op. Every other product becomes a two-operand einsum whose gradients
are einsums again. The rule of an einsum is its equation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from autopar.ir.call import OpCall
from autopar.ir.rule import Rule, parse_rule
from autopar.ops.dialect import empty_like, graph_op, lifts
from autopar.ops.labels import Maker
from autopar.ops.registry import Gemm, define, named, register
from autopar.runtime.kernels import ops as local

Tensor = torch.Tensor
aten = torch.ops.aten
_LEAD = ("b", "s", "t", "u", "v", "x")

define(
    *named("linear matmul mm bmm addmm baddbmm addbmm mv addmv einsum tensordot bilinear outer inner"), precision="low"
)


def _gemm(call: OpCall, rule: Rule) -> Gemm:
    """FLOPs = 2 · product of all factors; m, n, k: result factors of the first, of the second operand, contracted."""
    first, second = ({f for dim in labels or () for f in dim} for labels in rule.operands[:2])
    out = {f for dim in rule.results[0] or () for f in dim}
    m = tuple(f for f in rule.factors if f in first and f in out)
    n = tuple(f for f in rule.factors if f in second and f in out and f not in first)
    k = tuple(f for f in rule.factors if f in first and f in second and f not in out)
    return 2.0 * math.prod(f.size for f in rule.factors.values()), "matmul", (m, n, k)


def _lead(call: OpCall, operand: int = 0) -> str:
    return " ".join(_LEAD[: len(call.shapes[operand]) - 1])


@graph_op(
    "linear(Tensor x, Tensor w) -> Tensor",
    lambda x, w: local.linear(x, w),
    lambda x, w: x.new_empty([*x.shape[:-1], w.shape[0]]),
    work=_gemm,
    of_weights="rows",
)
def linear(call: OpCall) -> Rule:
    """Column parallel: shard o. Row parallel: shard i, the result is a partial sum."""
    lead = _lead(call)
    return parse_rule(f"{lead} i, o i -> {lead} o", call.shapes, call.out_shapes)


@graph_op(
    "linear_dx(Tensor g, Tensor w) -> Tensor",
    local.linear_dx,
    lambda g, w: g.new_empty([*g.shape[:-1], w.shape[1]]),
    work=_gemm,
    of_weights="rows",
)
def linear_dx(call: OpCall) -> Rule:
    """Contracts the output features."""
    lead = _lead(call)
    return parse_rule(f"{lead} o, o i -> {lead} i", call.shapes, call.out_shapes)


@graph_op(
    "linear_dw(Tensor g, Tensor x) -> Tensor",
    local.linear_dw,
    lambda g, x: g.new_empty([g.shape[-1], x.shape[-1]]),
    work=_gemm,
    of_weights="cast",
    fresh=True,
)
def linear_dw(call: OpCall) -> Rule:
    """Contracts every batch dim: a sharded batch leaves a partial sum of gradients."""
    lead = _lead(call)
    return parse_rule(f"{lead} o, {lead} i -> o i", call.shapes, call.out_shapes)


@graph_op("contiguous_batch(Tensor x) -> Tensor", local.contiguous_batch, empty_like, precision="pass")
def contiguous_batch(call: OpCall) -> Rule:
    """A copy whose matrices lie one after another; every dim shards."""
    make = Maker()
    labels = make.dims(call.shapes[0])
    return make.rule([labels], [labels], [{0}])


def _for_two(equation: str, x: Tensor) -> Tensor:
    """An operand of two products of batches, copied for both where each would make a copy of its own."""
    batch = [(n, stride) for n, stride in zip(x.shape[:-2], x.stride(), strict=False) if n > 1]
    one_after_another = all(outer == n * inner for (_, outer), (n, inner) in itertools.pairwise(batch))
    return x if one_after_another or not local.is_batched_product(equation) else contiguous_batch(x)


def _einsum_shape(equation: str, a: Tensor, b: Tensor) -> Tensor:
    left, out = equation.split("->")
    sizes = {c: n for term, t in zip(left.split(","), (a, b), strict=True) for c, n in zip(term, t.shape, strict=True)}
    return a.new_empty([sizes[c] for c in out])


@graph_op("einsum(str equation, Tensor a, Tensor b) -> Tensor", local.einsum, _einsum_shape, work=_gemm)
def einsum(call: OpCall) -> Rule:
    """The equation is the rule."""
    left, out = call["equation"].split("->")
    terms = [" ".join(t) or "1" for t in (*left.split(","), out)]
    return parse_rule(f"{', '.join(terms[:-1])} -> {terms[-1]}", call.shapes, call.out_shapes)


@register("aten.mm", work=_gemm)
def mm(call: OpCall) -> Rule:
    """Matrix product."""
    return parse_rule("i k, k j -> i j", call.shapes, call.out_shapes)


@register("aten.bmm", work=_gemm)
def bmm(call: OpCall) -> Rule:
    """Batched matrix product."""
    return parse_rule("b i k, b k j -> b i j", call.shapes, call.out_shapes)


@register("aten.vdot", "aten.dot")
def dot(call: OpCall) -> Rule:
    """A sharded vector leaves a partial sum."""
    return parse_rule("k, k -> 1", call.shapes, call.out_shapes)


def conjugate(x: Tensor) -> Tensor:
    """The factor of a product's gradient: the other operand, conjugated where it is complex."""
    return torch.conj_physical(x) if x.is_complex() else x


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return linear(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need = ctx.needs_input_grad
        dx = linear_dx(g, conjugate(w)) if need[0] else None
        return dx, (linear_dw(g, conjugate(x)) if need[1] else None)


class Einsum(Function):
    """Two operands, every label once per operand and present in the result or the other operand."""

    @staticmethod
    def forward(ctx: Any, equation: str, a: Tensor, b: Tensor) -> Tensor:
        a = _for_two(equation, a) if ctx.needs_input_grad[2] else a
        b = _for_two(equation, b) if ctx.needs_input_grad[1] else b
        ctx.save_for_backward(a, b)
        ctx.equation = equation
        return einsum(equation, a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        left, out = ctx.equation.split("->")
        la, lb = left.split(",")
        g = _for_two(ctx.equation, g) if all(ctx.needs_input_grad[1:]) else g
        da = einsum(f"{out},{lb}->{la}", g, conjugate(b)) if ctx.needs_input_grad[1] else None
        db = einsum(f"{out},{la}->{lb}", g, conjugate(a)) if ctx.needs_input_grad[2] else None
        return None, da, db


# --- what ATen's products become


@lifts(aten.linear.default)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = Linear.apply(x, weight) if x.ndim > 1 else Linear.apply(x.unsqueeze(0), weight).squeeze(0)
    return y if bias is None else y + bias


def contract(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """A two-operand einsum as one node when its gradients are einsums too, else torch's own decomposition."""
    left, out = equation.split("->")
    la, lb = left.split(",")
    clean = len(set(la)) == len(la) and len(set(lb)) == len(lb) and len(set(out)) == len(out)
    sizes: dict[str, int] = {}
    for term, t in ((la, a), (lb, b)):
        for c, n in zip(term, t.shape, strict=True):
            clean &= sizes.setdefault(c, n) == n
    clean &= set(la) <= set(out) | set(lb) and set(lb) <= set(out) | set(la)
    return Einsum.apply(equation, a, b) if clean else torch.einsum(equation, a, b)


@lifts(aten.matmul.default)
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim == 1 or b.ndim == 1:
        x, y = (a.unsqueeze(0) if a.ndim == 1 else a), (b.unsqueeze(1) if b.ndim == 1 else b)
        z = _matmul(x, y)
        z = z.squeeze(-2) if a.ndim == 1 else z
        return z.squeeze(-1) if b.ndim == 1 else z
    letters = "abcdefghijlmnopqrstuvw"
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    names = letters[: len(batch)]
    a, a_names = _batch_term(a, batch, names)
    b, b_names = _batch_term(b, batch, names)
    return contract(f"{a_names}xk,{b_names}ky->{names}xy", a, b)


def _batch_term(x: Tensor, batch: torch.Size, names: str) -> tuple[Tensor, str]:
    """Drop leading dims of size one that broadcast; expand inner ones."""
    own = list(x.shape[:-2])
    while own and own[0] == 1 and (len(own) <= len(batch)) and batch[len(batch) - len(own)] != 1:
        x, own = x.squeeze(0), own[1:]
    skip = len(batch) - len(own)
    if own != list(batch[skip:]):
        x = x.expand(*batch[skip:], *x.shape[-2:])
    return x, names[skip:]


@lifts(aten.bmm.default)
def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return contract("bxk,bky->bxy", a, b)


@lifts(aten.mm.default)
def _mm(a: Tensor, b: Tensor) -> Tensor:
    return contract("xk,ky->xy", a, b)


@lifts(aten.addmm.default)
def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = contract("xk,ky->xy", a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else (c if beta == 1 else c * beta) + product


@lifts(aten.baddbmm.default)
def _baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = contract("bxk,bky->bxy", a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else (c if beta == 1 else c * beta) + product


@lifts(aten.mv.default)
def _mv(a: Tensor, b: Tensor) -> Tensor:
    return contract("xk,k->x", a, b)


@lifts(aten.dot.default)
def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


@lifts(aten.outer.default)
def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(1) * b.unsqueeze(0)


@lifts(aten.einsum.default)
def _einsum(equation: str, operands: Sequence[Tensor], *, path: Any = None) -> Tensor:
    equation = equation.replace(" ", "")
    if "..." not in equation and "->" not in equation:
        labels = equation.replace(",", "")
        equation += "->" + "".join(sorted(c for c in set(labels) if labels.count(c) == 1))
    if "..." in equation or len(operands) != 2:
        return torch.einsum(equation, *operands)
    return contract(equation, *operands)


define(
    *(f"autopar.{name}" for name in ("linear", "linear_dx", "linear_dw", "einsum")),
    *named("mm bmm dot mv"),
    linear=lambda call: [{0}, {1}],
)
