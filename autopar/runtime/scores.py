"""Scaled dot-product attention of a block of queries to a block of keys, forward and backward, without autograd.

Layout (batch, heads, query, head_dim) against (batch, kv_heads, key, head_dim); several query heads may share one
key/value head. Two paths: the fused kernel of torch where it applies (its log-sum-exp is what backward needs), and the
plain formula where it does not (dropout, other devices, gradients of masks). Of a row that sees nothing the result is 0 and
the log-sum-exp 0 in both. A causal block is a square, of which row r sees the keys <= r.
"""

from __future__ import annotations

import math

import torch

from . import random as rng

Tensor = torch.Tensor


def _repeat(kv: Tensor, heads: int) -> Tensor:
    groups = heads // kv.shape[1]
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def _sum_groups(grad: Tensor, heads: int) -> Tensor:
    if grad.shape[1] == heads:
        return grad
    return grad.unflatten(1, (heads, grad.shape[1] // heads)).sum(2)


def softmax_dtype(q: Tensor) -> torch.dtype:
    """Scores and their softmax are in float32 where queries are in 16 bits."""
    return torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype


def _bias(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """Additive mask in the dtype of the scores, causal triangle included."""
    bias, dtype = None, softmax_dtype(q)
    if mask is not None:
        bias = mask if mask.dtype != torch.bool else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)
        bias = bias.to(dtype)
    if causal:
        row = torch.arange(q.shape[2], device=q.device).unsqueeze(1)
        future = torch.arange(k.shape[2], device=q.device).unsqueeze(0) > row
        triangle = torch.zeros(future.shape, dtype=dtype, device=q.device).masked_fill_(future, -math.inf)
        bias = triangle if bias is None else bias + triangle
    return bias


def _full_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The additive mask at the size of the scores, which fused kernels ask for."""
    bias = _bias(mask, False, q, k)
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _fused(q: Tensor, k: Tensor, v: Tensor, p: float) -> bool:
    same = q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) and q.shape[-1] == v.shape[-1]
    return q.device.type in ("cpu", "meta") and p == 0.0 and same and min(q.numel(), k.numel()) > 0


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    scores = ((q * scale) @ k.transpose(-1, -2)).to(softmax_dtype(q))
    return scores if bias is None else scores + bias


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """softmax out of scores and their log-sum-exp; rows that see nothing weigh nothing."""
    return scores.sub(lse.unsqueeze(-1)).exp_()


def hidden_rows(lse: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Which rows of a block see nothing of it, in a form that goes with their lse; None: all see something."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > -math.inf
    if causal:
        rows = lse.shape[2]
        seen = seen.expand(*mask.shape[:2], rows, rows).tril()
    return ~seen.any(-1)


def _drop(
    local: torch.Size, p: float, key: int, shape: tuple[int, ...] | None, offsets: tuple[int, ...] | None, like: Tensor
) -> Tensor:
    keep = rng.keep_mask(tuple(local), p, key, shape, offsets, like.device)
    return keep.to(like.dtype).mul_(1.0 / (1.0 - p))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    key: int = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (out: like q with v's head dim, lse: (batch, heads, query) float).

    `key`, `shape`, `offsets`: dropout on the weights, by the place of the block in all scores.
    """
    keys, values = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    if _fused(q, k, v, p):
        bias = _full_mask(mask, q, k)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, values, 0.0, causal, attn_mask=bias, scale=scale
        )
    scores = _scores(q, keys, scale, _bias(mask, causal, q, k))
    lse = torch.logsumexp(scores, -1)
    lse.masked_fill_(lse == -math.inf, 0.0)
    weights = _weights(scores, lse)
    if p > 0.0:
        weights = weights * _drop(weights.shape, p, key, shape, offsets, weights)
    return weights.to(values.dtype) @ values, lse


def attend_grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    p: float,
    causal: bool,
    scale: float,
    key: int = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    keys, values = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    if _fused(q, k, v, p):
        bias = _full_mask(mask, q, k)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, keys, values, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return dq, _sum_groups(dk, k.shape[1]), _sum_groups(dv, v.shape[1])
    weights, dscores, drop = _score_grad(g, q, keys, values, mask, out, lse, p, causal, scale, key, shape, offsets)
    dv = (weights if drop is None else weights * drop).to(g.dtype).transpose(-1, -2) @ g
    dscores = dscores.to(q.dtype)
    dq = (dscores @ keys) * scale
    dk = dscores.transpose(-1, -2) @ (q * scale)
    return dq, _sum_groups(dk, k.shape[1]), _sum_groups(dv, v.shape[1])


def mask_grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    p: float,
    causal: bool,
    scale: float,
    key: int = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
) -> Tensor:
    """Gradient of an additive mask, at full size (batch, heads, query, key), in the dtype of the scores."""
    keys, values = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    return _score_grad(g, q, keys, values, mask, out, lse, p, causal, scale, key, shape, offsets)[1]


def _score_grad(
    g: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    p: float,
    causal: bool,
    scale: float,
    key: int,
    shape: tuple[int, ...] | None,
    offsets: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(weights before dropout, d scores, dropout factors)."""
    weights = _weights(_scores(q, keys, scale, _bias(mask, causal, q, keys)), lse.to(softmax_dtype(q)))
    dweights = (g @ values.transpose(-1, -2)).to(weights.dtype)
    drop = None
    if p > 0.0:
        drop = _drop(weights.shape, p, key, shape, offsets, weights)
        dweights = dweights * drop
    delta = (g.to(weights.dtype) * out).sum(-1, keepdim=True)
    return weights, weights * (dweights - delta), drop
