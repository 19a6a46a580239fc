"""Local implementations of the ops that emitted programs use beyond plain torch.

Each computes on one rank's block. Forward and backward are separate functions, because emitted programs run without
autograd: the backward was derived when the program was compiled. Where an op must know which block of a sharded index
it holds (embedding, loss, dropout, causal attention), the caller passes `offset`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..comm.devices import device_of
from . import random as rng
from .ctc import ctc as ctc
from .ctc import ctc_grad as ctc_grad
from .grouped import grouped_mm as grouped_mm
from .grouped import grouped_mm_dw as grouped_mm_dw
from .grouped import stacked as stacked
from .kernels import has_fused_norm, has_norm_dw, has_ordered_embedding
from .tiles import LOG2_E, is_one_tile, row_tiles

Tensor = torch.Tensor
aten = torch.ops.aten
Window = tuple[list[int], list[int], list[int], bool, list[int], int]
"""The window of a convolution: stride, padding, dilation, transposed, output padding, groups."""


# --- contractions -----------------------------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x: (..., i), w: (o, i) -> (..., o)."""
    return F.linear(x, w, b)


def linear_dx(g: Tensor, w: Tensor) -> Tensor:
    """g: (..., o), w: (o, i) -> (..., i)."""
    return torch.matmul(g, w)


