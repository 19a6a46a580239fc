"""Numbers of the data, as `.item()` and `.tolist()` give them while branches go the example's way.

    x * n, n + 1, n < 5            computed in the number's own tensor: another batch has another number
    range(n), x[:, :n], zeros(n)   the example's number, held to it when the program runs

So a number that scales or shifts is part of the program, one that is compared is a condition like those of tensors, and one that
decides a size is a constant under a guard.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.capture.explain import refusal

Answer = bool | int | float
Ask = Callable[[Tensor, Callable[[Any], Answer]], Answer]
"""The answer of the example to bool, int or float of a tensor without dims, to which the program is held."""

TEXT = (
    "makes a text of a number of the data, which is another one in every batch",
    "leave the text out of forward, or return the number beside the loss",
)
"""An act of forward that is refused, and its cure."""


class Number:
    """A number of the data: compared and computed with in its own tensor, and of the example's value where Python or torch
    needs it. What else is asked of it is an error."""

    def __init__(self, tensor: Tensor, ask: Ask) -> None:
        exact = torch.float64 if tensor.is_floating_point() else torch.int64
        self.tensor, self.ask = tensor.to(exact), ask

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` asks about: a number like that of `.item()`."""
        return float if self.tensor.is_floating_point() else int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call of torch with a number in it runs with what `with_operands` has in its place."""
        args, kwargs = with_operands(func, args, kwargs or {})
        return func(*args, **kwargs)

    def exact(self) -> int | float:
        """The example's number, to which the program is held."""
        return float(self) if self.tensor.is_floating_point() else int(self)

    def __bool__(self) -> bool:
        return bool(self.ask(self.tensor, bool))

    def __int__(self) -> int:
        return int(self.ask(self.tensor, int))

    def __index__(self) -> int:
        if self.tensor.is_floating_point():
            raise TypeError("a float is no index")
        return int(self)

    def __float__(self) -> float:
        return float(self.ask(self.tensor, float))

    def __hash__(self) -> int:
        return hash(self.exact())

    def __str__(self) -> str:
        return format(self)

    def __format__(self, how: str) -> str:
        """The text of an integer is that of the example's; a float is another one in every batch."""
        if self.tensor.is_floating_point():
            raise refusal(*TEXT)
        return format(int(self), how)

    def __neg__(self) -> Number:
        return Number(-self.tensor, self.ask)

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return Number(self.tensor.abs(), self.ask)

    def __pow__(self, exponent: Any) -> Any:
        """Powers of integers are integers where the exponent is one that is not negative."""
        exponent = exponent.exact() if type(exponent) is Number else exponent
        if type(exponent) not in (bool, int, float):
            return NotImplemented
        whole = type(exponent) is not float and exponent >= 0
        return Number(torch.pow(self.tensor if whole else self.tensor.double(), exponent), self.ask)

    def __rpow__(self, base: Any) -> Any:
        return base ** self.exact() if type(base) in (bool, int, float) else NotImplemented

    def _with(self, other: Any, f: Callable[[Any, Any], Tensor], swapped: bool = False) -> Any:
        if type(other) is Number:
            other = other.tensor
        elif type(other) not in (bool, int, float):
            return NotImplemented
        own = self.tensor.double() if type(other) is float or f is operator.truediv else self.tensor  # not float32
        if f in _DIVISIONS:
            divisor = own if swapped else other
            zero = self.ask(divisor == 0, bool) if isinstance(divisor, Tensor) else divisor == 0
            if zero:
                raise ZeroDivisionError("division by zero")
        return f(other, own) if swapped else f(own, other)


_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


def _computed(f: Callable[[Any, Any], Tensor], swapped: bool) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        result = self._with(other, f, swapped)
        return result if result is NotImplemented else Number(result, self.ask)

    return method


def _compared(f: Callable[[Any, Any], Tensor]) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        result = self._with(other, f)
        return result if result is NotImplemented else bool(self.ask(result, bool))

    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _compared(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(Number, f"__{_name}__", _computed(getattr(operator, _name), False))
    setattr(Number, f"__r{_name}__", _computed(getattr(operator, _name), True))


# --- numbers, and tensors in the place of numbers, as arguments of torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARITHMETIC = _names(
    "add sub rsub mul div truediv rdiv rtruediv pow rpow floor_divide floordiv rfloordiv remainder mod rmod fmod lt le gt ge eq "
    "ne less less_equal greater greater_equal not_equal multiply divide true_divide subtract radd rmul where masked_fill clamp "
    "clip clamp_min clamp_max fill iadd isub imul itruediv ipow ifloordiv imod"
)
"""Functions of torch, by name, that take a number as they take a tensor without dims."""
_FILLED = {"full": 1, "full_like": 1, "new_full": 2}
"""Functions that fill a new tensor with a number → the place of the number."""
_SIZES = dict.fromkeys(_names("zeros ones empty rand randn randint arange linspace eye full"), 0) | dict.fromkeys(
    _names(
        "view reshape expand repeat tile split split_with_sizes unsafe_split chunk narrow select topk roll new_zeros new_ones "
        "new_empty new_full unflatten pad unfold tril triu one_hot interpolate getitem setitem repeat_interleave"
    ),
    1,
)
"""Functions whose arguments from this place on are numbers, also where they are given as tensors without dims."""


