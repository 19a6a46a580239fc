"""autopar's own graph ops, registered with torch.library so that make_fx can trace them.

The stock backward of some ops shreds them into flattening views (linear) or device kernels (attention). These stay
whole: each raw op below is one graph node, with a shape function for tracing, and the runtime's function as its
implementation. The differentiable wrappers that emit them are in `autopar.ops.wrappers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.runtime import attention as _attention
from autopar.runtime import ops as _ops
from autopar.runtime import rnn as _rnn

Tensor = torch.Tensor
_LIBRARY = torch.library.Library("autopar", "DEF")
_CONV = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
_ATTN = "float p, bool causal, float scale, int site"


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.autopar, name).default


def _like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _einsum_shape(equation: str, a: Tensor, b: Tensor) -> Tensor:
    left, out = equation.split("->")
    sizes = {c: n for term, t in zip(left.split(","), (a, b), strict=True) for c, n in zip(term, t.shape, strict=True)}
    return a.new_empty([sizes[c] for c in out])


def _lead_ones(x: Tensor, ndim: int) -> Tensor:
    return x.new_empty([*x.shape[: x.ndim - ndim], *([1] * ndim)])


def _drop_dim(x: Tensor, dim: int) -> Tensor:
    return x.new_empty([n for i, n in enumerate(x.shape) if i != dim])


linear = _define(
    "linear(Tensor x, Tensor w) -> Tensor",
    lambda x, w: _ops.linear(x, w),
    lambda x, w: x.new_empty([*x.shape[:-1], w.shape[0]]),
)
linear_dx = _define(
    "linear_dx(Tensor g, Tensor w) -> Tensor", _ops.linear_dx, lambda g, w: g.new_empty([*g.shape[:-1], w.shape[1]])
)
linear_dw = _define(
    "linear_dw(Tensor g, Tensor x) -> Tensor", _ops.linear_dw, lambda g, x: g.new_empty([g.shape[-1], x.shape[-1]])
)
einsum = _define("einsum(str equation, Tensor a, Tensor b) -> Tensor", _ops.einsum, _einsum_shape)

rms_norm = _define(
    "rms_norm(Tensor x, Tensor? w, float eps, int ndim) -> (Tensor, Tensor)",
    _ops.rms_norm,
    lambda x, w, eps, ndim: (_like(x), _lead_ones(x, ndim)),
)
rms_norm_dx = _define(
    "rms_norm_dx(Tensor g, Tensor x, Tensor rstd, Tensor? w, int ndim) -> Tensor",
    _ops.rms_norm_dx,
    lambda g, x, rstd, w, ndim: _like(x),
)
norm_dw = _define(
    "norm_dw(Tensor g, Tensor x, Tensor? mean, Tensor rstd, int ndim) -> Tensor",
    _ops.norm_dw,
    lambda g, x, mean, rstd, ndim: x.new_empty(x.shape[x.ndim - ndim :]),
)
layer_norm = _define(
    "layer_norm(Tensor x, Tensor? w, Tensor? b, float eps, int ndim) -> (Tensor, Tensor, Tensor)",
    _ops.layer_norm,
    lambda x, w, b, eps, ndim: (_like(x), _lead_ones(x, ndim), _lead_ones(x, ndim)),
)
layer_norm_dx = _define(
    "layer_norm_dx(Tensor g, Tensor x, Tensor mean, Tensor rstd, Tensor? w, int ndim) -> Tensor",
    _ops.layer_norm_dx,
    lambda g, x, mean, rstd, w, ndim: _like(x),
)

sumexp = _define("sumexp(Tensor x, Tensor m, int dim) -> Tensor", _ops.sumexp, lambda x, m, dim: _like(m))
pick = _define("pick(Tensor x, Tensor index, int dim) -> Tensor", _ops.pick, lambda x, index, dim: _drop_dim(x, dim))
pick_grad = _define(
    "pick_grad(Tensor g, Tensor index, int dim, SymInt size) -> Tensor",
    _ops.pick_grad,
    lambda g, index, dim, size: g.new_empty([*g.shape[:dim], size, *g.shape[dim:]]),
)
cross_entropy_grad = _define(
    "cross_entropy_grad(Tensor x, Tensor lse, Tensor index, Tensor g, int dim) -> Tensor",
    _ops.cross_entropy_grad,
    _like,
)

embedding = _define(
    "embedding(Tensor w, Tensor index) -> Tensor",
    _ops.embedding,
    lambda w, index: w.new_empty([*index.shape, w.shape[1]]),
)
embedding_grad = _define(
    "embedding_grad(Tensor g, Tensor index, SymInt rows, int padding) -> Tensor",
    _ops.embedding_grad,
    lambda g, index, rows, padding: g.new_empty([rows, g.shape[-1]]),
)

dropout = _define("dropout(Tensor x, float p, int site) -> Tensor", _ops.dropout, _like)
random_uniform = _define(
    "random_uniform(SymInt[] size, ScalarType dtype, int site) -> Tensor",
    _ops.random_uniform,
    lambda size, dtype, site: torch.empty(size, dtype=dtype),
)
random_normal = _define(
    "random_normal(SymInt[] size, ScalarType dtype, int site) -> Tensor",
    _ops.random_normal,
    lambda size, dtype, site: torch.empty(size, dtype=dtype),
)

conv = _define(
    f"conv(Tensor x, Tensor w, Tensor? b, {_CONV}) -> Tensor",
    _ops.conv,
    lambda *a: torch.ops.aten.convolution.default(*a),
)
conv_dx = _define(
    f"conv_dx(Tensor g, Tensor w, SymInt[] x_shape, {_CONV}) -> Tensor",
    _ops.conv_dx,
    lambda g, w, x_shape, *a: g.new_empty(x_shape),
)
conv_dw = _define(
    f"conv_dw(Tensor g, Tensor x, SymInt[] w_shape, {_CONV}) -> Tensor",
    _ops.conv_dw,
    lambda g, x, w_shape, *a: g.new_empty(w_shape),
)


def _attention_impl(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float, site: int
) -> tuple[Tensor, Tensor]:
    return _attention.attention(q, k, v, mask, p, causal, scale, key=site)


def _grad_impl(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda g, q, k, v, mask, out, lse, p, causal, scale, site: f(
        g, q, k, v, mask, out, lse, p, causal, scale, key=site
    )


def _attention_shape(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty([*q.shape[:3], v.shape[3]]), q.new_empty(q.shape[:3], dtype=_attention.softmax_dtype(q))


attention = _define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? mask, {_ATTN}) -> (Tensor, Tensor)",
    _attention_impl,
    _attention_shape,
)
_GRAD = f"(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, {_ATTN})"
attention_grad = _define(
    f"attention_grad{_GRAD} -> (Tensor, Tensor, Tensor)",
    _grad_impl(_attention.attention_grad),
    lambda g, q, k, v, *a: (_like(q), _like(k), _like(v)),
)
attention_mask_grad = _define(
    f"attention_mask_grad{_GRAD} -> Tensor",
    _grad_impl(_attention.attention_mask_grad),
    lambda g, q, k, v, *a: q.new_empty([*q.shape[:3], k.shape[2]], dtype=_attention.softmax_dtype(q)),
)

_RNN = "str mode, Tensor x, Tensor h0, Tensor? c0, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh"


def _rnn_shape(
    mode: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty([*x.shape[:2], h0.shape[-1]]), _like(h0), _like(h0)


def _rnn_grad_shape(
    mode: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    *_: Tensor,
) -> tuple[Tensor, ...]:
    bias = w_ih.new_empty([w_ih.shape[0]])
    return _like(x), _like(h0), _like(h0), _like(w_ih), _like(w_hh), bias, torch.empty_like(bias)


rnn = _define(f"rnn({_RNN}) -> (Tensor, Tensor, Tensor)", _rnn.rnn, _rnn_shape)
rnn_grad = _define(
    f"rnn_grad({_RNN}, Tensor g_out, Tensor g_h, Tensor g_c) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rnn.rnn_grad,
    _rnn_grad_shape,
)
