"""Norms and means give what torch's do, backward too, in float64; in 16 bits their sums do not overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autopar.ops.dialect import LIFT
from autopar.runtime.kernels import ops

from .gradients import assert_equal_gradients, f

aten = torch.ops.aten


@pytest.mark.parametrize(("shape", "normed"), [((3, 4), 1), ((2, 3, 4), 1), ((2, 3, 4), 2), ((4,), 1)])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_and_rms_norm(shape: tuple[int, ...], normed: int, affine: bool) -> None:
    own = list(shape[len(shape) - normed :])
    w, b = ((f(*own), f(*own)) if affine else ())[:2] or (None, None)
    rms = [t for t in (f(*shape), w) if t is not None]
    assert_equal_gradients(
        lambda x, *w: LIFT[aten.rms_norm.default](x, own, *w), lambda x, *w: F.rms_norm(x, own, *w), *rms
    )
    leaves = [t for t in (f(*shape), w, b) if t is not None]
    assert_equal_gradients(
        lambda x, *p: LIFT[aten.layer_norm.default](x, own, *p), lambda x, *p: F.layer_norm(x, own, *p), *leaves
    )


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5), (2, 6, 3, 3)])
def test_batch_and_group_norm(shape: tuple[int, ...]) -> None:
    leaves = f(*shape), f(6), f(6)
    assert_equal_gradients(
        lambda x, w, b: LIFT[aten.batch_norm.default](x, w, b, None, None, True, 0.1, 1e-5, True),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        *leaves,
    )
    assert_equal_gradients(
        lambda x, w, b: LIFT[aten.group_norm.default](x, 3, w, b), lambda x, w, b: F.group_norm(x, 3, w, b), *leaves
    )
    mean, var = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.5
    assert_equal_gradients(
        lambda x, w, b: LIFT[aten.batch_norm.default](x, w, b, mean, var, False, 0.1, 1e-5, True),
        lambda x, w, b: F.batch_norm(x, mean, var, w, b, False),
        *leaves,
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (LIFT[aten.mean.default], torch.mean),
        (LIFT[aten.linalg_vector_norm.default], torch.linalg.vector_norm),
        (lambda x: LIFT[aten.mean.dim](x, [0]), lambda x: x.mean(0)),
        (lambda x: LIFT[aten.std.correction](x, None), torch.std),
        (lambda x: LIFT[aten.var.correction](x, [0]) / 300, lambda x: x.var(0) / 300),
    ],
)
def test_sums_of_halves_do_not_overflow(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    x = (torch.rand(64, 16) * 100 + 300).half().requires_grad_()
    got, expected = ours(x), theirs(x)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)
    grads = (torch.autograd.grad(y.sum(), x)[0] for y in (got, expected))
    torch.testing.assert_close(*grads, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("centered", [True, False])
def test_gradients_of_norms_whose_statistics_do_not_lie_one_after_another(centered: bool, ndim: int) -> None:
    """Gradients of a part of the rows, as where a rank has a slice of what forward kept."""
    x, g, w = f(3, 8, 2, 5).detach(), f(3, 8, 2, 5).detach(), f(*(2, 5)[2 - ndim :]).detach()
    _, mean, rstd = ops.layer_norm(x, w, None, 1e-5, ndim)
    _, rstd = (None, rstd) if centered else ops.rms_norm(x, w, 1e-5, ndim)
    x, g, mean, rstd = (t[:, 2:6] for t in (x, g, mean, rstd))
    assert not rstd.is_contiguous()
    hat = (x - mean) * rstd if centered else x * rstd
    dw = ops.norm_dw(g, x, mean if centered else None, rstd, ndim)
    torch.testing.assert_close(dw, (hat * g).sum(list(range(4 - ndim))), rtol=1e-12, atol=1e-12)
    if centered:
        over = list(range(4 - ndim, 4))
        gw = g * w
        expected = rstd * (gw - gw.mean(over, keepdim=True) - hat * (gw * hat).mean(over, keepdim=True))
        torch.testing.assert_close(ops.layer_norm_dx(g, x, mean, rstd, w, ndim), expected, rtol=1e-12, atol=1e-12)
        every, lead = ops.layer_norm_backward(g, x, mean, rstd, w, ndim), list(range(4 - ndim))
        torch.testing.assert_close(every, (expected, (hat * g).sum(lead), g.sum(lead)), rtol=1e-12, atol=1e-12)
