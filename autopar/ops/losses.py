"""Losses and statistics as compositions of sums, so that a sharded batch (or vocabulary) leaves only partial sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.ops import wrappers as w
from autopar.ops.lift import lifts

Tensor = torch.Tensor
aten = torch.ops.aten
_NONE, _MEAN = 0, 1


def _reduced(x: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return x
    total = x.sum()
    return total / x.numel() if reduction == _MEAN else total


@lifts(aten.cross_entropy_loss.default)
def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean over the whole batch's counted targets, as one division of two sums."""
    dim = 0 if x.ndim == 1 else 1
    if target.is_floating_point():
        return _soft_cross_entropy(x, target, weight, reduction, label_smoothing, dim)
    counted = target != ignore_index
    safe = torch.where(counted, target, torch.zeros_like(target))
    rows = w.CrossEntropy.apply(x, safe, dim)
    scale = counted.to(x.dtype)
    class_scale = (
        scale if weight is None else scale * aten.index_select(weight, 0, safe.reshape(-1)).reshape(safe.shape)
    )
    loss = rows * class_scale
    if label_smoothing:
        logp = aten.log_softmax.int(x, dim)
        smooth = -(logp if weight is None else logp * _channel(weight, x, dim)).sum(dim) * scale
        loss = loss * (1 - label_smoothing) + smooth * (label_smoothing / x.shape[dim])
    if reduction == _NONE:
        return loss
    return loss.sum() / class_scale.sum() if reduction == _MEAN else loss.sum()


def _channel(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.reshape([-1 if i == dim else 1 for i in range(x.ndim)])


def _soft_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float, dim: int
) -> Tensor:
    target = target * (1 - smoothing) + smoothing / x.shape[dim] if smoothing else target
    logp = aten.log_softmax.int(x, dim) * target
    loss = -(logp if weight is None else logp * _channel(weight, x, dim)).sum(dim)
    if reduction == _NONE:
        return loss
    return loss.sum() / max(x.numel() // x.shape[dim], 1) if reduction == _MEAN else loss.sum()


@lifts(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100
) -> Tensor:
    """Negative log likelihood of log-probabilities x: (n, c, ...)."""
    dim = 0 if x.ndim == 1 else 1
    counted = target != ignore_index
    safe = torch.where(counted, target, torch.zeros_like(target))
    scale = counted.to(x.dtype)
    scale = scale if weight is None else scale * aten.index_select(weight, 0, safe.reshape(-1)).reshape(safe.shape)
    loss = -w.Pick.apply(x, safe, dim) * scale
    if reduction == _NONE:
        return loss
    return loss.sum() / scale.sum() if reduction == _MEAN else loss.sum()


@lifts(aten.mse_loss.default)
def mse_loss(x: Tensor, y: Tensor, reduction: int = _MEAN) -> Tensor:
    """Squared error."""
    return _reduced((x - y) * (x - y), reduction)


@lifts(aten.l1_loss.default)
def l1_loss(x: Tensor, y: Tensor, reduction: int = _MEAN) -> Tensor:
    """Absolute error."""
    return _reduced((x - y).abs(), reduction)


@lifts(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Tensor, y: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    """Quadratic below beta, linear above."""
    if beta == 0:
        return l1_loss(x, y, reduction)
    e = (x - y).abs()
    return _reduced(torch.where(e < beta, 0.5 * e * e / beta, e - 0.5 * beta), reduction)


@lifts(aten.huber_loss.default)
def huber_loss(x: Tensor, y: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    """Quadratic below delta, linear above."""
    e = (x - y).abs()
    return _reduced(torch.where(e < delta, 0.5 * e * e, delta * (e - 0.5 * delta)), reduction)


@lifts(aten.binary_cross_entropy_with_logits.default)
def bce_with_logits(
    x: Tensor, y: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """Stable log-loss of logits."""
    soft = torch.log1p(torch.exp(-x.abs())) + torch.clamp_min(-x, 0)
    scale = 1 if pos_weight is None else (pos_weight - 1) * y + 1
    loss = (1 - y) * x + scale * soft
    return _reduced(loss if weight is None else loss * weight, reduction)


@lifts(aten.binary_cross_entropy.default)
def bce(x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Tensor:
    """Log-loss of probabilities; logs are clamped at -100 as torch does."""
    loss = -(y * torch.clamp_min(torch.log(x), -100) + (1 - y) * torch.clamp_min(torch.log1p(-x), -100))
    return _reduced(loss if weight is None else loss * weight, reduction)


@lifts(aten.kl_div.default)
def kl_div(x: Tensor, y: Tensor, reduction: int = _MEAN, *, log_target: bool = False) -> Tensor:
    """Kullback-Leibler divergence of log-probabilities x against y."""
    return _reduced(torch.exp(y) * (y - x) if log_target else torch.xlogy(y, y) - y * x, reduction)


# --- statistics -------------------------------------------------------------------------------------------------------


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.ndim))
    return [d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)]


@lifts(aten.mean.default)
def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over everything · 1/n."""
    x = x if dtype is None else x.to(dtype)
    return x.sum() / max(x.numel(), 1)


@lifts(aten.mean.dim)
def mean_dim(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over dims · 1/n."""
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    return x.sum(dims, keepdim) / max(math.prod(x.shape[d] for d in dims), 1)


def _variance(x: Tensor, dim: Any, correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    n = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, True) / n
    centered = x - mean
    var = (centered * centered).sum(dims, keepdim) / max(n - correction, 0.0)
    return var, (mean if keepdim else mean.sum(dims))


@lifts(aten.var.correction)
def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Two-pass variance."""
    return _variance(x, dim, 1 if correction is None else correction, keepdim)[0]


@lifts(aten.var.dim)
def var_dim(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    """Two-pass variance."""
    return _variance(x, dim, int(unbiased), keepdim)[0]


@lifts(aten.std.correction)
def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Square root of the two-pass variance."""
    return var(x, dim, correction=correction, keepdim=keepdim).sqrt()


@lifts(aten.var_mean.correction)
def var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    return _variance(x, dim, 1 if correction is None else correction, keepdim)


@lifts(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """p-norms by sums; max-norm by amax."""
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    if ord == 2:
        return (x * x).sum(dims, keepdim).sqrt()
    if ord == 1:
        return x.abs().sum(dims, keepdim)
    if ord == math.inf:
        return x.abs().amax(dims, keepdim)
    return aten.linalg_vector_norm.default(x, ord, dims, keepdim)


@lifts(aten.logsumexp.default)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x - max))) + max."""
    dims = _dims(x, dim)
    top = x.detach().amax(dims, True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    value = (x - top).exp().sum(dims, True).log() + top
    return value if keepdim else value.sum(dims)
