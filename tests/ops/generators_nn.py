"""Random small calls of the semantic ops: contractions, attention, norms, losses, images, transforms."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ops import (
    attention,
    batch_norm,
    contraction,
    embedding,
    grouped,
    integers,
    normalization,
    recurrence,
    transform,
)
from tests.ops.execution import Case
from tests.ops.generators import Draw, aten, call, makes, overload

# --- contractions -----------------------------------------------------------------------------------------------------


@makes("autopar.linear", "autopar.linear_dx", "autopar.linear_dw")
def _linear(draw: Draw, name: str) -> Case:
    lead, i, o = draw.shape(1, 3), draw.size(), draw.size()
    x, w, g = draw.f(*lead, i), draw.f(o, i), draw.f(*lead, o)
    if name == "autopar.linear":
        return call(contraction.linear, x, w)
    return call(contraction.linear_dx, g, w) if name.endswith("dx") else call(contraction.linear_dw, g, x)


@makes("autopar.einsum")
def _einsum(draw: Draw, _: str) -> Case:
    sizes = {c: draw.size() for c in "abij"}
    left, right, out = draw.pick(
        ("ai", "ij", "aj"),
        ("abi", "abj", "abij"),
        ("abi", "ij", "baj"),
        ("ij", "ji", ""),
        ("abi", "bj", "aij"),
        ("ab", "", "ab"),
        ("i", "j", "ij"),
    )
    a, b = draw.f(*(sizes[c] for c in left)), draw.f(*(sizes[c] for c in right))
    return call(contraction.einsum, f"{left},{right}->{out}", a, b)


@makes("autopar.contiguous_batch")
def _contiguous_batch(draw: Draw, _: str) -> Case:
    x = draw.f(*draw.shape(2, 4))
    return call(contraction.contiguous_batch, x.mT.contiguous().mT if draw.pick(False, True) else x)


@makes("aten.mm", "aten.bmm")
def _mm(draw: Draw, name: str) -> Case:
    lead = [draw.size()] if name == "aten.bmm" else []
    i, k, j = draw.size(), draw.size(), draw.size()
    return call(overload(name), draw.f(*lead, i, k), draw.f(*lead, k, j))


@makes("aten.dot", "aten.vdot")
def _dot(draw: Draw, name: str) -> Case:
    k = draw.size()
    make = draw.pick(draw.f, draw.c)
    return call(overload(name), make(k), make(k))


# --- attention, recurrence ----------------------------------------------------------------------------------------------


def attention_arguments(draw: Draw, float_mask: bool = False) -> tuple[Any, ...]:
    """(q, k, v, mask, p, causal, scale, site, order)."""
    b, kv, repeat, s = draw.pick(2, 1, 4), draw.pick(2, 1, 4), draw.pick(1, 2), draw.pick(4, 2, 6, 12)
    causal = draw.pick(True, False)
    t = s if causal and draw.pick(True, False) else draw.pick(4, 3, 6, 12)
    e = draw.pick(4, 3)
    q, k, v = draw.f(b, kv * repeat, s, 4), draw.f(b, kv, t, 4), draw.f(b, kv, t, e)
    mask = None
    kind = "float" if float_mask else draw.pick("none", "bool", "float")
    if kind != "none":
        shape = [draw.pick(1, n) for n in (b, kv * repeat, s)]
        mask = draw.f(*shape, t) if kind == "float" else draw.b(*shape, t) | (torch.arange(t) == 0)
    p, site = draw.pick((0.0, -1), (0.4, 3))
    return q, k, v, mask, p, causal, 0.5, site, draw.pick(0, s // 2) if s == t and s % 2 == 0 else 0


@makes("autopar.attention", "autopar.attention_grad", "autopar.attention_mask_grad")
def _attention(draw: Draw, name: str) -> Case:
    q, k, v, mask, *config = attention_arguments(draw, name.endswith("mask_grad"))
    if name == "autopar.attention":
        return call(attention.attention, q, k, v, mask, *config)
    out, lse = attention.attention(q, k, v, mask, *config)
    op = attention.attention_mask_grad if name.endswith("mask_grad") else attention.attention_grad
    return call(op, draw.f(*out.shape), q, k, v, mask, out, lse, *config)


@makes("autopar.rnn", "autopar.rnn_grad")
def _rnn(draw: Draw, name: str) -> Case:
    mode = draw.pick("lstm", "gru", "rnn_tanh", "rnn_relu")
    gates = {"lstm": 4, "gru": 3}.get(mode, 1)
    t, b, i, h = draw.pick(2, 3), draw.size(), draw.pick(2, 4), draw.pick(2, 4)
    out = draw.pick(h, 1, 3) if mode == "lstm" else h
    x, h0 = draw.f(t, b, i), draw.f(b, out)
    c0 = draw.f(b, h) if mode == "lstm" else None
    biases = (draw.f(gates * h), draw.f(gates * h)) if draw.pick(True, False) else (None, None)
    projection = draw.f(out, h) if out != h else None
    args = (mode, x, h0, c0, draw.f(gates * h, i), draw.f(gates * h, out), *biases, projection)
    if name == "autopar.rnn":
        return call(recurrence.rnn, *args)
    last = draw.f(b, h if mode == "lstm" else out)
    return call(recurrence.rnn_grad, *args, draw.f(t, b, out), draw.f(b, out), last)


# --- grouped products -------------------------------------------------------------------------------------------------


@makes("autopar.grouped_mm", "autopar.grouped_mm_dw")
def _grouped(draw: Draw, name: str) -> Case:
    """Some rows belong to no group; some groups have no rows."""
    lead, groups, k, n = draw.shape(1, 2), draw.size(), draw.size(), draw.size()
    x, group = draw.f(*lead, k), draw.i(groups + 1, *lead)
    if name == "autopar.grouped_mm":
        return call(grouped.grouped_mm, x, draw.f(groups, k, n), group)
    return call(grouped.grouped_mm_dw, x, draw.f(*lead, n), group, groups)


# --- norms, embedding ----------------------------------------------------------------------------------------------


@makes(
    *(
        f"autopar.{name}"
        for name in ("rms_norm", "rms_norm_dx", "layer_norm", "layer_norm_dx", "layer_norm_backward", "norm_dw")
    )
)
def _norm(draw: Draw, name: str) -> Case:
    x = draw.f(*draw.shape(1, 3))
    ndim = draw.pick(1, min(2, x.ndim))
    own = x.shape[x.ndim - ndim :]
    w = draw.f(*own) if draw.pick(True, False) else None
    if name == "autopar.rms_norm":
        return call(normalization.rms_norm, x, w, 1e-5, ndim)
    if name == "autopar.layer_norm":
        return call(normalization.layer_norm, x, w, draw.f(*own) if w is not None else None, 1e-5, ndim)
    g = draw.f(*x.shape)
    _, mean, rstd = normalization.layer_norm(x, w, None, 1e-5, ndim)
    if name == "autopar.rms_norm_dx":
        return call(normalization.rms_norm_dx, g, x, rstd, w, ndim)
    if name == "autopar.layer_norm_dx":
        return call(normalization.layer_norm_dx, g, x, mean, rstd, w, ndim)
    if name == "autopar.layer_norm_backward":
        return call(normalization.layer_norm_backward, g, x, mean, rstd, draw.f(*own), ndim)
    return call(normalization.norm_dw, g, x, draw.pick(mean, None), rstd, ndim)


@makes("autopar.batch_norm", "autopar.batch_norm_eval", "autopar.batch_norm_backward")
def _batch_norm(draw: Draw, name: str) -> Case:
    x = draw.f(draw.pick(2, 4, 6), draw.size(), *(draw.pick(1, 4, 6) for _ in range(draw.pick(0, 1, 2))))
    w, b = (draw.pick(None, draw.f(x.shape[1])) for _ in range(2))
    if name == "autopar.batch_norm":
        return call(batch_norm.batch_norm, x, w, b, 1e-5)
    mean, var = draw.f(x.shape[1]), draw.positive(x.shape[1])
    if name == "autopar.batch_norm_eval":
        return call(batch_norm.batch_norm_eval, x, w, b, mean, var, 1e-5)
    return call(batch_norm.batch_norm_backward, draw.f(*x.shape), x, w, mean, var, 1e-5, draw.pick(True, True, False))


@makes("autopar.embedding", "autopar.embedding_grad")
def _embedding(draw: Draw, name: str) -> Case:
    v, h = draw.size(), draw.size()
    index = draw.i(v, *draw.shape(1, 2))
    if name == "autopar.embedding":
        return call(embedding.embedding, draw.f(v, h), index)
    return call(embedding.embedding_grad, draw.f(*index.shape, h), index, v, draw.pick(-1, 0, v - 1))


@makes("autopar.in_range")
def _in_range(draw: Draw, name: str) -> Case:
    x = draw.i(5, *draw.shape(1, 3))
    return call(integers.in_range, x, 0, 5)


@makes("autopar.expect")
def _expect(draw: Draw, name: str) -> Case:
    return call(integers.expect, draw.b() | True, True)


# --- images ----------------------------------------------------------------------------------------------------------------


def _image(draw: Draw, rank: int) -> torch.Tensor:
    lead = [draw.size()] if draw.pick(True, True, False) else []
    return draw.f(*lead, draw.size(), *([4] * rank))


@makes("aten.pixel_shuffle", "aten.pixel_unshuffle")
def _pixels(draw: Draw, name: str) -> Case:
    return call(overload(name), draw.f(draw.size(), draw.size(), 8, 4, 4), 2)


@makes("aten.glu", "aten.glu_backward")
def _glu(draw: Draw, name: str) -> Case:
    x = draw.f(*(2 * n for n in draw.shape(1, 3)))
    dim = draw.dim(x.ndim)
    y = aten.glu(x, dim)
    return (
        call(aten.glu.default, x, dim)
        if name == "aten.glu"
        else call(aten.glu_backward.default, draw.f(*y.shape), x, dim)
    )


@makes("aten.im2col", "aten.col2im")
def _columns(draw: Draw, name: str) -> Case:
    x = _image(draw, 2)
    config = ([2, 2], [1, 1], [draw.pick(0, 1)] * 2, [draw.pick(1, 2)] * 2)
    if name == "aten.im2col":
        return call(aten.im2col.default, x, *config)
    return call(aten.col2im.default, draw.f(*aten.im2col(x, *config).shape), [4, 4], *config)


@makes("aten.grid_sampler_2d", "aten.grid_sampler_3d", "aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def _grid(draw: Draw, name: str) -> Case:
    rank = 2 if "2d" in name else 3
    n, c = draw.size(), draw.size()
    x, grid = draw.f(n, c, *([4] * rank)), draw.f(n, *([3] * rank), rank)
    config = (draw.pick(0, 1), draw.pick(0, 1), draw.pick(False, True))
    if not name.endswith("_backward"):
        return call(overload(name), x, grid, *config)
    return call(overload(name), draw.f(n, c, *([3] * rank)), x, grid, *config, draw.pick([True, True], [False, True]))


# --- transforms ----------------------------------------------------------------------------------------------------------


@makes("aten._fft_r2c", "aten._fft_c2c", "aten._fft_c2r")
def _fft(draw: Draw, name: str) -> Case:
    shape = draw.shape(1, 3)
    dims = draw.dims(len(shape))
    if name == "aten._fft_r2c":
        return call(aten._fft_r2c.default, draw.f(*shape), dims, 0, draw.pick(True, False))
    if name == "aten._fft_c2c":
        return call(aten._fft_c2c.default, draw.c(*shape), dims, 0, True)
    return call(aten._fft_c2r.default, draw.c(*shape), dims, 0, max(2 * shape[dims[-1]] - 2, 1))


@makes("aten.view_as_real", "aten.view_as_complex")
def _complex(draw: Draw, name: str) -> Case:
    shape = draw.shape()
    return call(overload(name), draw.c(*shape) if name.endswith("real") else draw.f(*shape, 2))


@makes("aten._euclidean_dist", "aten._cdist_forward")
def _distances(draw: Draw, name: str) -> Case:
    lead = draw.shape(1, 2) if draw.pick(True, False) else []
    a, b = draw.f(*lead, draw.size(), 3), draw.f(*lead, draw.size(), 3)
    return call(overload(name), a, b, *((2.0, None) if name == "aten._cdist_forward" else ()))


@makes("aten._cdist_backward")
def _distances_backward(draw: Draw, _: str) -> Case:
    lead = draw.shape(1, 2) if draw.pick(True, False) else []
    p, r, power = draw.size(), draw.size(), draw.pick(1.0, 2.0, 3.0)
    a, b = draw.f(*lead, p, 3), draw.f(*lead, r, 3)
    return call(aten._cdist_backward.default, draw.f(*lead, p, r), a, b, power, torch.cdist(a, b, p=power))


@makes("aten._weight_norm_interface", "aten._weight_norm_interface_backward")
def _weight_norm(draw: Draw, name: str) -> Case:
    v = draw.f(*draw.shape(2, 3))
    dim = draw.pick(0, v.ndim - 1)
    g = draw.f(*(n if i == dim else 1 for i, n in enumerate(v.shape)))
    if name == "aten._weight_norm_interface":
        return call(overload(name), v, g, dim)
    return call(overload(name), draw.f(*v.shape), v, g, aten._weight_norm_interface(v, g, dim)[1], dim)


@makes("aten.linalg_solve_triangular")
def _solve(draw: Draw, name: str) -> Case:
    lead, n, r, left = draw.shape(1, 2), draw.pick(3, 4), draw.size(), draw.pick(True, False)
    a = draw.f(*lead, n, n).triu() + 4 * torch.eye(n, dtype=torch.float64)
    return call(overload(name), a, draw.f(*lead, *((n, r) if left else (r, n))), upper=True, left=left)


@makes(
    *(f"aten.{name}" for name in ("linalg_inv_ex", "linalg_cholesky_ex", "cholesky_solve", "cholesky_inverse")),
    *(f"aten.{name}" for name in ("_linalg_solve_ex", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_qr")),
    *(
        f"aten.{name}"
        for name in ("_linalg_eigh", "_linalg_svd", "_linalg_det", "_linalg_slogdet", "linalg_matrix_exp")
    ),
    "autopar.matrix_exp_grad",
)
def _of_matrices(draw: Draw, name: str) -> Case:
    """Batches of matrices; those on the right may be one for all, or a list for each."""
    lead, n, r = draw.shape(1, 2), draw.pick(3, 4), draw.size()
    root = draw.f(*lead, n, n)
    a = root @ root.mT / (4 * n) + 2 * torch.eye(n, dtype=torch.float64)
    b = draw.f(*lead, n, r)
    if name == "autopar.matrix_exp_grad":
        return call(transform.matrix_exp_grad, a, root)
    if name == "aten._linalg_solve_ex":
        return call(overload(name), a, draw.pick(b, draw.f(n, r), draw.f(*lead, n)))
    if name == "aten.cholesky_solve":
        return call(overload(name), b, torch.linalg.cholesky(a))
    if name == "aten.cholesky_inverse":
        return call(overload(name), torch.linalg.cholesky(a))
    if name == "aten.linalg_lu_solve":
        lu, pivots, _ = torch.linalg.lu_factor_ex(a)
        return call(overload(name), lu, pivots, b)
    return call(overload(name), a)
