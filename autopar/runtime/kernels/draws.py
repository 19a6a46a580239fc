"""The numbering of random draws: which counter an element has, and which bits of its hash decide about it.

`random` makes the hashes with torch's ops, a kernel of Triton in its registers; what both must have alike stands here. A block of
a tensor is a matrix of rows and columns, and word w of row r, of W words a row, has the counter r · W + w.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

Key = int | torch.Tensor
"""A key of 63 bits, or a tensor that holds it, so that a step that is played from a graph of kernels draws anew."""
MASK64 = (1 << 64) - 1
LANES = 4
"""Decisions of 16 bits that a hash holds."""
MOST_DIMS = 4
"""Dims of a block, once it is merged, that a kernel of Triton knows the places in."""


def signed(value: int) -> int:
    """The int64 that has the bits of a number modulo 2^64."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


GOLDEN, MIX1, MIX2 = (signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Block(NamedTuple):
    """A block of a tensor: its sizes, those of the tensor, and where it starts."""

    local: tuple[int, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of as many elements, all dims but the last as one."""
        return x.view(math.prod(self.local[:-1]), self.local[-1])


def merged(local: Sequence[int], shape: Sequence[int] | None, offsets: Sequence[int] | None, lanes: int = 1) -> Block:
    """A block in as few dims as number its elements alike, at least one.

    A dim that it has whole joins the one before it, the last dim where hashes of so many lanes end with it.
    """
    block = [(1, 1, 0)]
    last = len(local) - 1
    for dim, row in enumerate(zip(local, shape or local, offsets or (0,) * len(local), strict=True)):
        n, size, start = row
        if (n == size and (dim < last or size % lanes == 0)) or block[-1] == (1, 1, 0):
            rows, of_rows, before = block.pop()
            row = (rows * n, of_rows * size, before * size + start)
        block.append(row)
    return Block(*(tuple(numbers) for numbers in zip(*block, strict=True)))


class Threshold(NamedTuple):
    """An element is kept where its bits, as a signed integer, are more than `least`; a hash decides about `lanes` of them."""

    lanes: int
    least: int


def threshold(p: float) -> Threshold:
    """The decision that drops with probability p: by 16 bits where they tell p to a thousandth, else by all of a hash."""
    coarse = abs(round(p * 65536) - p * 65536) <= p * 65536 / 1000
    lanes, bits = (LANES, 16) if coarse else (1, 64)
    return Threshold(lanes, round(p * 2**bits) - 2 ** (bits - 1) - 1)
