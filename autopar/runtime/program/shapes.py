"""Buckets: the shapes of batches that a program was compiled for, and which of them a batch is run in.

A batch whose shapes are those of a bucket runs in it. Any other is padded up to the smallest bucket that holds it: at the
end of dims in which buckets differ, with what the user named for the input; never along the batch dim, as samples that are
made up would count in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from ..errors import GuardError
from ..guards import InputLike

PadValues = Mapping[str, float]
"""The value that an input is padded with, by the input's name."""


class Shapes:
    """Which bucket a batch belongs to. buckets: the inputs of each, as it takes them. pad: by name of the input."""

    def __init__(self, buckets: Sequence[Sequence[InputLike]], pad: PadValues | None = None) -> None:
        self.buckets, self.pad = tuple(map(tuple, buckets)), dict(pad or {})
        self._exact = {tuple(like.shape for like in bucket): i for i, bucket in enumerate(self.buckets)}
        self._differ = [
            frozenset(
                d for d, sizes in enumerate(zip(*(like.shape for like in of_input), strict=True)) if len({*sizes}) > 1
            )
            for of_input in zip(*self.buckets, strict=True)
        ]

    def of(self, batch: Sequence[Tensor]) -> tuple[int, Sequence[Tensor]]:
        """The bucket of a batch, and the batch padded up to it. What fits no bucket is a GuardError; where there is one bucket
        alone, or the number of tensors is wrong, the guards of the first one say so."""
        if len(self.buckets) == 1 or len(batch) != len(self.buckets[0]):
            return 0, batch
        shapes = [tuple(leaf.shape) for leaf in batch]
        exact = self._exact.get(tuple(shapes))
        if exact is not None:
            return exact, batch
        larger = [i for i in range(len(self.buckets)) if self._holds(i, shapes)]
        if not larger:
            raise GuardError(self._none(shapes))
        place = min(larger, key=lambda i: sum(math.prod(like.shape) for like in self.buckets[i]))
        return place, [self._padded(leaf, like) for leaf, like in zip(batch, self.buckets[place], strict=True)]

    def _holds(self, place: int, shapes: Sequence[tuple[int, ...]]) -> bool:
        for shape, like, differ in zip(shapes, self.buckets[place], self._differ, strict=True):
            if len(shape) != len(like.shape):
                return False
            for dim, (size, wanted) in enumerate(zip(shape, like.shape, strict=True)):
                may_grow = like.name in self.pad and dim in differ and dim != like.batch_dim
                if size != wanted and not (size < wanted and may_grow):
                    return False
        return True

    def _padded(self, leaf: Tensor, like: InputLike) -> Tensor:
        if tuple(leaf.shape) == like.shape:
            return leaf
        more = [n for size, wanted in zip(leaf.shape, like.shape, strict=True) for n in (wanted - size, 0)]
        return F.pad(leaf, more[::-1], value=self.pad[like.name])

    def _none(self, shapes: Sequence[tuple[int, ...]]) -> str:
        given = ", ".join(f"{like.name} {shape}" for like, shape in zip(self.buckets[0], shapes, strict=True))
        known = "; ".join(", ".join(f"{like.name} {like.shape}" for like in bucket) for bucket in self.buckets)
        return (
            f"a batch of {given} fits none of the program's buckets: {known}. Give these sizes a bucket; what is shorter in "
            "other dims than the batch's can be padded, where pad_values names every input that is"
        )
