"""The code around torch's kernels for GPUs, on a CPU: ops that compute what these promise, and insist on what these do.

The ops stand in the place of those that a CPU lacks, under their names. They compute by the plain formula in float64, so results
and gradients must be those of eager attention to 1e-9, pieces that are merged included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from autopar.counter import ByteCounter
from autopar.runtime.comm.devices import Device
from autopar.runtime.kernels.attention import attention, plain_scores, scores
from autopar.runtime.kernels.attention.attention_kernels import (
    KERNELS,
    efficient_bytes,
    efficient_grad_bytes,
    flash_grad_bytes,
)
from autopar.runtime.kernels.attention.plain_scores import Config
from tests.gpu.fake_cuda import A100, H100, fake_cuda

F32, BF16 = torch.float32, torch.bfloat16


def whole(*tensors: Tensor) -> None:
    """Rows of whole 16 bytes, at whole 16 bytes."""
    for x in tensors:
        n = 16 // x.itemsize
        assert x.shape[-1] % n == 0 or x.shape[-1] == x.stride(-2)
        assert x.stride(-1) == 1
        assert all(step % n == 0 for step in x.stride()[:-1])


def by_rows(*tensors: Tensor) -> None:
    assert all(x.transpose(1, 2).is_contiguous() for x in tensors)


def config(causal: bool, scale: float, bias: Tensor | None = None) -> Config:
    return Config(bias, 0.0, causal, scale, 0, None, None)


def nothing() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def flash(q, k, v, p=0.0, causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
    whole(q, k, v)
    assert q.shape[3] == v.shape[3]
    out, lse = plain_scores.attend(q, k, v, config(causal, scale))
    return out, lse, None, None, q.shape[2], k.shape[2], nothing(), nothing(), nothing()


def flash_grad(g, q, k, v, out, lse, cq, ck, rows, keys, p, causal, seed, offset, *, scale=None):  # type: ignore[no-untyped-def]
    whole(g, q, k, v, out)
    by_rows(g, out)
    assert lse.is_contiguous()
    assert (rows, keys, cq, ck, p) == (q.shape[2], k.shape[2], None, None, 0.0)
    return plain_scores.attend_grad(g, q, k, v, out, lse, config(causal, scale))


def cudnn(q, k, v, bias, stats, p=0.0, causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
    whole(q, k, v)
    assert stats
    assert bias is None
    out, lse = plain_scores.attend(q, k, v, config(causal, scale))
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], nothing(), nothing(), None


def cudnn_grad(g, q, k, v, out, lse, seed, offset, bias, cq, ck, rows, keys, p, causal, *, scale=None):  # type: ignore[no-untyped-def]
    whole(g, q, k, v, out)
    assert lse.shape == (*q.shape[:3], 1)
    assert (bias, cq, ck, rows, keys, p) == (None, None, None, q.shape[2], k.shape[2], 0.0)
    return plain_scores.attend_grad(g, q, k, v, out, lse.squeeze(-1), config(causal, scale))


def sized(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.dtype == q.dtype
        assert bias.stride(-1) == 1
        assert all(step % (16 // bias.itemsize) == 0 for step in bias.stride()[:-1])


def efficient(q, k, v, bias, stats, p=0.0, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    whole(q, k, v)
    sized(bias, q, k)
    assert q.shape[1] == k.shape[1] == v.shape[1]
    out, lse = plain_scores.attend(q, k, v, config(causal, scale, bias))
    return out, F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf), nothing(), nothing()


def efficient_grad(g, q, k, v, bias, out, lse, seed, offset, p, wanted, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    whole(g, q, k, v, out)
    by_rows(g, out)
    sized(bias, q, k)
    assert wanted == [True, True, True, False]
    assert lse.shape[2] % 32 == 0
    assert (lse[..., q.shape[2] :] == math.inf).all()
    lse = lse[..., : q.shape[2]]
    return *plain_scores.attend_grad(g, q, k, v, out, lse, config(causal, scale, bias)), None


@pytest.fixture(scope="module")
def stand_ins() -> Iterator[None]:
    library = Library("aten", "IMPL")
    for name, forward, backward in (
        ("flash", flash, flash_grad),
        ("cudnn", cudnn, cudnn_grad),
        ("efficient", efficient, efficient_grad),
    ):
        library.impl(f"_scaled_dot_product_{name}_attention", forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU")
    yield
    library._destroy()


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = q @ k.mT * q.shape[3] ** -0.5
    if causal:
        first = k.shape[2] - q.shape[2]
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + first)
        seen = seen.masked_fill(hidden, -math.inf)
    if mask is not None:
        seen = seen.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else seen + mask
    return seen.softmax(-1).nan_to_num(0.0) @ v


def leaf(batch: int, heads: int, rows: int, width: int, rows_first: bool) -> Tensor:
    x = torch.randn(batch, rows, heads, width, dtype=torch.float64)
    x = x.transpose(1, 2) if rows_first else x.transpose(1, 2).contiguous()
    return x.requires_grad_()


def assert_equals_eager(
    name: str, patch: pytest.MonkeyPatch, leaves: list[Tensor], mask: Tensor | None, causal: bool
) -> None:
    """Forward and backward of the whole, of the last rows alone where causal (merged pieces), against autograd."""
    patch.setattr(scores, "kernel_for", lambda *_: KERNELS[name])
    q, k, v = (x.detach() for x in leaves)
    scale = q.shape[3] ** -0.5
    for start in (0, 3) if causal and mask is None else (0,):
        rows = q[:, :, start:]
        expected = eager(leaves[0][:, :, start:], leaves[1], leaves[2], mask, causal)
        g = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, leaves, g)
        out, lse = attention.attention(rows, k, v, mask, 0.0, causal, scale, offset=start)
        grads = attention.attention_grad(g, rows, k, v, mask, out, lse, 0.0, causal, scale, offset=start)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-9, atol=1e-9)
        for found, other in zip(grads, (wanted[0][:, :, start:], *wanted[1:]), strict=True):
            torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-9)


@pytest.mark.few(60)
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize(("heads", "kv"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["plain", "cpu", "flash", "cudnn", "efficient"])
def test_every_kernel_is_eager_attention(
    name: str,
    causal: bool,
    width: int,
    heads: int,
    kv: int,
    rows_first: bool,
    stand_ins: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaves = [leaf(2, n, 7, width, rows_first) for n in (heads, kv, kv)]
    assert_equals_eager(name, monkeypatch, leaves, None, causal)


@pytest.mark.parametrize("kind", ["seen", "one row", "added", "heads", "column"])
@pytest.mark.parametrize(("heads", "kv"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", ["plain", "cpu", "efficient"])
def test_every_kernel_with_a_mask_is_eager_attention(
    name: str, heads: int, kv: int, kind: str, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [leaf(2, n, rows, 4, True) for n, rows in ((heads, 5), (kv, 7), (kv, 7))]
    seen = torch.rand(2, 1, 5, 7) < 0.5
    seen[:, :, 2] = False
    mask = {
        "seen": seen,
        "one row": torch.rand(2, 1, 1, 7) < 0.9,
        "added": torch.randn(2, 1, 5, 7, dtype=torch.float64),
        "heads": torch.randn(1, heads, 5, 7, dtype=torch.float64),
        "column": torch.randn(2, 1, 5, 1, dtype=torch.float64),
    }[kind]
    assert_equals_eager(name, monkeypatch, leaves, mask, False)


@pytest.mark.parametrize("name", ["plain", "cudnn", "efficient"])
def test_values_of_another_width(name: str, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [leaf(2, 2, 6, 4, False), leaf(2, 2, 6, 4, False), leaf(2, 2, 6, 3, False)]
    assert_equals_eager(name, monkeypatch, leaves, None, True)


def test_an_operand_that_lies_elsewhere_is_copied(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stride over the last dim, and rows that begin at odd places."""
    turned = torch.randn(2, 2, 4, 7, dtype=torch.float64).mT.requires_grad_()
    shifted = torch.randn(2 * 2 * 7 * 4 + 1, dtype=torch.float64)[1:].view(2, 2, 7, 4).requires_grad_()
    assert_equals_eager("flash", monkeypatch, [turned, shifted, turned.detach().clone().requires_grad_()], None, True)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("name", ["cpu", "flash", "cudnn", "efficient"])
