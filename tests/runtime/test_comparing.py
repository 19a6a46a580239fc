"""Ranks that got other data, or are slow, are found in what all tell each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.runtime.comparing import Told, checksum, odd_ranks, slow_ranks, slow_text

BATCH = [torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6), torch.zeros(0)]


@pytest.mark.parametrize(
    "other",
    [
        [BATCH[0] + 1e-7, *BATCH[1:]],
        [BATCH[0].flip(0), *BATCH[1:]],
        [BATCH[0].view(4, 3), *BATCH[1:]],
        [BATCH[0], BATCH[1].view(2, 3), BATCH[2]],
        [BATCH[0].view(torch.int32), *BATCH[1:]],
        [BATCH[1], BATCH[0], BATCH[2]],
        BATCH[:2],
    ],
)
def test_whatever_differs_changes_the_checksum(other):
    assert checksum(other) != checksum(BATCH)
    assert checksum([t.clone() for t in BATCH]) == checksum(BATCH)
    assert checksum([BATCH[0].t().contiguous().t(), *BATCH[1:]]) == checksum(BATCH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64])
def test_every_dtype_has_a_checksum(dtype):
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert checksum([x]) == checksum([x.clone()]) != checksum([x.flip(0).roll(1)])


def told(*batches: int, busy: tuple[float, ...] = ()) -> list[Told]:
    times = busy or (1.0,) * len(batches)
    return [Told(b, 2.0, 2.0 - t, f"host{r}") for r, (b, t) in enumerate(zip(batches, times, strict=True))]


@pytest.mark.parametrize(
    ("batches", "odd"),
    [
        ((7, 7, 7, 7), []),
        ((7, 7, 8, 7), [2]),
        ((8, 7, 7, 7), [0]),
        ((7, 8), [1]),
        ((7, 8, 9, 7), [1, 2]),
        ((5, 6, 6, 5), [1, 2]),
    ],
)
def test_who_got_another_batch_is_named(batches, odd):
    assert odd_ranks(batches) == odd


def test_slow_ranks_are_those_that_wait_least():
    ranks = told(1, 1, 1, 1, 1, busy=(1.0, 1.3, 1.02, 1.9, 0.98))
    assert slow_ranks(ranks) == [3, 1]
    assert slow_text(ranks, 10).startswith("slow: rank 3 (host3): busy for 190.0 ms a step, rank 1 (host1)")
    assert slow_text([replace(one, waited_s=1.0) for one in ranks], 10) == ""
