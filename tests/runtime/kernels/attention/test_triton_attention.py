"""Attention with dropout in kernels of our own is the plain formula with the same mask, forward and backward."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from autopar.counter import ByteCounter
from autopar.runtime.kernels import random
from autopar.runtime.kernels.attention import attention, dropped, plain_scores, scores
from autopar.runtime.kernels.attention.attention_kernels import KERNELS
from autopar.runtime.kernels.attention.plain_scores import Config
from autopar.runtime.kernels.kernels import AttentionCall
from tests.gpu.fake_cuda import H100, fake_cuda
from tests.gpu.test_fake_steps import Calls
from tests.runtime.kernels.in_triton import DEVICE, in_triton  # noqa: F401

KEY = random.make_key(2, 3)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a block of attention; shape and offsets: of all scores, and where the block starts in them; keyed: the key
    lies in memory."""

    heads: int = 2
    kv: int = 2
    rows: int = 40
    keys: int = 40
    width: int = 20
    value: int = 20
    mask: str = ""
    causal: bool = False
    p: float = 0.3
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    keyed: bool = False

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of the result, the heads of a row side by side in some."""
        generator = torch.Generator().manual_seed(0)
        sizes = ((self.heads, self.rows, self.width), (self.kv, self.keys, self.width))
        sizes += ((self.kv, self.keys, self.value), (self.heads, self.rows, self.value))
        drawn = [torch.randn(2, n, h, w, generator=generator).to(dtype).transpose(1, 2) for h, n, w in sizes]
        return *drawn[:2], drawn[2].contiguous(), drawn[3]

    def config(self) -> Config:
        """The settings; a boolean mask hides all keys of row 3."""
        seen = torch.rand(2, 1, self.rows, self.keys, generator=torch.Generator().manual_seed(1)) < 0.5
        seen[:, :, 3] = False
        mask = {
            "": None,
            "seen": seen,
            "added": torch.linspace(-2, 2, self.heads * self.keys).view(1, -1, 1, self.keys),
        }
        return Config(mask[self.mask], self.p, self.causal, 0.3, KEY, self.shape, self.offsets)


CASES = {
    "all": Case(),
    "causal": Case(rows=70, keys=70, causal=True),
    "groups": Case(heads=4, kv=2, keys=70, causal=False),
    "one key head, causal": Case(heads=3, kv=1, causal=True),
    "widths": Case(width=33, value=5),
    "hidden": Case(mask="seen"),
    "hidden and causal": Case(mask="seen", causal=True),
    "added": Case(heads=4, kv=2, mask="added", keys=36),
    "a block of all": Case(shape=(4, 8, 100, 204), offsets=(1, 2, 3, 8)),
    "a block that begins inside a word": Case(shape=(4, 8, 100, 203), offsets=(1, 2, 3, 6)),
    "a rate close to 0": Case(p=1e-5, shape=(4, 8, 1 << 30, 1 << 30), offsets=(1, 2, 1 << 29, 1 << 29)),
    "a key in memory": Case(keyed=True),
    "scores beyond 2^60": Case(shape=(4, 8, 1 << 30, 1 << 30), offsets=(3, 6, (1 << 29) + 3, 1 << 29)),
}


def differences(case: Case, dtype: torch.dtype) -> list[float]:
    """The largest differences of results and gradients from the plain formula in float64, over its largest numbers."""
    q, k, v, g = case.operands(dtype)
    config = case.config()
    there = config._replace(mask=None if config.mask is None else config.mask.to(DEVICE))
    if case.keyed:
        there = there._replace(key=torch.tensor([1, KEY], device=DEVICE)[1])
    read = [x.to(DEVICE) for x in (q, k, v)]
    told = (there.mask, *dropped._config(*read[:2], there))
    out, lse = dropped.attend(*read, *told)  # type: ignore[arg-type]
    *grads, _ = dropped.attend_grad(g.to(DEVICE), *read, told[0], out, lse, *told[1:])  # type: ignore[arg-type]
    q, k, v, g = (x.double() for x in (q, k, v, g))
    expected = plain_scores.attend(q, k, v, config)
    wanted = (*expected, *plain_scores.attend_grad(g, q, k, v, *expected, config))
    found = [x.double().cpu() for x in (out, lse, *grads)]
    assert [x.shape for x in found] == [x.shape for x in wanted]
    return [float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True)]


@pytest.mark.few(2)
@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_plain_formula(name: str) -> None:
    assert max(differences(CASES[name], F32)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("name", ["causal", "hidden"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_sixteen_bits_are_rounded_where_products_read_them(dtype: torch.dtype, name: str) -> None:
    assert max(differences(CASES[name], dtype)) < 8 * torch.finfo(dtype).eps


@pytest.mark.usefixtures("in_triton")
def test_the_mask_is_that_of_a_cpu_to_the_bit() -> None:
    """Values that are unit vectors show the weights: of equal scores those that are kept are all alike, the others 0."""
    q, k = torch.zeros(1, 2, 24, 16), torch.zeros(1, 2, 48, 16)
    v = torch.eye(48).expand(1, 2, 48, 48)
    for p, first in ((0.4, 8), (0.4, 7), (1e-5, 0)):
        shape, offsets = (2, 4, 50, 90), (1, 1, 20, first)
        read = (x.to(DEVICE) for x in (q, k, v))
        out, _ = dropped.attend(*read, None, p, False, 1.0, KEY, None, (*shape, *offsets))
        keep = random.keep_mask((1, 2, 24, 48), p, KEY, shape, offsets)
        assert torch.equal(out.cpu() != 0, keep)


# --- which kernel


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attention_with_dropout_of_a_gpu_is_one_call_forward_and_one_backward(dtype: torch.dtype, mask: bool) -> None:
    """Nothing has the size of the scores: beside results and gradients there is δ, a number a row."""
    with fake_cuda(H100):
        q, g = (torch.empty(2, 4, 512, 64, dtype=dtype, device="cuda") for _ in range(2))
        k, v = (torch.empty(2, 2, 512, 64, dtype=dtype, device="cuda") for _ in range(2))
        seen = torch.empty(2, 1, 512, 512, dtype=torch.bool, device="cuda") if mask else None
        with Calls() as calls, ByteCounter() as counter:
            out, lse = attention.attention(q, k, v, seen, 0.1, True, 0.125, key=KEY)
        assert calls.names - {"device"} == {"attention_dropout"}
        assert counter.peak == out.nbytes + lse.nbytes
        with Calls() as calls, ByteCounter() as counter:
            grads = attention.attention_grad(g, q, k, v, seen, out, lse, 0.1, True, 0.125, key=KEY)
        assert calls.names - {"device"} == {"attention_dropout_grad"}
        assert counter.peak == sum(x.nbytes for x in grads) + lse.nbytes
    assert (out.dtype, lse.dtype, grads[1].shape) == (dtype, F32, k.shape)


def on_a_gpu(kernel: object, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a kernel is used, on a CPU that is taken for a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setitem(KERNELS, "dropped", kernel)  # type: ignore[arg-type]
    scores._equals_plain.cache_clear()
    call = AttentionCall(F32, 32, 32, dropout=True)
    return scores._equals_plain("dropped", call, True, False, torch.device("cpu"))


def test_a_kernel_that_fails_or_drops_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def attend(self, *_: object) -> None:
            raise ModuleNotFoundError("No module named 'triton'")

    class Whole:
        """The plain formula without dropout."""

        def attend(self, q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
            return plain_scores.attend(q, k, v, config._replace(p=0.0))

        attend_grad = staticmethod(plain_scores.attend_grad)

    with pytest.warns(RuntimeWarning, match="kernel dropped of attention fails: No module named 'triton' on a GPU"):
        assert not on_a_gpu(Missing(), monkeypatch)
    with pytest.warns(RuntimeWarning, match="kernel dropped of attention differs from the plain formula by"):
        assert not on_a_gpu(Whole(), monkeypatch)
    assert on_a_gpu(plain_scores, monkeypatch)
    scores._equals_plain.cache_clear()


def test_merged_pieces_drop_what_one_piece_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from the third on are a rectangle and a triangle, each with its place among all scores."""
    monkeypatch.setattr(scores, "kernel_for", lambda *_: KERNELS["plain"])
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    whole, _ = attention.attention(q, k, v, None, 0.4, True, 0.5, key=KEY)
    asked = []
    monkeypatch.setattr(plain_scores, "_dropped", lambda *given: asked.append(given[3]) or _factors(*given))
    part, _ = attention.attention(q[:, :, 3:], k, v, None, 0.4, True, 0.5, 0, 3, KEY, (1, 2, 8, 8), (0, 0, 3, 0))
    torch.testing.assert_close(part, whole[:, :, 3:], rtol=1e-9, atol=1e-9)
    assert {dropped._config(q, k, config)[-1][7] for config in asked} == {0, 3}


_factors = plain_scores._dropped


def test_a_pieces_place_is_what_a_kernel_is_told() -> None:
    q, k = torch.empty(1, 2, 5, 4), torch.empty(1, 2, 3, 4)
    config = Config(None, 0.4, False, 0.5, KEY, (4, 8, 30, 35), (3, 2, 10, 9))
    assert dropped._told(q, k, 0.4, 0.5, KEY, dropped._config(q, k, config)[-1]) == (
        (2, 5, 3),
        0.5,
        KEY,
        (3, 2, 10, 9, 8, 30, math.ceil(35 / 4)),
        1 / 0.6,
    )