def with_operands(func: Any, args: Any, kwargs: Mapping[str, Any], ask: Ask | None = None) -> tuple[Any, Any]:
    """The arguments of a call of torch with tensors in the place of numbers of the data where it takes them, and the example's
    numbers elsewhere. ask: also for tensors without dims that stand for sizes."""
    name = getattr(func, "__name__", "").strip("_")
    args, kwargs = tuple(args), dict(kwargs)
    if ask is not None and name in _SIZES:
        args = tuple(a if i < _SIZES[name] else _sized(a, ask, name) for i, a in enumerate(args))
        kwargs = {key: _sized(a, ask, name) if key in ("size", "output_size") else a for key, a in kwargs.items()}
    if not any(_holds_number(a) for a in (*args, *kwargs.values())):
        return args, kwargs
    if name in _ARITHMETIC:
        like = next((a for a in args if isinstance(a, Tensor) and not (name == "where" and a is args[0])), None)
        either = name in ("clamp", "clip")
        return (
            tuple(_operand(a, like, either) for a in args),
            {key: _exact(a) if key == "alpha" else _operand(a, like, either) for key, a in kwargs.items()},
        )
    return tuple(map(_exact, args)), {key: _exact(a) for key, a in kwargs.items()}


def filled(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of a call that fills a tensor with a number of the data, or makes one of several; None for others."""
    name = getattr(func, "__name__", "")
    if func in (torch.tensor, torch.as_tensor) and args and _holds_number(args[0]):
        return _tensor_of(args[0], kwargs)
    if name not in _FILLED:
        return None
    place = _FILLED[name]
    value = args[place] if len(args) > place else kwargs.get("fill_value")
    if type(value) is not Number:
        return None
    rest = {key: one for key, one in kwargs.items() if key != "fill_value"}
    kind = value.tensor.dtype if not value.tensor.is_floating_point() else torch.get_default_dtype()
    if name == "full":
        rest.setdefault("dtype", kind)
    return func(*args[:place], 0, **rest) + value.tensor.to(rest.get("dtype") or args[0].dtype)


def _tensor_of(value: Any, kwargs: Mapping[str, Any]) -> Tensor:
    leaves: list[Any] = [value] if type(value) is Number else list(value)
    if not all(type(one) in (Number, bool, int, float) for one in leaves):
        raise refusal(
            "makes a tensor of lists of numbers that the data gives", "stack the tensors themselves: torch.stack([…])"
        )
    floating = any(isinstance(one, float) for one in leaves)
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if floating else torch.int64)
    device = kwargs.get("device")
    tensors = [
        (
            one.tensor
            if type(one) is Number
            else torch.scalar_tensor(one, dtype=torch.float64 if floating else torch.int64)
        ).to(dtype=dtype, device=device)
        for one in leaves
    ]
    return tensors[0].clone() if type(value) is Number else torch.stack(tensors)


def _holds_number(value: Any) -> bool:
    if isinstance(value, slice):
        return any(map(_holds_number, (value.start, value.stop, value.step)))
    return type(value) is Number or (isinstance(value, (list, tuple)) and any(map(_holds_number, value)))


def _mapped(value: Any, f: Callable[[Any], Any]) -> Any:
    """f of every value in lists, tuples and slices."""
    if isinstance(value, slice):
        return slice(*(_mapped(one, f) for one in (value.start, value.stop, value.step)))
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, f) for one in value)
    return f(value)


def _exact(value: Any) -> Any:
    return _mapped(value, lambda one: one.exact() if type(one) is Number else one)


def _sized(value: Any, ask: Ask, name: str) -> Any:
    """A size, or sizes, as numbers. Tensors that index are integers without dims where they stand alone."""

    def number(one: Any) -> Any:
        whole = isinstance(one, Tensor) and one.ndim == 0 and not one.is_floating_point() and one.dtype != torch.bool
        return int(ask(one.detach(), int)) if whole and not one.is_complex() else one

    if name == "setitem" and not isinstance(value, (slice, tuple)):
        return value  # what is written
    return _mapped(value, number)


def _operand(value: Any, like: Tensor | None, either: bool) -> Any:
    """A number of the data as a tensor of the dtype that torch computes with beside `like`. either: also Python's numbers."""
    if type(value) is not Number:
        if like is None or not either or not isinstance(value, (int, float)):
            return value
        dtype = torch.result_type(like, value)
        return torch.scalar_tensor(value, dtype=dtype, device=like.device)
    if like is None:
        floating = value.tensor.is_floating_point()
        return value.tensor.to(torch.get_default_dtype()) if floating else value.tensor
    dtype = torch.result_type(like, 0.0 if value.tensor.is_floating_point() else 0)
    low = dtype in (torch.bfloat16, torch.float16) and like.ndim
    return value.tensor.to(torch.float32 if low else dtype)
