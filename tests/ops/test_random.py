"""Random numbers follow the global position: no plan changes them, and they are as random as they should be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.kernels import ops
from autopar.runtime.kernels import random as rng


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(global shape, parts per dim)."""
    rank = draw(st.integers(1, 4))
    parts = tuple(draw(st.sampled_from((1, 2, 3, 4))) for _ in range(rank))
    return tuple(p * draw(st.integers(1, 3)) for p in parts), parts


@given(cuts(), st.integers(0, 2**62), st.sampled_from(["keep", "uniform", "normal", "dropout"]))
def test_any_sharding_draws_the_same_numbers(cut: tuple[tuple[int, ...], tuple[int, ...]], key: int, kind: str) -> None:
    shape, parts = cut
    local = tuple(n // p for n, p in zip(shape, parts, strict=True))

    def draw(block: tuple[int, ...], offsets: tuple[int, ...]) -> torch.Tensor:
        if kind == "keep":
            return rng.keep_mask(block, 0.4, key, shape, offsets)
        if kind == "dropout":
            return ops.dropout(torch.ones(block, dtype=torch.float64), 0.4, key, shape, offsets)
        make = rng.uniform if kind == "uniform" else rng.normal
        return make(block, torch.float64, key, shape, offsets)

    whole = draw(shape, (0,) * len(shape))
    for where in itertools.product(*(range(p) for p in parts)):
        offsets = tuple(i * n for i, n in zip(where, local, strict=True))
        block = whole[tuple(slice(o, o + n) for o, n in zip(offsets, local, strict=True))]
        assert torch.equal(draw(local, offsets), block)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_share_it_should_and_the_mean(p: float) -> None:
    n = 1 << 18
    x = torch.ones(512, n // 512, dtype=torch.float64)
    y = ops.dropout(x, p, rng.make_key(1, 2, 3))
    kept = int((y != 0).sum())
    assert abs(kept - n * (1 - p)) <= 5 * math.sqrt(n * p * (1 - p))
    if kept:
        torch.testing.assert_close(y[y != 0], torch.full((kept,), 1 / (1 - p), dtype=torch.float64))


def test_every_part_of_a_key_changes_the_draw_and_nothing_else_does() -> None:
    base = (7, 3, 0, 2, 1)  # seed, step, microbatch, call, site
    masks = [rng.keep_mask((4096,), 0.5, rng.make_key(*base))]
    for i in range(len(base)):
        masks.append(rng.keep_mask((4096,), 0.5, rng.make_key(*(b + (i == j) for j, b in enumerate(base)))))
    masks.append(rng.keep_mask((4096,), 0.5, rng.make_key(3, 7, 0, 2, 1)))
    for one, other in itertools.combinations(masks, 2):
        agree = (one == other).double().mean().item()
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(4096)
    assert torch.equal(masks[0], rng.keep_mask((4096,), 0.5, rng.make_key(*base)))


def test_no_key_of_many_is_drawn_twice() -> None:
    keys = {
        rng.make_key(0, step, micro, call, site)
        for step in range(20)
        for micro in range(4)
        for call in range(20)
        for site in range(10)
    }
    assert len(keys) == 20 * 4 * 20 * 10
    assert all(0 <= k < 2**63 for k in keys)


@pytest.mark.parametrize("shape", [(512, 512), (1, 1 << 18), (1 << 16, 4), (600, 431)])
@pytest.mark.parametrize("key", [0, 1, rng.make_key(5, 1)])
def test_neighbours_of_a_mask_do_not_know_of_each_other(shape: tuple[int, int], key: int) -> None:
    """Along rows, where four neighbours share a hash, along columns, and along both."""
    keep = rng.keep_mask(shape, 0.5, key, dtype=torch.float64).mul_(2).sub_(1)
    for down, right in itertools.product(range(9), repeat=2):
        if (down or right) and down < shape[0] and right < shape[1]:
            pairs = keep[down:, right:] * keep[: shape[0] - down, : shape[1] - right]
            assert abs(pairs.mean()) < 5 / math.sqrt(pairs.numel())


@pytest.mark.parametrize("key", [0, 1, rng.make_key(5, 1)])
def test_the_sixteen_bits_of_every_lane_are_even(key: int) -> None:
    """Each of the four lanes of a hash, by its high and by its low byte, and the bytes of neighbouring lanes together."""
    lanes = torch.cat([x.clone() for *_, x in rng._hashes(rng.merged((64, 4096), None, None, 4), key, None, 4)])
    low, high = lanes & 0xFF, (lanes >> 8) & 0xFF
    evenly = [part.view(-1, 4)[:, lane] for part in (low, high) for lane in range(4)]
    evenly += [16 * (low[:, i::4] >> 4) + (high[:, j::4] >> 4) for i, j in itertools.product(range(4), repeat=2)]
    for byte in evenly:
        counts = torch.bincount(byte.reshape(-1).long(), minlength=256).double()
        mean = counts.mean()
        assert ((counts - mean) ** 2 / mean).sum() < 255 + 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.37])
def test_rows_drop_as_many_as_independent_draws_would(p: float) -> None:
    """The number dropped in a row is binomial: its variance over rows says that draws of a row do not cluster."""
    rows, n = 4096, 1000
    dropped = n - rng.keep_mask((rows, n), p, 11, dtype=torch.float64).sum(1)
    variance = n * p * (1 - p)
    assert abs(dropped.mean() - n * p) < 5 * math.sqrt(variance / rows) + n * 2**-17
    fourth = 3 * variance**2 + variance * (1 - 6 * p * (1 - p))
    assert abs(dropped.var() - variance) < 5 * math.sqrt((fourth - variance**2) / rows) + n * 2**-17


def test_uniform_numbers_fill_the_interval_evenly() -> None:
    u = rng.uniform((1 << 18,), torch.float64, 99)
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    chi = ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum().item()
    assert chi < 63 + 5 * math.sqrt(2 * 63)
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 5 / math.sqrt(u.numel())


def test_normal_numbers_have_mean_0_variance_1_and_normal_tails() -> None:
    z = rng.normal((1 << 18,), torch.float64, 5)
    n = z.numel()
    assert z.isfinite().all()
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((z.abs() < 1).double().mean() - 0.6826894921) < 5 * 0.5 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_uniform_number_is_below_one_in_every_dtype(dtype: torch.dtype) -> None:
    u = rng.uniform((1 << 20,), dtype, 3)
    assert u.dtype == dtype
    assert u.max() < 1


@pytest.mark.few(4)
@pytest.mark.parametrize("p", [1e-5, 1e-4, 3e-3, 0.01, 0.1, 0.5, 0.999])
def test_a_rate_is_what_was_asked_for_however_small(p):
    """Dropped of 2^24 elements: within five deviations of the binomial, which tells the rate to a thousandth where p is large."""
    count, dropped = 1 << 24, 0
    for key in range(4):
        dropped += int((~rng.keep_mask((1 << 11, 1 << 11), p, key)).sum())
    assert abs(dropped - count * p) <= 5 * (count * p * (1 - p)) ** 0.5 + count * p * 1e-3
    assert torch.equal(rng.keep_mask((64, 64), p, 3), rng.keep_mask((64, 64), p, 3, dtype=torch.float32).bool())
    part = rng.keep_mask((16, 7), p, 3, (64, 64), (32, 9))
    assert torch.equal(part, rng.keep_mask((64, 64), p, 3)[32:48, 9:16])
