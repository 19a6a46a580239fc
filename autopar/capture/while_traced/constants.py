"""Branches on constants: what forward makes of numbers alone, such as a causal mask, is the same in every step.

While a model is traced its tensors have no values. Of those that are computed of numbers alone it is noted how, and where
Python asks for the value of one (`nn.Transformer` asks whether a mask is the causal one) it is computed, on real tensors. What
is filled like another tensor has of that the sizes alone. A mask that is a constant selects rows that are known (`x[~eye]`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.capture.explain import refusal
from autopar.capture.while_traced.data_numbers import Ask, Number
from autopar.errors import DataError

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
_ALIKE: dict[Any, float | None] = {
    torch.ones_like: 1,
    Tensor.new_ones: 1,
    torch.zeros_like: 0,
    Tensor.new_zeros: 0,
    torch.full_like: None,
    Tensor.new_full: None,
}
"""Functions that take only sizes and dtype of a tensor, and the number that they fill in; None where an argument says it."""
_ASKED: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__index__: int,
    Tensor.item: Tensor.item,
}
_CASTS = "to type type_as contiguous cpu bool int long float double half bfloat16"
_MAY_BE_ITS_OWN = frozenset(getattr(Tensor, name) for name in _CASTS.split())
"""Methods that give the tensor itself where nothing is to be done, and never write."""
_REPEATS = (torch.repeat_interleave, Tensor.repeat_interleave)
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

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to be a constant."""
        return id(tensor) in self._made

    def answer(self, func: Any, args: Any) -> Any:
        """The value that Python asks for, if it is one of a constant; else UNKNOWN."""
        value = self._value(args[0]) if func in _ASKED and args else None
        if value is None:
            return UNKNOWN
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return _ASKED[func](value)

    def _value(self, tensor: Any) -> Tensor | None:
        """A constant on a real tensor; None for what is none, or is drawn."""
        how = self._made.get(id(tensor))
        if how is None:
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            state = torch.get_rng_state()
            value = _computed(how, {})
            if torch.equal(state, torch.get_rng_state()):
                return value
            torch.set_rng_state(state)
            return None

    def with_output_size(self, func: Any, args: Any, kwargs: Any, ask: Ask | None) -> Any:
        """The named arguments of a call, with how many rows `repeat_interleave` gives where repeats are a constant, or as many as
        for the example where that may be asked. Raises DataError where only data says."""
        if func not in _REPEATS or kwargs.get("output_size") is not None:
            return kwargs
        names = ("repeats",) if len(args) + len(kwargs.keys() - {"output_size"}) == 1 else ("input", "repeats", "dim")
        given = dict(zip(names, args, strict=False)) | kwargs
        repeats, x, dim = given.get("repeats", given.get("input")), given.get("input"), given.get("dim")
        if not isinstance(repeats, Tensor):
            return kwargs
        value = self._value(repeats) if isinstance(repeats, FakeTensor) or ask is not None else repeats
        if value is None and ask is not None:
            total = repeats.sum()
            if repeats.numel() == 1 and isinstance(x, Tensor) and x is not repeats:
                total = total * (x.numel() if dim is None else x.shape[dim])
            return {**kwargs, "output_size": int(ask(total, int))}
        if value is None:
            raise refusal(
                "repeats rows as often as a tensor says (repeat_interleave), and how many there are then depends on the data",
                "pass output_size=, their number, to which the repeats must always add up",
                DataError,
            )
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            rows = int(value.sum())
        if value.numel() == 1 and isinstance(x, Tensor) and x is not repeats:
            rows *= x.numel() if dim is None else x.shape[dim]
        return {**kwargs, "output_size": rows}

    def at_places(self, func: Any, args: Any) -> tuple[Any, Any]:
        """A call of torch, its arguments with the places that they select instead of masks that are constants."""
        if func in (Tensor.masked_select, torch.masked_select) and len(args) == 2 and args[0].shape == args[1].shape:
            func = Tensor.__getitem__
        if func is not Tensor.__getitem__:
            return func, args
        x, index = args
        parts = list(index) if isinstance(index, tuple) else [index]
        if not any(id(part) in self._made and part.dtype == torch.bool for part in parts):
            return func, args
        places: list[Any] = []
        for part in parts:
            mask = self._value(part) if isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim else None
            places += [part] if mask is None else [self._known(dim.tolist()) for dim in _coordinates(mask)]
        return func, (x, tuple(places))

    def _known(self, numbers: list[int]) -> Tensor:
        """A constant of these numbers."""
        tensor = torch.tensor(numbers, dtype=torch.long)
        self._made[id(tensor)], self._kept[id(tensor)] = _Made(torch.tensor, (numbers,), {"dtype": torch.long}), tensor
        return tensor

    def see(self, func: Any, args: Any, kwargs: Any, result: Any, writes: bool) -> None:
        """Note what a call of torch computes of constants alone, and forget what it writes to."""
        leaves = tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        name = getattr(func, "__name__", "")
        known = all(id(t) in self._made for t in tensors) and (bool(tensors) or func in _MADE) and "empty" not in name
        known = known and not torch.is_autocast_enabled("cpu") and not any(type(one) is Number for one in leaves)
        how = _Made(func, *tree_map_only(Tensor, lambda t: self._made[id(t)], (args, kwargs))) if known else None
        if how is None and func in _ALIKE:
            how = _filled(func, args, kwargs, result)
        if func in _MAY_BE_ITS_OWN and any(result is t for t in tensors):
            return
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


def _filled(func: Any, args: Any, kwargs: Any, result: Tensor) -> _Made | None:
    """How a tensor was filled like another one; None where that takes more than numbers."""
    value = _ALIKE[func]
    if value is None:
        value = kwargs.get("fill_value", args[-1])
    if not isinstance(value, (bool, int, float)) or not all(type(size) is int for size in result.shape):
        return None
    return _Made(torch.full, (tuple(result.shape), value), {"dtype": result.dtype})


def _coordinates(mask: Tensor) -> tuple[Tensor, ...]:
    """Where a mask is true, a tensor a dim."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return mask.nonzero(as_tuple=True)


def _computed(how: _Made, values: dict[int, Tensor]) -> Tensor:
    """The value of a constant; values: of those that it shares steps with."""
    if id(how) not in values:
        args, kwargs = tree_map_only(_Made, lambda one: _computed(one, values), (how.args, how.kwargs))
        if getattr(how.func, "__name__", "").endswith("_"):
            args = (args[0].clone(), *args[1:])
        values[id(how)] = how.func(*args, **kwargs)
    return values[id(how)]
