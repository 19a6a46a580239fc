"""Gradients of ours beside those of torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def assert_equal_gradients(ours: Callable[..., Any], theirs: Callable[..., Any], *leaves: Tensor) -> None:
    """Values and gradients of a random projection agree to 1e-11."""
    got, expected = ours(*leaves), theirs(*leaves)
    gots, expecteds = ([t] if isinstance(t, Tensor) else [x for x in t if x is not None] for t in (got, expected))
    seeds = [torch.randn_like(t) for t in expecteds]
    for one, other in zip(gots, expecteds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    wanted = [t for t in leaves if t.requires_grad]
    ours_grads = torch.autograd.grad(gots, wanted, seeds)
    theirs_grads = torch.autograd.grad(expecteds, wanted, seeds)
    for one, other in zip(ours_grads, theirs_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
