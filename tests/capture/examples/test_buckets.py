"""The example inputs of every bucket, and what cannot be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.capture.examples.buckets import bucket_examples, checked_pad_values
from autopar.errors import InputError

INPUTS = {"ids": torch.arange(8 * 4).reshape(8, 4), "mask": torch.ones(8, 4), "image": torch.zeros(8, 3, 5, 5)}


def shapes(sizes: Any, inputs: Any = INPUTS) -> list[list[tuple[int, ...]]]:
    return [[tuple(t.shape) for t in example.values()] for example in bucket_examples(inputs, sizes)]


def test_dims_with_the_same_sizes_vary_together_and_the_largest_is_first() -> None:
    lengths = (2, 4, 6)
    assert shapes({"ids": {1: lengths}, "mask": {1: (6, 4, 2)}}) == [
        [(8, 6), (8, 6), (8, 3, 5, 5)],
        [(8, 4), (8, 4), (8, 3, 5, 5)],
        [(8, 2), (8, 2), (8, 3, 5, 5)],
    ]


def test_dims_with_other_sizes_vary_on_their_own() -> None:
    batch = {name: {0: (8, 3)} for name in INPUTS}
    sizes = {**batch, "ids": {0: (8, 3), 1: (4, 7)}, "mask": {0: (8, 3), 1: (4, 7)}}
    assert sorted(tuple(row) for row in shapes(sizes)) == sorted(
        ((b, n), (b, n), (b, 3, 5, 5)) for b in (8, 3) for n in (4, 7)
    )


def test_examples_are_cut_off_or_repeated() -> None:
    longer, shorter = bucket_examples({"ids": INPUTS["ids"]}, {"ids": {1: (3, 9)}})
    assert torch.equal(shorter["ids"], INPUTS["ids"][:, :3])
    assert torch.equal(longer["ids"], INPUTS["ids"].repeat(1, 3)[:, :9])


def test_examples_without_data_keep_their_device() -> None:
    (example,) = bucket_examples((torch.empty(4, 4, device="meta"),), {"0": {1: (9,)}})
    assert example[0].is_meta
    assert example[0].shape == (4, 9)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, "buckets maps inputs to sizes"),
        ([512], "buckets maps inputs to sizes"),
        ({"idz": {1: (4,)}}, "buckets names 'idz'; inputs are ids, mask, image"),
        ({"ids": (4, 8)}, "maps dims to their sizes"),
        ({"ids": {2: (4, 8)}}, r"names dim 2; its shape is \(8, 4\)"),
        ({"ids": {-1: (4, 8)}}, "names dim -1"),
        ({"ids": {1: ()}}, "lists different sizes"),
        ({"ids": {1: (4, 4)}}, "lists different sizes"),
        ({"ids": {1: (4, 0)}}, "lists different sizes"),
        ({"ids": {1: 4}}, "lists different sizes"),
        ({"ids": {1: tuple(range(1, 10)), 0: tuple(range(1, 11))}}, "make 90 combinations"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        bucket_examples(INPUTS, sizes)


def test_an_empty_example_cannot_be_made_longer() -> None:
    with pytest.raises(InputError, match="is empty"):
        bucket_examples({"ids": torch.zeros(8, 0)}, {"ids": {1: (4, 0 + 2)}})


@pytest.mark.parametrize(
    ("pad", "said"),
    [
        ({"idz": 0}, "pad_values names 'idz'"),
        ({"ids": 0.5}, "must be a number of torch.int64"),
        ({"ids": "0"}, "must be a number"),
        ({"mask": float("nan")}, "must be a number of torch.float32"),
        ([0], "maps inputs to numbers"),
    ],
)
def test_pad_values_that_cannot_be_are_refused(pad: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        checked_pad_values(pad, INPUTS)


def test_pad_values_are_numbers_of_the_inputs_dtypes() -> None:
    assert checked_pad_values({"ids": -100, "mask": 0.5, "image": 0}, INPUTS) == {"ids": -100, "mask": 0.5, "image": 0}
    assert checked_pad_values(None, INPUTS) == {}
