"""Differentiable forms of the dialect: autograd Functions whose forward and backward are dialect ops.

They exist only while a template is traced: make_fx records the raw ops of forward and backward, the Function itself
leaves no trace. Backward computes only the gradients that somebody asks for, so input gradients (B) and weight
gradients (W) are separate nodes that schedules may move apart.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.autograd import Function

from autopar.ops import dialect as d

Tensor = torch.Tensor
_sites = itertools.count()


def reset_sites() -> None:
    """Start numbering random sites anew (once per template, so that equal templates trace equal graphs)."""
    global _sites
    _sites = itertools.count()


def next_site() -> int:
    """A number for one random op of the template being traced."""
    return next(_sites)


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return d.linear(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need = ctx.needs_input_grad
        return (d.linear_dx(g, w) if need[0] else None), (d.linear_dw(g, x) if need[1] else None)


class Einsum(Function):
    """Two operands, every label once per operand and present in the result or the other operand."""

    @staticmethod
    def forward(ctx: Any, equation: str, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.equation = equation
        return d.einsum(equation, a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        left, out = ctx.equation.split("->")
        la, lb = left.split(",")
        da = d.einsum(f"{out},{lb}->{la}", g, b) if ctx.needs_input_grad[1] else None
        db = d.einsum(f"{out},{la}->{lb}", g, a) if ctx.needs_input_grad[2] else None
        return None, da, db


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, eps: float, ndim: int) -> Tensor:
        y, rstd = d.rms_norm(x, w, eps, ndim)
        ctx.save_for_backward(x, w, rstd)
        ctx.ndim = ndim
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, rstd = ctx.saved_tensors
        dx = d.rms_norm_dx(g, x, rstd, w, ctx.ndim) if ctx.needs_input_grad[0] else None
        dw = d.norm_dw(g, x, None, rstd, ctx.ndim) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, ndim: int) -> Tensor:
        y, mean, rstd = d.layer_norm(x, w, b, eps, ndim)
        ctx.save_for_backward(x, w, mean, rstd)
        ctx.ndim = ndim
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, mean, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad
        lead = list(range(x.ndim - ctx.ndim))
        dx = d.layer_norm_dx(g, x, mean, rstd, w, ctx.ndim) if need[0] else None
        dw = d.norm_dw(g, x, mean, rstd, ctx.ndim) if need[1] else None
        db = (g.sum(lead) if lead else g) if need[2] else None
        return dx, dw, db, None, None


class CrossEntropy(Function):
    """-log softmax(x)[index] per row, the class dim `dim` of x possibly sharded: three small reductions, no gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int) -> Tensor:
        top = x.amax(dim)
        lse = d.sumexp(x, top, dim).log() + top
        ctx.save_for_backward(x, lse, index)
        ctx.dim = dim
        return lse - d.pick(x, index, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, lse, index = ctx.saved_tensors
        return d.cross_entropy_grad(x, lse, index, g, ctx.dim), None, None


class Pick(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.size = dim, x.shape[dim]
        return d.pick(x, index, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return d.pick_grad(g, index, ctx.dim, ctx.size), None, None


class Embedding(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, index: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.padding = w.shape[0], padding
        return d.embedding(w, index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return d.embedding_grad(g, index, ctx.rows, ctx.padding), None, None


class Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, site: int) -> Tensor:
        ctx.p, ctx.site = p, site
        return d.dropout(x, p, site)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return d.dropout(g, ctx.p, ctx.site), None, None


class Conv(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, *config: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.config = config
        return d.conv(x, w, b, *config)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need, config = ctx.needs_input_grad, ctx.config
        dx = d.conv_dx(g, w, list(x.shape), *config) if need[0] else None
        dw = d.conv_dw(g, x, list(w.shape), *config) if need[1] else None
        db = g.sum([0, *range(2, g.ndim)]) if need[2] else None
        return dx, dw, db, *(None for _ in config)


class Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float, site: int
    ) -> Tensor:
        out, lse = d.attention(q, k, v, mask, p, causal, scale, site)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.config = (p, causal, scale, site)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        dq, dk, dv = d.attention_grad(g, q, k, v, mask, out, lse, *ctx.config)
        dmask = None
        if ctx.needs_input_grad[3]:
            dmask = d.attention_mask_grad(g, q, k, v, mask, out, lse, *ctx.config).sum_to_size(mask.shape)
        return dq, dk, dv, dmask, None, None, None, None


class RNN(Function):
    """One layer, one direction; x is (time, batch, input)."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: str,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, h0, c0, w_ih, w_hh, b_ih, b_hh)
        ctx.mode = mode
        out, h, c = d.rnn(mode, x, h0, c0, w_ih, w_hh, b_ih, b_hh)
        return out, h, c

    @staticmethod
    def backward(ctx: Any, g_out: Tensor, g_h: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = d.rnn_grad(ctx.mode, *saved, g_out, g_h, g_c)
        return None, *(g if t is not None else None for g, t in zip(grads, saved, strict=True))