def linear_dw(g: Tensor, x: Tensor) -> Tensor:
    """g: (..., o), x: (..., i) -> (o, i)."""
    return g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def einsum(equation: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two-operand contraction; the bias, (y,), is added to the last dim. One of matrices, or of batches of them, is a product
    of them as they lie: torch.einsum takes batches of one, copies what is transposed, and lays the result out as they come."""
    product = _as_product(equation)
    if product is None:
        y = torch.einsum(equation, a, b)
        return y if bias is None else y + bias
    if product.swapped:
        a, b = b, a
    a, b = a.mT if product.first_turned else a, b.mT if product.second_turned else b
    if not product.batch:
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    left, right = _one_batch(a), _one_batch(b)
    y = torch.bmm(left, right) if bias is None else torch.baddbmm(bias, left, right)
    return y.view(*a.shape[:-2], *y.shape[1:])


@dataclass(frozen=True)
class _Product:
    """An equation as a matrix product: dims of the batch, whether operands change places, whose matrices are transposed then."""

    batch: int
    swapped: bool
    first_turned: bool
    second_turned: bool


@functools.cache
def _as_product(equation: str) -> _Product | None:
    """How an equation is a product of matrices whose batch, if there is one, comes first everywhere; None: it is not."""
    left, out = equation.split("->")
    first, second = left.split(",")
    batch = len(out) - 2
    if (
        batch < 0
        or len(first) != len(out)
        or len(second) != len(out)
        or not first[:batch] == second[:batch] == out[:batch]
    ):
        return None
    first, second, out = first[batch:], second[batch:], out[batch:]
    if len({*first} & {*second}) != 1 or {*first} & {*second} & {*out}:
        return None
    swapped = out[0] in second
    first, second = (second, first) if swapped else (first, second)
    return _Product(batch, swapped, first[0] != out[0], second[1] != out[1])


def is_batched_product(equation: str) -> bool:
    """Whether an equation is a product of batches of matrices, dims of the batch first."""
    product = _as_product(equation)
    return product is not None and product.batch > 0


def _one_batch(x: Tensor) -> Tensor:
    """(batch, rows, columns); where it must be copied the inner one of rows and columns stays the inner one."""
    return x.mT.flatten(0, -3).mT if x.stride(-2) < x.stride(-1) else x.flatten(0, -3)


def contiguous_batch(x: Tensor) -> Tensor:
    """A copy of x (*batch, rows, columns) as products of batches read it, its matrices one after another; the inner one of rows
    and columns stays the inner one."""
    if x.stride(-2) < x.stride(-1):
        return x.mT.clone(memory_format=torch.contiguous_format).mT
    return x.clone(memory_format=torch.contiguous_format)


# --- normalisation ----------------------------------------------------------------------------------------------------


def _fused(x: Tensor) -> bool:
    """Whether norms are one kernel."""
    return x.numel() > 0 and has_fused_norm(device_of(x))


def _norm_dims(x: Tensor, ndim: int) -> list[int]:
    return list(range(x.ndim - ndim, x.ndim))


def rms_norm(x: Tensor, w: Tensor | None, eps: float, ndim: int) -> tuple[Tensor, Tensor]:
    """Normalise the last `ndim` dims; returns (y, rstd with those dims kept as 1). Numbers of 16 bits in float32, rstd too."""
    if _fused(x) and x.is_meta:  # where torch would take the kernel apart
        return torch.empty_like(x), x.new_empty([*x.shape[: x.ndim - ndim], *[1] * ndim], dtype=norm_dtype(x))
    if _fused(x):
        return aten._fused_rms_norm(x, x.shape[x.ndim - ndim :], w, eps)
    wide = x.to(norm_dtype(x))
    rstd = torch.rsqrt((wide * wide).mean(_norm_dims(x, ndim), keepdim=True) + eps)
    y = wide * rstd
    return (y * w if w is not None else y).to(x.dtype), rstd


def rms_norm_dx(g: Tensor, x: Tensor, rstd: Tensor, w: Tensor | None, ndim: int) -> Tensor:
    if _fused(x):
        return aten._fused_rms_norm_backward(g, x, x.shape[x.ndim - ndim :], rstd, w, [True, False])[0]
    wide, gw = x.to(rstd.dtype), g.to(rstd.dtype)
    gw = gw * w if w is not None else gw
    mean = (gw * wide).mean(_norm_dims(x, ndim), keepdim=True)
    return torch.addcmul(gw, wide, mean * (rstd * rstd), value=-1).mul_(rstd).to(x.dtype)


def norm_dtype(x: Tensor) -> torch.dtype:
    """Numbers of 16 bits are normalised in float32."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def norm_dw(g: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, ndim: int) -> Tensor:
    """Gradient of the norm's weight: sum over the leading dims of g · (x - mean) · rstd."""
    device, shape = device_of(x), x.shape[x.ndim - ndim :]
    if x.numel() > 0 and has_norm_dw(device, x.dtype == rstd.dtype):
        w = x.new_empty(1).expand(shape)  # kernels look at its shape alone
        if mean is None and has_fused_norm(device):
            return aten._fused_rms_norm_backward(g, x, shape, rstd, w, [False, True])[1]
        mean = torch.zeros_like(rstd) if mean is None else mean
        return _layer_norm_backward(g, x, mean, rstd, w, ndim, [False, True, False])[1]
    hat = (x - mean) * rstd if mean is not None else x * rstd
    lead = list(range(x.ndim - ndim))
    product = hat.mul_(g)
    return (product.sum(lead) if lead else product).to(x.dtype)


def layer_norm(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (y, mean, rstd); the statistics keep the normalised dims as 1."""
    y, mean, rstd = torch.native_layer_norm(x, x.shape[x.ndim - ndim :], w, b, eps)
    return y, mean, rstd


def layer_norm_dx(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, ndim: int) -> Tensor:
    return _layer_norm_backward(g, x, mean, rstd, w, ndim, [True, False, False])[0]


def layer_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, ndim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the weight and of the bias."""
    return _layer_norm_backward(g, x, mean, rstd, w, ndim, [True, True, True])


def _layer_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, ndim: int, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's kernel, which takes statistics for dense, whatever their strides are."""
    shape = x.shape[x.ndim - ndim :]
    return aten.native_layer_norm_backward(
        g.contiguous(), x, shape, mean.contiguous(), rstd.contiguous(), w, w if wanted[2] else None, wanted
    )


# --- loss over a (possibly sharded) vocabulary -----------------------------------------------------------------------------


def sumexp(x: Tensor, m: Tensor, dim: int) -> Tensor:
    """sum over `dim` of exp(x - m); m, the maximum of the whole dim, has `dim` removed."""
    if is_one_tile(x):
        return _exp_less(x, m.unsqueeze(dim)).sum(dim).to(m.dtype)
    total = torch.empty_like(m)
    for rows, of_rows, out in row_tiles(x.movedim(dim, -1), m.unsqueeze(-1), total.unsqueeze(-1)):
        out.copy_(_exp_less(rows, of_rows).sum(-1, keepdim=True))
    return total


def _exp_less(x: Tensor, m: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x - m), numbers of 16 bits in float32, as a power of two, which CPUs have vectorized for all numbers."""
    wide = norm_dtype(x)
    return torch.sub(x.to(wide), m.to(wide), out=out).mul_(LOG2_E).exp2_()


def _places(index: Tensor, size: int, offset: int | None) -> tuple[Tensor, Tensor | None]:
    """Where in a block of `size`, which starts at `offset` of its dim, an index points to, 0 outside; and whether it is inside.
    None: the block is the whole dim, and all of the index is inside."""
    if offset is None:
        return index, None
    local = index - offset
    inside = (local >= 0) & (local < size)
    return local.where(inside, torch.zeros_like(local)), inside


def _only(x: Tensor, inside: Tensor | None) -> Tensor:
    """x, 0 where its index lies outside the block."""
    return x if inside is None else x.where(inside, torch.zeros_like(x))


def pick(x: Tensor, index: Tensor, dim: int, offset: int | None = None) -> Tensor:
    """x[..., index, ...] along `dim`, 0 where the index lies outside this block; index has `dim` removed."""
    places, inside = _places(index, x.shape[dim], offset)
    return _only(x.gather(dim, places.unsqueeze(dim)).squeeze(dim), inside)


def pick_grad(g: Tensor, index: Tensor, dim: int, size: int, offset: int | None = None) -> Tensor:
    """Backward of `pick`: g placed at `index` of a dim of `size` numbers, zeros elsewhere."""
    places, inside = _places(index, size, offset)
    shape = list(g.shape)
    shape.insert(dim, size)
    return g.new_zeros(shape).scatter_(dim, places.unsqueeze(dim), _only(g, inside).unsqueeze(dim))


def cross_entropy_grad(x: Tensor, lse: Tensor, index: Tensor, g: Tensor, dim: int, offset: int | None = None) -> Tensor:
    """d/dx of (lse - x[index]) · g:  (softmax(x) - onehot(index)) · g."""
    return softmax_less_onehot(x, lse, index, g, g, dim, offset)


def smoothed_cross_entropy_grad(
    x: Tensor, lse: Tensor, index: Tensor, g: Tensor, g_all: Tensor, dim: int, offset: int | None = None
) -> Tensor:
    """d/dx of (lse - x[index]) · g + lse · g_all:  softmax(x) · (g + g_all) - onehot(index) · g."""
    return softmax_less_onehot(x, lse, index, g + g_all, g, dim, offset)


def softmax_less_onehot(
    x: Tensor,
    lse: Tensor,
    index: Tensor,
    g: Tensor,
    g_index: Tensor,
    dim: int,
    offset: int | None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(x) · g - onehot(index) · g_index, rounded once; out: where it is written, which may be x."""
    places, inside = _places(index, x.shape[dim], offset)
    rows = [row.unsqueeze(dim) for row in (lse, g, places, _only(g_index.neg(), inside))]
    dx = torch.empty_like(x) if out is None else out
    if is_one_tile(x):
        _write_softmax_less(dx, x, dim, *rows)
        return dx
    for part, made, *of_rows in row_tiles(*(t.movedim(dim, -1) for t in (x, dx, *rows))):
        _write_softmax_less(made, part, -1, *of_rows)
    return dx


def _write_softmax_less(out: Tensor, x: Tensor, dim: int, lse: Tensor, g: Tensor, places: Tensor, less: Tensor) -> None:
    """out = exp(x - lse) · g, with `less` added at `places` of `dim`; out may be x."""
    in_place = x.dtype == norm_dtype(x)
    e = _exp_less(x, lse, out if in_place else None).mul_(g)
    e.scatter_add_(dim, places, less.to(e.dtype))
    if not in_place:
        out.copy_(e)


# --- embedding --------------------------------------------------------------------------------------------------------


def embedding(w: Tensor, index: Tensor, offset: int | None = None) -> Tensor:
    """Rows of w: (v, h) at `index`; with `offset`, rows outside this block are zero."""
    if offset is None:
        return F.embedding(index, w)
    local = index - offset
    inside = (local >= 0) & (local < w.shape[0])
    rows = F.embedding(local.where(inside, torch.zeros_like(local)), w)
    return rows.masked_fill(~inside.unsqueeze(-1), 0)


def embedding_grad(g: Tensor, index: Tensor, rows: int, padding: int, offset: int | None = None) -> Tensor:
    """Gradient of the table: (rows, h); the row `padding` (-1: none) gets nothing."""
    flat, where = g.reshape(-1, g.shape[-1]), index.reshape(-1)
    if padding >= 0 or offset is not None:
        keep = where != padding
        if offset is not None:
            where = where - offset
            keep = keep & (where >= 0) & (where < rows)
        where = where.where(keep, torch.zeros_like(where))
        flat = flat.masked_fill(~keep.unsqueeze(-1), 0)
    if g.dtype in (torch.bfloat16, torch.float16):  # a row is the sum of many: summed in float32
        return _added_rows(flat.float(), where, rows).to(g.dtype)
    return _added_rows(flat, where, rows)


def _added_rows(values: Tensor, where: Tensor, rows: int) -> Tensor:
    """(rows, h): the sums of the values that have the same number; on GPUs by the kernel that adds in a fixed order, so that
    ranks that compute alike get the same bits."""
    if has_ordered_embedding(device_of(values)):
        return aten.embedding_dense_backward.default(values, where, rows, -1, False)
    return values.new_zeros(rows, values.shape[-1]).index_add_(0, where, values)


def count_chosen(chosen: Tensor, n: int, one_hot: bool, dtype: torch.dtype) -> Tensor:
    """How often `chosen` names each of the numbers below n: (n,). one_hot: it names the places along its last dim that are not
    zero."""
    if one_hot:
        return (chosen != 0).reshape(-1, n).sum(0, dtype=dtype)
    named = chosen.reshape(-1).long()
    named = named.masked_fill((named < 0) | (named >= n), n)
    counts = torch.zeros(n + 1, dtype=dtype, device=chosen.device)
    return counts.scatter_add_(0, named, torch.ones_like(named, dtype=dtype))[:n]


# --- matrices ---------------------------------------------------------------------------------------------------------


def matrix_exp_grad(x: Tensor, g: Tensor) -> Tensor:
    """Gradient of the exponential of square matrices: the upper right block of that of ((xᴴ, g), (0, xᴴ))."""
    across = x.mH
    upper, lower = torch.cat([across, g], -1), torch.cat([torch.zeros_like(across), across], -1)
    return torch.linalg.matrix_exp(torch.cat([upper, lower], -2))[..., : x.shape[-1], x.shape[-1] :]


# --- randomness -------------------------------------------------------------------------------------------------------


dropout, random_uniform, random_normal = rng.dropout, rng.uniform, rng.normal


# --- convolution ------------------------------------------------------------------------------------------------------


def conv(x: Tensor, w: Tensor, b: Tensor | None, *window: *Window) -> Tensor:
    """x: (n, c, *spatial), w: (o, c/groups, *kernel)."""
    return aten.convolution(x, w, b, *window)


def conv_dx(g: Tensor, w: Tensor, x_shape: list[int], *window: *Window) -> Tensor:
    """Gradient of x."""
    x = g.new_empty(1).expand(x_shape)
    return aten.convolution_backward(g, x, w, None, *window, [True, False, False])[0]


def conv_dw(g: Tensor, x: Tensor, w_shape: list[int], *window: *Window) -> Tensor:
    """Gradient of w."""
    w = g.new_empty(1).expand(w_shape)
    return aten.convolution_backward(g, x, w, None, *window, [False, True, False])[1]


# --- partial sums -----------------------------------------------------------------------------------------------------


def only_first(x: Tensor, index: int) -> Tensor:
    """x on the first rank along an axis, zeros on the others: a replicated value as a partial sum."""
    return x if index == 0 else torch.zeros_like(x)
