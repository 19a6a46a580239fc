"""Ranges of integers: what the values of a tensor may be, what an op may be given as an index, what a batch may hold.

table[ids] with 50257 rows       ids in Range(0, 50257), or Range(-50257, 50257) where the op counts from the end
cross entropy of 10 classes      target in Range(0, 10), or -100 where it is ignored
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Range:
    """The integers low, …, high - 1."""

    low: int
    high: int

    @staticmethod
    def of_dtype(dtype: torch.dtype) -> Range:
        """All numbers of an integer dtype, or of bool; ANY for others."""
        if dtype == torch.bool:
            return Range(0, 2)
        if dtype.is_floating_point or dtype.is_complex:
            return ANY
        limits = torch.iinfo(dtype)
        return Range(int(limits.min), int(limits.max) + 1)

    def __contains__(self, other: Range | int) -> bool:
        if isinstance(other, int):
            return self.low <= other < self.high
        return other.low >= other.high or (self.low <= other.low and other.high <= self.high)

    def joined(self, other: Range) -> Range:
        """The smallest range that holds both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


ANY = Range(-(1 << 200), 1 << 200)
"""The range of a value that is no integer."""


@dataclass(frozen=True)
class Index:
    """An operand of an op that is an index, by its number, and what it may hold."""

    operand: int
    allowed: Range


@dataclass(frozen=True)
class InputRange:
    """The integers that a batch input, by its number, may hold: those of `allowed`, and those of `also`.

    source: the place in the model that relies on it.
    """

    input: int
    allowed: Range
    also: frozenset[int]
    source: str

    def implies(self, other: InputRange) -> bool:
        """Whether a batch that meets this one meets the other."""
        also = all(one in other.allowed or one in other.also for one in self.also)
        return self.input == other.input and self.allowed in other.allowed and also
