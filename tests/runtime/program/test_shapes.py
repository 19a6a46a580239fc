"""Which bucket a batch runs in, and how it is padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.errors import GuardError
from autopar.runtime.guards import InputLike
from autopar.runtime.program.shapes import Shapes

SIZES = (8, 16, 32)


def likes(batch: int, length: int) -> list[InputLike]:
    return [
        InputLike("ids", (batch, length), (torch.int64,), 0),
        InputLike("labels", (batch, length), (torch.int64,), 0),
        InputLike("weight", (batch,), (torch.float32,), 0),
    ]


def batch_of(size: int, length: int) -> list[torch.Tensor]:
    ids = torch.arange(size * length).reshape(size, length)
    return [ids, ids + 1, torch.ones(size)]


SHAPES = Shapes([likes(4, n) for n in reversed(SIZES)] + [likes(3, n) for n in SIZES], {"ids": 7, "labels": -100})


@given(st.sampled_from((3, 4)), st.integers(1, 40))
def test_a_batch_runs_in_the_smallest_bucket_that_holds_it(size: int, length: int) -> None:
    batch, wanted = batch_of(size, length), min((n for n in SIZES if n >= length), default=None)
    if wanted is None:
        with pytest.raises(GuardError, match="fits none of the program's buckets"):
            SHAPES.of(batch)
        return
    place, padded = SHAPES.of(batch)
    assert [like.shape for like in SHAPES.buckets[place]] == [tuple(t.shape) for t in padded]
    assert SHAPES.buckets[place][0].shape == (size, wanted)
    for leaf, made, pad in zip(batch[:2], padded[:2], (7, -100), strict=True):
        assert torch.equal(made[:, :length], leaf)
        assert (made[:, length:] == pad).all()
        assert made.dtype == leaf.dtype
    assert (padded[0] is batch[0]) == (length == wanted)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_samples_are_never_made_up(size: int) -> None:
    with pytest.raises(GuardError, match="Give these sizes a bucket"):
        SHAPES.of(batch_of(size, 16))


def test_what_has_no_pad_value_is_not_padded() -> None:
    some = Shapes([likes(4, 16), likes(4, 8)], {"ids": 0})
    with pytest.raises(GuardError, match="names every input that is"):
        some.of(batch_of(4, 12))
    assert some.of(batch_of(4, 8))[0] == 1


def test_dims_in_which_buckets_do_not_differ_are_not_padded() -> None:
    wide = [InputLike("x", (4, n, 6), (torch.float32,), 0) for n in (16, 8)]
    shapes = Shapes([[like] for like in wide], {"x": 0})
    with pytest.raises(GuardError, match="fits none"):
        shapes.of([torch.zeros(4, 12, 5)])
    assert shapes.of([torch.ones(4, 12, 6)])[1][0].sum() == 4 * 12 * 6


def test_without_buckets_the_guards_judge() -> None:
    place, batch = Shapes([likes(4, 8)], {"ids": 0}).of(batch_of(4, 7))
    assert place == 0
    assert batch[0].shape == (4, 7)


def test_bools_are_padded_as_bools() -> None:
    mask = [InputLike("mask", (2, n), (torch.bool,), 0) for n in (8, 4)]
    _, (padded,) = Shapes([[like] for like in mask], {"mask": 0}).of([torch.ones(2, 6, dtype=torch.bool)])
    assert padded.dtype is torch.bool
    assert padded.sum() == 12
