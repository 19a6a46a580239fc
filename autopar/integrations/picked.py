"""Sums and means of the elements that a mask picks, as sums over all of them: `x[mask].sum()` has no shape before there are data.

x[mask].sum()     where(mask, x, 0).sum()
x[mask].mean()    where(mask, x, 0).sum() / mask.sum()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import InputError


class Picked:
    """The elements of a tensor that a mask of its shape picks."""

    def __init__(self, values: Tensor, mask: Tensor) -> None:
        self._values, self._mask = values, mask

    def sum(self) -> Tensor:
        """Their sum."""
        return torch.where(self._mask, self._values, 0).sum()

    def mean(self) -> Tensor:
        """Their mean; no number where there are none."""
        return self.sum() / self._mask.sum()

    def __getattr__(self, name: str) -> Any:
        raise InputError(
            f"the trainer's step picks elements by a mask and then takes {name}: how many there are depends on the data, which a "
            "program does not; use torch.where, or sums and means of what a mask picks"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.__getattr__(args[0], getattr(function, "__name__", "it"))


class PickedInSums(TorchFunctionMode):
    """A mode in which what a mask picks is a `Picked`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            values, mask = args
            if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == values.shape and mask.dim():
                return Picked(values, mask)
        return function(*args, **(kwargs or {}))