def test_operands_may_lie_in_any_order(name: str, which: int, stand_ins: None) -> None:
    """Queries, keys, values or what comes back lie with any dim last in memory."""
    shapes = [(2, 4, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4), (2, 4, 6, 4)]
    plain = config(True, 0.5)
    for order in itertools.permutations(range(4)):
        q, k, v, g = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        operands = [q, k, v, g]
        out, lse = plain_scores.attend(q, k, v, plain)
        expected = (out, lse, *plain_scores.attend_grad(g, q, k, v, out, lse, plain))
        operands[which] = lying(operands[which], order)
        q, k, v, g = operands
        found = KERNELS[name].attend(q, k, v, plain)
        grads = KERNELS[name].attend_grad(g, q, k, v, lying(found[0], order), found[1], plain)
        for ours, theirs in zip((*found, *grads), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def lying(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same numbers, whose dims lie in an order in memory."""
    return x.permute(order).contiguous().permute([order.index(i) for i in range(4)])


# --- fake CUDA tensors


def fake_results(device: Device, dtype: torch.dtype, kv: int, width: int, mask: bool) -> list[Tensor]:
    """Results and gradients of attention under fake CUDA tensors, the mask's gradient left out."""
    with fake_cuda(device):
        q, g = (torch.empty(2, 12, 4, width, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(2))
        k, v = (torch.empty(2, 12, kv, width, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(2))
        seen = torch.empty(2, 1, 12, 12, dtype=torch.bool, device="cuda") if mask else None
        out, lse = attention.attention(q, k, v, seen, 0.0, not mask, 0.5)
        return [out, lse, *attention.attention_grad(g, q, k, v, seen, out, lse, 0.0, not mask, 0.5)]


@pytest.mark.few(37)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float64])
@pytest.mark.parametrize("device", [A100, H100])
def test_fake_gpu_tensors_go_through_the_kernels_of_their_device(
    device: Device, dtype: torch.dtype, kv: int, width: int, mask: bool
) -> None:
    out, lse, dq, dk, dv = fake_results(device, dtype, kv, width, mask)
    assert {x.device.type for x in (out, lse, dq, dk, dv)} == {"cuda"}
    assert {x.dtype for x in (out, dq, dk, dv)} == {dtype}
    assert lse.dtype == (dtype if dtype == torch.float64 else F32)
    assert (out.shape, lse.shape, dq.shape) == ((2, 4, 12, width), (2, 4, 12), (2, 4, 12, width))
    assert dk.shape == dv.shape == (2, kv, 12, width)


# --- bytes


def peak(name: str, dtype: torch.dtype, heads: int, kv: int, rows: int, width: int) -> tuple[int, int]:
    """The most bytes of forward and of backward, of tensors that lie as backward reads them."""
    q, g, out = (torch.empty(2, rows, heads, width, dtype=dtype, device="meta").transpose(1, 2) for _ in range(3))
    k, v = (torch.empty(2, rows, kv, width, dtype=dtype, device="meta").transpose(1, 2) for _ in range(2))
    lse = torch.empty(2, heads, rows, dtype=F32, device="meta")
    with ByteCounter() as forward:
        held = KERNELS[name].attend(q, k, v, config(True, 0.5))
    with ByteCounter() as backward:
        held = KERNELS[name].attend_grad(g, q, k, v, out, lse, config(True, 0.5))
    assert held
    return forward.peak, backward.peak


SMALL = 64
"""Bytes of the numbers that dropout would have drawn by, and of what flash gives of a mask for debugging."""


def test_flash_needs_the_gradient_of_queries_in_float32() -> None:
    rows, width = 256, 64
    x = 2 * 4 * rows * width * 2
    forward, backward = peak("flash", BF16, 4, 4, rows, width)
    assert forward - (x + 2 * 4 * rows * 4) in range(SMALL)
    assert backward - (3 * x + 2 * 4 * rows * 4 * (1 + width)) in range(SMALL)


def test_flash_of_groups_needs_the_gradients_of_every_query_head() -> None:
    rows, width = 256, 64
    x = 2 * 4 * rows * width * 2
    backward = peak("flash", BF16, 4, 2, rows, width)[1]
    assert backward - (x + x // 2 * 2 + 2 * x + 2 * 4 * rows * 4 * (1 + width)) in range(SMALL)


def test_rows_and_widths_are_rounded_up() -> None:
    q = torch.empty(1, 1, 130, 40, dtype=BF16, device="meta")
    assert flash_grad_bytes(q, q) == 4 * 256 * (1 + 64)
    assert efficient_bytes(q, q) == 0
    assert efficient_grad_bytes(q, q) == 4 * 130 + 4 * 192 * 64
    wide = torch.empty(1, 1, 130, 160, dtype=BF16, device="meta")
    assert efficient_bytes(wide, wide) == 4 * 130 * 160
    assert efficient_grad_bytes(wide, wide) == 4 * 130 + 4 * 192 * 256 + 4 * 3 * 64 * 2 * 256


def test_the_efficient_kernel_needs_a_product_in_float32() -> None:
    rows, width = 256, 64
    x = 2 * 4 * rows * width * 4
    forward, backward = peak("efficient", F32, 4, 4, rows, width)
    assert forward - (x + 2 * 4 * rows * 4) in range(SMALL)
    assert backward - (3 * x + 2 * 4 * rows * 4 + x) in range(SMALL)
