"""Branches on random numbers, as layer drop has them: `if self.training and torch.rand([]) < self.layerdrop: continue`.

A step draws anew and a program takes one way, so such a branch is an error, unless its way is known: a number drawn from
[0, 1) is never below 0 and always below 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.capture.explain import refusal

_UNIFORM: tuple[Any, ...] = (torch.rand, torch.rand_like)
_DRAWS: tuple[Any, ...] = (*_UNIFORM, torch.randn, torch.randn_like, torch.randint, torch.bernoulli, Tensor.bernoulli)
_DRAWS += (Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_)
_ASKS = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist)
_BELOW = {"lt": True, "le": True, "gt": False, "ge": False}
"""Comparison → what it says of a number from [0, 1) and a number above all of these."""


class Drawn:
    """Follows random numbers, and what is computed of them alone, while a model is traced."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._uniform: set[int] = set()
        self._truth: dict[int, bool] = {}

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed of drawn numbers alone."""
        return id(tensor) in self._kept

    def truth(self, func: Any, args: Any) -> bool | None:
        """The answer of a branch on random numbers whatever they are; None for other calls. Raises CaptureError where
        it may do either."""
        if func not in _ASKS or not args or id(args[0]) not in self._kept:
            return None
        if func is Tensor.__bool__ and id(args[0]) in self._truth:
            return self._truth[id(args[0])]
        raise refusal(
            "branches on a random number, which every step draws anew, where a program takes one way",
            "leave out what is dropped at random (layerdrop=0.0), or keep both ways: torch.where(drawn < p, a, b)",
        )

    def see(self, func: Any, args: Any, result: Any) -> None:
        """Note what a call of torch draws, or computes of drawn numbers alone."""
        if args and (result is args[0] or getattr(func, "__name__", "") == "__setitem__"):
            self._uniform.discard(id(args[0]))
            self._truth.pop(id(args[0]), None)
        if not isinstance(result, Tensor):
            return
        tensors = [a for a in args if isinstance(a, Tensor)]
        if func in _DRAWS or (tensors and all(id(t) in self._kept for t in tensors)):
            self._kept[id(result)] = result
        if func in _UNIFORM:
            self._uniform.add(id(result))
        elif len(args) == 2 and id(args[0]) in self._uniform and (truth := _compared(func, args[1])) is not None:
            self._truth[id(result)] = truth


def _compared(func: Any, c: Any) -> bool | None:
    """The answer of `func(u, c)` for every u in [0, 1); None where it depends on u."""
    name = getattr(func, "__name__", "")
    if name not in _BELOW or isinstance(c, bool) or not isinstance(c, (int, float)):
        return None
    if c >= 1:
        return _BELOW[name]
    if c < 0 or (c == 0 and name in ("lt", "ge")):
        return not _BELOW[name]
    return None
