"""Branches on constants: what forward makes of numbers alone, such as a causal mask, is the same in every step.

While a model is traced its tensors have no values. Of those that are computed of numbers alone it is noted how, and where
Python asks for the value of one (`nn.Transformer` asks whether a mask is the causal one) it is computed, on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_MADE = (
    torch.full,
    torch.ones,
    torch.zeros,
    torch.arange,
    torch.eye,
    torch.linspace,
    torch.tensor,
    torch.scalar_tensor,
)
_ASKED: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__index__: int,
    Tensor.item: Tensor.item,
}
UNKNOWN = object()


@dataclass(frozen=True, eq=False)
class _Made:
    """How a tensor was computed; arguments that are tensors are ones that were made."""

    func: Any
    args: Any
    kwargs: Any


class Constants:
    """Follows what is computed of numbers alone while a model is traced."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        self._kept: dict[int, Tensor] = {}

    def answer(self, func: Any, args: Any) -> Any:
        """The value that Python asks for, if it is one of a constant; else UNKNOWN."""
        how = self._made.get(id(args[0])) if func in _ASKED and args else None
        if how is None:
            return UNKNOWN
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            state = torch.get_rng_state()
            value = _computed(how, {})
            if not torch.equal(state, torch.get_rng_state()):
                torch.set_rng_state(state)
                return UNKNOWN
            return _ASKED[func](value)

    def see(self, func: Any, args: Any, kwargs: Any, result: Any, writes: bool) -> None:
        """Note what a call of torch computes of constants alone, and forget what it writes to."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = getattr(func, "__name__", "")
        known = all(id(t) in self._made for t in tensors) and (bool(tensors) or func in _MADE) and "empty" not in name
        known = known and not torch.is_autocast_enabled("cpu")
        how = _Made(func, *tree_map_only(Tensor, lambda t: self._made[id(t)], (args, kwargs))) if known else None
        if writes or any(result is t for t in tensors):
            alone = self._forget(tensors)
            how = how if alone and name.endswith("_") and args and result is args[0] else None
        if how is not None and isinstance(result, Tensor):
            self._made[id(result)], self._kept[id(result)] = how, result

    def _forget(self, targets: list[Tensor]) -> bool:
        """Forget every constant in the memory of these; whether there was none beside them."""
        memory = {t.untyped_storage()._cdata for t in targets}
        same = [key for key, t in self._kept.items() if t.untyped_storage()._cdata in memory]
        for key in same:
            self._made.pop(key, None)
        return set(same) <= {id(t) for t in targets}


def _computed(how: _Made, values: dict[int, Tensor]) -> Tensor:
    """The value of a constant; values: of those that it shares steps with."""
    if id(how) not in values:
        args, kwargs = tree_map_only(_Made, lambda one: _computed(one, values), (how.args, how.kwargs))
        if getattr(how.func, "__name__", "").endswith("_"):
            args = (args[0].clone(), *args[1:])
        values[id(how)] = how.func(*args, **kwargs)
    return values[id(how)]
