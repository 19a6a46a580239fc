"""Masks that select rows, and when two of them are the same: one tensor, views of it, or what was computed alike of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_COMPARES = frozenset(
    (
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "bitwise_xor",
        "isnan",
        "isfinite",
        "isinf",
        "bool",
        "and",
        "or",
        "xor",
        "invert",
    )
)
"""Functions whose results are the same wherever their arguments are, without the underscores of operators."""


@dataclass(frozen=True, eq=False)
class RowMask:
    """A mask of rows. grid: in its own shape, a copy of what the user has; key: of two masks that are the same as far as they are
    flat; held: what the key names by its place in memory; masks: those of the same step."""

    grid: Tensor
    key: Any
    held: Any
    masks: RowMasks

    @functools.cached_property
    def flat(self) -> Tensor:
        return self.grid.flatten()

    @property
    def count(self) -> Tensor:
        """How many rows it selects, which stands for their number in sizes too."""
        if self.key not in self.masks.counts:
            count = self.grid.sum()
            count._selects_by = self  # type: ignore[attr-defined]
            self.masks.counts[self.key] = count
        return self.masks.counts[self.key]

    def like(self, mask: Tensor, ndim: int, dim: int) -> Tensor:
        """A mask in the dims from `dim` on of a tensor with so many."""
        return mask.reshape(*[1] * dim, *mask.shape, *[1] * (ndim - dim - mask.ndim))


@dataclass(frozen=True, eq=False)
class RowMasks:
    """The masks of a step, each once. hold: called with a tensor without dims and its truth, which is checked when the program
    runs."""

    hold: Callable[[Tensor, bool], None]
    by_key: dict[Any, RowMask] = field(default_factory=dict)
    counts: dict[Any, Tensor] = field(default_factory=dict)

    def of(self, mask: Tensor) -> RowMask:
        """The mask as it is now."""
        key = key_of(mask)
        if (key, mask.shape) not in self.by_key:
            self.by_key[key, mask.shape] = RowMask(mask.clone(), key, mask, self)
        return self.by_key[key, mask.shape]

    def noted(self) -> tuple[int, int]:
        """How many masks and numbers of rows are known."""
        return len(self.by_key), len(self.counts)


def is_noted(tensor: Tensor) -> bool:
    """Whether it is known how a tensor was computed of masks, or whose number of rows it is."""
    return count_of(tensor) is not None or getattr(tensor, "_computed_as", None) is not None


def count_of(value: Any) -> RowMask | None:
    """The mask whose number of rows a value is; None for any other value."""
    return getattr(value, "_selects_by", None) if isinstance(value, Tensor) else None


def key_of(tensor: Tensor) -> Any:
    """A key that tensors share whose elements are the same, one after another."""
    base = tensor._base
    if base is not None and base.numel() == tensor.numel() and base.is_contiguous() and tensor.is_contiguous():
        tensor = base
    made = getattr(tensor, "_computed_as", None)
    if made is not None and made[0] == tensor._version:
        return made[1]
    return id(tensor), tensor._version


def note(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Note how a mask was computed; a tensor without dims is none that selects rows."""
    if not isinstance(result, Tensor) or result.dtype != torch.bool or kwargs or any(result is a for a in args):
        return
    if result.dim() == 0:
        return
    name = getattr(func, "__name__", "").strip("_")
    tensors = [a for a in args if isinstance(a, Tensor)]
    if name not in _COMPARES or not tensors or not all(isinstance(a, (Tensor, bool, int, float)) for a in args):
        return
    shapes = tuple(tuple(t.shape) for t in tensors) if len(tensors) > 1 else ()
    key = (name, tuple(key_of(a) if isinstance(a, Tensor) else a for a in args), shapes)
    result._computed_as = result._version, key, tensors  # type: ignore[attr-defined]
