"""Scans: running sums, products, maxima, and the linear recurrences of state-space models.

    h[t] = a[t] · h[t-1] + b[t]          linear_scan(a, b, dim): elementwise over all other dims, from a state of zero

A loop over time is as many ops as there are steps; this is one, whose other dims shard, and whose scanned dim may be in
blocks (`autopar.runtime.kernels.scans`): one row of every block is sent. The way back of a scan is a scan from the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from autopar.errors import InputError
from autopar.ir.call import OpCall
from autopar.ir.rule import Labels, Rule
from autopar.ops.along_dim import carry, gathers
from autopar.ops.dialect import differentiable, empty_like, graph_op, lifts
from autopar.ops.labels import Maker, all_float, reduced_dims
from autopar.ops.registry import define, named, register
from autopar.runtime.kernels import scans as local

Tensor = torch.Tensor
aten = torch.ops.aten

for _name in ("cumsum", "cumprod", "logcumsumexp"):
    define(f"aten.{_name}", sends=gathers(rows=1))
for _name in ("cummax", "cummin"):
    define(f"aten.{_name}", sends=gathers(rows=1, places=1))
for _name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
    define(f"aten.{_name}", carrier=f"scans.{_name}", localize=lambda block: block.told())


@register(*named("cumsum cumprod cummax cummin logcumsumexp"))
def running(call: OpCall) -> Rule:
    """The dim that is scanned is carried, the others pass."""
    return _scanned(call, call.op.startswith("aten.cumsum") and all_float(call))


def _scanned(call: OpCall, linear: bool) -> Rule:
    """All operands and results have the dims of the first; linear: in that one."""
    make, gone = Maker(), set(reduced_dims(call))
    labels: Labels | None = make.dims(call.shapes[0], whole=gone)
    return make.rule(
        [labels for _ in call.operands], [labels for _ in call.results], [{0}] if linear else [], carry(gone)
    )


@graph_op(
    "cumsum_back(Tensor g, int dim) -> Tensor",
    local.cumsum_back,
    empty_like,
    home="scans",
    sends=gathers(rows=1),
    localize=lambda block: block.told(),
    fresh=True,
)
def cumsum_back(call: OpCall) -> Rule:
    """Sums to the end, which are carried."""
    return _scanned(call, linear=True)


@graph_op(
    "cumextreme_back(Tensor g, Tensor indices, int dim) -> Tensor",
    local.cumextreme_back,
    lambda g, indices, dim: empty_like(g),
    home="scans",
    sends=gathers(rows=1, places=1),
    localize=lambda block: block.told(),
    fresh=True,
)
def cumextreme_back(call: OpCall) -> Rule:
    """Gradients go to where maxima were found: in the block, or all at one place before it, which is carried."""
    return _scanned(call, linear=True)


class CumulativeSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return aten.cumsum.default(x, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return cumsum_back(g, ctx.dim), None


class CumulativeProduct(Function):
    """y[t] = x[t] · y[t-1] is a linear recurrence from a state of one; no division, so that zeros need no care."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        y = aten.cumprod.default(x, dim)
        ctx.save_for_backward(x, y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return linear_scan_back(*ctx.saved_tensors, g, ctx.dim, 1.0)[0], None


class CumulativeExtreme(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, op: Any) -> tuple[Tensor, Tensor]:
        values, indices = op(x, dim)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.dim = dim
        return values, indices

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return cumextreme_back(g, *ctx.saved_tensors, ctx.dim), None, None


def _has_gradient(x: Tensor) -> bool:
    """Whether there is a dim to scan and a gradient to find."""
    return x.ndim > 0 and x.numel() > 0 and (x.is_floating_point() or x.is_complex())


@lifts(aten.cumsum.default)
def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return CumulativeSum.apply(x, dim % x.ndim) if _has_gradient(x) else aten.cumsum.default(x, dim)


@lifts(aten.cumprod.default)
def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return CumulativeProduct.apply(x, dim % x.ndim) if _has_gradient(x) else aten.cumprod.default(x, dim)


def _lift_extreme(op: Any) -> None:
    def lift(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return CumulativeExtreme.apply(x, dim % x.ndim, op) if _has_gradient(x) else op(x, dim)

    lifts(op)(lift)


_lift_extreme(aten.cummax.default)
_lift_extreme(aten.cummin.default)


# --- linear recurrences


def _labels(make: Maker, call: OpCall) -> tuple[Labels, Labels]:
    """Labels of the dims of a, which may have size one, and of b."""
    states = make.dims(call.shapes[1], whole={int(call["dim"])})
    return tuple(() if n == 1 else label for n, label in zip(call.shapes[0], states, strict=True)), states


@graph_op(
    "linear_scan(Tensor a, Tensor b, int dim) -> Tensor",
    local.linear_scan,
    lambda a, b, dim: empty_like(b),
    home="scans",
    sends=gathers(rows=2, operand=1),
    localize=lambda block: block.told(),
    fresh=True,
)
def linear_scan_op(call: OpCall) -> Rule:
    """All but time passes; time is carried."""
    make = Maker()
    factors, states = _labels(make, call)
    return make.rule([factors, states], [states], [{1}], carry({int(call["dim"])}))


@graph_op(
    "linear_scan_back(Tensor a, Tensor h, Tensor g, int dim, float start=0.0) -> (Tensor, Tensor)",
    local.linear_scan_back,
    lambda a, h, g, dim, start=0.0: (empty_like(a), empty_like(g)),
    home="scans",
    sends=gathers(rows=3, operand=1),
    localize=lambda block: block.told(),
    result_names=("da", "db"),
    fresh=True,
)
def linear_scan_back(call: OpCall) -> Rule:
    """Dims that a lacks are summed; time is carried from the end."""
    make = Maker()
    factors, states = _labels(make, call)
    return make.rule([factors, states, states], [factors, states], [{2}], carry({int(call["dim"])}))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, ctx.dim = inputs
    ctx.save_for_backward(a, output)


def _back(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return *linear_scan_back(*ctx.saved_tensors, g, ctx.dim), None


differentiable(linear_scan_op, _back, _save)


def linear_scan(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """h[t] = a[t] · h[t-1] + b[t] along dim, from a state of zero, elementwise over all other dims.

    a is broadcast to b, without being copied except along dim. Of two dtypes the wider one is taken. Products of a over a
    span of steps must not overflow. Raises InputError where shapes do not fit.
    """
    fits = all(n in (1, m) for n, m in zip(reversed(a.shape), reversed(b.shape), strict=False))
    if a.ndim > b.ndim or not fits or not -b.ndim <= dim < b.ndim:
        raise InputError(f"linear_scan of {tuple(a.shape)} and {tuple(b.shape)} along {dim}: a must broadcast to b")
    dim, dtype = dim % b.ndim, torch.promote_types(a.dtype, b.dtype)
    a = a.reshape([1] * (b.ndim - a.ndim) + list(a.shape)).to(dtype)
    steps = [b.shape[i] if i == dim else n for i, n in enumerate(a.shape)]
    return linear_scan_op(a.expand(steps), b.to(dtype), dim)
