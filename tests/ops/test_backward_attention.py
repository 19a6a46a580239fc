"""Attention and dropout: what comes back is what torch's autograd gives, and draws what forward drew."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.attention import Attention
from autopar.ops.dialect import LIFT
from autopar.ops.random import Dropout
from autopar.runtime.kernels import random as rng
from autopar.runtime.kernels.attention import attention as att

from .gradients import assert_equal_gradients, f

aten = torch.ops.aten


# --- attention --------------------------------------------------------------------------------------------------------


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    drop: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    weights = torch.where(weights.isnan(), 0.0, weights)
    return (weights if drop is None else weights * drop) @ v


ATTENTION = LIFT[aten.scaled_dot_product_attention.default]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "learned"])
@pytest.mark.parametrize(("heads", "kv"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("s", "t", "e"), [(5, 5, 4), (3, 6, 4), (4, 4, 3)])
def test_attention(causal: bool, mask: str, heads: int, kv: int, s: int, t: int, e: int) -> None:
    leaves = [f(2, heads, s, 4), f(2, kv, t, 4), f(2, kv, t, e)]
    if mask == "bool":
        leaves.append(torch.rand(2, 1, s, t) < 0.7)
        leaves[-1][..., 0] = True
    elif mask != "none":
        leaves.append(f(1, heads, s, t) if mask == "learned" else f(2, 1, s, t).detach())
    assert_equal_gradients(
        lambda q, k, v, *m: ATTENTION(q, k, v, *(m or (None,)), 0.0, causal, enable_gqa=True),
        lambda q, k, v, *m: plain_attention(q, k, v, *(m or (None,)), causal),
        *leaves,
    )


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 2, 3)])
def test_attention_of_any_number_of_batch_dims(lead: tuple[int, ...]) -> None:
    assert_equal_gradients(ATTENTION, F.scaled_dot_product_attention, *(f(*lead, 4, 4) for _ in range(3)))


@pytest.mark.parametrize("e", [4, 3])
def test_attention_rows_that_see_nothing_are_zero_and_give_no_gradient(e: int) -> None:
    mask = torch.rand(2, 1, 5, 6) < 0.5
    mask[:, :, 2] = False
    leaves = f(2, 2, 5, 4), f(2, 2, 6, 4), f(2, 2, 6, e)
    out = ATTENTION(*leaves, mask)
    assert (out[:, :, 2] == 0).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    safe = mask.clone()
    safe[:, :, 2] = True
    rows = torch.arange(5) != 2
    expected = torch.autograd.grad(plain_attention(*leaves, safe, False)[:, :, rows].sum(), leaves)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_draws_by_position_and_backward_draws_the_same(causal: bool) -> None:
    p, key = 0.4, 11
    keep = rng.keep_mask((2, 4, 5, 5), p, key).double() / (1 - p)
    assert_equal_gradients(
        lambda q, k, v: Attention.apply(q, k, v, None, p, causal, 0.5, key),
        lambda q, k, v: plain_attention(q, k, v, None, causal, keep, 0.5),
        f(2, 4, 5, 4),
        f(2, 2, 5, 4),
        f(2, 2, 5, 4),
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_on_blocks_of_queries_knows_where_they_start(p: float) -> None:
    q, k, v = f(2, 2, 6, 4), f(2, 2, 6, 4), f(2, 2, 6, 4)
    keep = rng.keep_mask((2, 2, 6, 6), p, 3).double() / (1 - p)
    expected = plain_attention(q, k, v, None, True, keep, 0.5)
    g = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), g)
    outs, dqs, dk, dv = [], [], 0.0, 0.0
    for start in (0, 3):
        where = {"offset": start, "key": 3, "shape": (2, 2, 6, 6), "offsets": (0, 0, start, 0)}
        block, grad = q.detach()[:, :, start : start + 3], g[:, :, start : start + 3]
        out, lse = att.attention(block, k.detach(), v.detach(), None, p, True, 0.5, **where)
        dq, dk_part, dv_part = att.attention_grad(
            grad, block, k.detach(), v.detach(), None, out, lse, p, True, 0.5, **where
        )
        outs.append(out)
        dqs.append(dq)
        dk, dv = dk + dk_part, dv + dv_part
    torch.testing.assert_close(torch.cat(outs, 2), expected.detach(), rtol=1e-11, atol=1e-11)
    for one, other in zip((torch.cat(dqs, 2), dk, dv), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


# --- dropout ------------------------------------------------------------------------------------------------------------


def test_dropout_is_its_own_backward() -> None:
    x = f(4, 6)
    keep = rng.keep_mask((4, 6), 0.3, 5).double() / 0.7
    assert_equal_gradients(lambda t: Dropout.apply(t, 0.3, 5), lambda t: t * keep, x)
