"""Branches on data taken as the example takes them: `if not torch.isfinite(h).all(): …`, `assert lengths.max() <= n`.

The model runs once on the values of the example batch, and what its Python asks of tensors (the truth of a condition, a
number) is noted in order. While it is traced, where tensors have no values, the same answers are given again, and what
each answer depends on becomes one more output of the step: a condition, and the value that it must have at run time. So
the program is that of every batch that goes the example's way, and any other batch stops it.

A number (`.item()`) may be compared and computed with, which makes conditions like those of tensors; where Python needs
the number itself (a size, a count of repetitions), it must be the example's.
"""

from __future__ import annotations

import copy
import math
import operator
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.explain import first_line, is_user_file, user_frame
from autopar.errors import AutoparError, CaptureError, InputError

Answer = bool | int | float


@dataclass(frozen=True)
class Condition:
    """A tensor without dims, whose truth must be `value`. asked: the line that asks, as in a traceback."""

    tensor: Tensor
    value: bool
    asked: str


@dataclass
class Decisions:
    """The answers of one run, in order, each with the line that asked. While a step is traced they are given again from
    the first; what they depend on is left in `conditions`."""

    answers: list[tuple[str, Answer]] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    _given: int = 0
    _recording: bool = False

    @property
    def given(self) -> int:
        """How many questions were answered so far."""
        return self._given

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within the context questions to tensors are answered as the example answers them."""
        self._given, self.conditions = 0, []
        with _Asked(self):
            yield
        if self._given != len(self.answers):
            raise _differs(self.answers[self._given][0])

    def answer(self, tensor: Tensor, kind: Callable[[Any], Answer]) -> Answer:
        """bool, int or float of a tensor with one element."""
        tensor = tensor.detach().reshape(())
        asked = asked_at()
        if self._recording:
            with torch._C.DisableTorchFunction():  # this question is not the model's
                value = kind(tensor)
            if isinstance(value, float) and math.isnan(value):
                raise CaptureError(
                    f"{' '.join(asked.split())}: nan cannot be held to the example's value; compare tensors"
                )
            self.answers.append((asked, value))
            self._given += 1
            return value
        if self._given == len(self.answers) or self.answers[self._given][0] != asked:
            raise _differs(asked)
        value = self.answers[self._given][1]
        self._given += 1
        if kind is bool:
            self.conditions.append(Condition(tensor != 0, bool(value), asked))
        else:
            exact = tensor.double() if kind is float else tensor
            self.conditions.append(Condition(exact == value, True, asked))
        return value


def decisions_of(step: nn.Module, leaves: Sequence[Tensor], run: Callable[[nn.Module, Decisions], Any]) -> Decisions:
    """The answers of the step on the example's leaves. run: the step once, asking these decisions. Raises CaptureError where
    it fails, InputError where it has no values."""
    tensors = {f"input {i}": leaf for i, leaf in enumerate(leaves)}
    tensors |= dict(step.named_parameters()) | dict(step.named_buffers())
    for name, tensor in tensors.items():
        if tensor.is_meta or hasattr(tensor, "fake_mode"):
            raise InputError(
                f'Options(branches="as-example") runs the model on the example batch, and {name} holds no values (a meta or '
                "fake tensor); compile with weights and an example with values, or write branches with torch.where"
            )
    decisions = Decisions(_recording=True)
    try:
        with torch.random.fork_rng():
            run(copy.deepcopy(step), decisions)
    except AutoparError:
        raise
    except Exception as error:
        where = user_frame(error)
        raise CaptureError(
            f"the model fails on the example batch{f' at {where}' if where else ''}: {first_line(str(error))}"
        ) from error
    decisions._recording = False
    return decisions


class _Asked(TorchFunctionMode):
    """Answers what Python asks of tensors."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self.decisions = decisions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERS and args[0].numel() == 1:
            return self.decisions.answer(args[0], _ANSWERS[func])
        if func is Tensor.item and args[0].dtype == torch.bool and args[0].numel() == 1:
            return self.decisions.answer(args[0], bool)
        if func is Tensor.item and args[0].numel() == 1 and not args[0].is_complex():
            return Number(args[0].detach().reshape(()), self.decisions)
        if func in _COMPARISONS:
            return self.decisions.answer(_COMPARISONS[func](*args, **kwargs), bool)
        return func(*args, **kwargs)


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).all() if a.shape == b.shape else torch.zeros((), dtype=torch.bool)


def _close(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.isclose(a, b, *args, **kwargs).all()


_ANSWERS: dict[Any, Callable[[Any], Answer]] = {
    Tensor.__bool__: bool,
    torch.is_nonzero: bool,
    Tensor.is_nonzero: bool,
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.__float__: float,
}
_COMPARISONS: dict[Any, Callable[..., Tensor]] = {
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _close,
    Tensor.allclose: _close,
}


class Number:
    """A number of the data, as `.item()` gives it: compared and computed with in its own tensor, and of the example's
    value where Python needs it. What else is asked of it is an error."""

    def __init__(self, tensor: Tensor, decisions: Decisions) -> None:
        exact = torch.float64 if tensor.is_floating_point() else torch.int64
        self.tensor, self.decisions = tensor.to(exact), decisions

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` asks about: a number like that of `.item()`."""
        return float if self.tensor.is_floating_point() else int

    def __bool__(self) -> bool:
        return bool(self.decisions.answer(self.tensor, bool))

    def __int__(self) -> int:
        return int(self.decisions.answer(self.tensor, int))

    def __index__(self) -> int:
        if self.tensor.is_floating_point():
            raise TypeError("a float is no index")
        return int(self)

    def __float__(self) -> float:
        return float(self.decisions.answer(self.tensor, float))

    def __hash__(self) -> int:
        return hash(int(self) if not self.tensor.is_floating_point() else float(self))

    def __str__(self) -> str:
        raise TypeError("a number that depends on the data has no text while the model is traced")

    def __format__(self, how: str) -> str:
        return str(self)

    def _with(self, other: Any, f: Callable[[Any, Any], Tensor], swapped: bool = False) -> Any:
        if type(other) is Number:
            other = other.tensor
        elif type(other) not in (bool, int, float):
            return NotImplemented
        own = self.tensor.double() if type(other) is float or f is operator.truediv else self.tensor  # not float32
        return f(other, own) if swapped else f(own, other)


def _computed(f: Callable[[Any, Any], Tensor], swapped: bool) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        result = self._with(other, f, swapped)
        return result if result is NotImplemented else Number(result, self.decisions)

    return method


def _compared(f: Callable[[Any, Any], Tensor]) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        result = self._with(other, f)
        return result if result is NotImplemented else bool(self.decisions.answer(result, bool))

    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _compared(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv"):
    setattr(Number, f"__{_name}__", _computed(getattr(operator, _name), False))
    setattr(Number, f"__r{_name}__", _computed(getattr(operator, _name), True))


def asked_at() -> str:
    """The line of the user's code that asks, as in a traceback."""
    for frame, line in traceback.walk_stack(None):
        code = frame.f_code
        if is_user_file(code.co_filename):
            return traceback.format_list([traceback.FrameSummary(code.co_filename, line, code.co_name)])[0].strip()
    return ""


def _differs(asked: str) -> CaptureError:
    where = " ".join(asked.split())
    return CaptureError(
        f"the model takes other branches while it is traced than when it runs on the example, first at {where}; write the "
        "branch with torch.where, or take it out of what is compiled"
    )
