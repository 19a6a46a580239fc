"""Scaled dot-product attention of a block of queries to a block of keys, forward and backward, without autograd.

Layout (batch, heads, query, head_dim) against (batch, kv_heads, key, head_dim); several query heads may share one
key/value head. Two paths: the fused kernel of torch where it applies (its log-sum-exp is what backward needs), and the
plain formula where it does not (dropout, other devices, gradients of masks: `plain_scores`). Of a row that sees nothing the
result is 0 and the log-sum-exp 0 in both. A causal block is a square, of which row r sees the keys <= r.
"""

from __future__ import annotations

import math

import torch

from . import plain_scores as plain

Tensor = torch.Tensor


def _repeat(kv: Tensor, heads: int) -> Tensor:
    groups = heads // kv.shape[1]
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def _sum_groups(grad: Tensor, heads: int) -> Tensor:
    if grad.shape[1] == heads:
        return grad
    return grad.unflatten(1, (heads, grad.shape[1] // heads)).sum(2)


def _full_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The additive mask at the size of the scores, which fused kernels ask for."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    return mask.to(plain.softmax_dtype(q)).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _fused(q: Tensor, k: Tensor, v: Tensor, p: float) -> bool:
    same = q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) and q.shape[-1] == v.shape[-1]
    return q.device.type in ("cpu", "meta") and p == 0.0 and same and min(q.numel(), k.numel()) > 0


def hidden_rows(lse: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Which rows of a block see nothing of it, in a form that goes with their lse; None: all see something."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > -math.inf
    if causal:
        rows = lse.shape[2]
        seen = seen.expand(*mask.shape[:2], rows, rows).tril()
    return ~seen.any(-1)


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
    if not _fused(q, k, v, p):
        return plain.attend(q, k, v, plain.Config(mask, p, causal, scale, key, shape, offsets))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, _repeat(k, q.shape[1]), _repeat(v, q.shape[1]), 0.0, causal, attn_mask=_full_mask(mask, q, k), scale=scale
    )


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
    if not _fused(q, k, v, p):
        return plain.attend_grad(g, q, k, v, out, lse, plain.Config(mask, p, causal, scale, key, shape, offsets))
    keys, values = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, keys, values, out, lse, 0.0, causal, attn_mask=_full_mask(mask, q, k), scale=scale
    )
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
    return plain.mask_grad(g, q, k, v, out, lse, plain.Config(mask, p, causal, scale, key, shape, offsets))
