"""Branches on data go the example's way: `if not torch.isfinite(h).all(): …`, `assert lengths.max() <= n`, `range(int(n))`.

The model runs once on the values of the example batch, and what its Python asks of tensors (the truth of a condition, a
number) is noted in order. While it is traced, where tensors have no values, the same answers are given again, and what
each answer depends on becomes one more output of the step: a condition, and the value that it must have at run time. So
the program is that of every batch that goes the example's way, and any other batch stops it.

What numbers of the data (`.item()`, `.tolist()`) may be asked is said in `data_numbers.py`.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.explain import first_line, is_user_file, refusal, user_frame
from autopar.capture.while_traced.data_numbers import Answer, Number, filled, with_operands
from autopar.errors import AutoparError, CaptureError, InputError

MOST_LISTED = 1024
"""Numbers of a tensor that becomes a list (`.tolist()`): every one that is asked about is a condition of its own."""


@dataclass(frozen=True)
class Condition:
    """A tensor without dims, whose truth must be `value`. asked: the line that asks, as in a traceback."""

    tensor: Tensor
    value: bool
    asked: str


@dataclass
class Decisions:
    """The answers of one run, in order, each with the line that asked. While a step is traced they are given again from
    the first; what they depend on is left in `conditions`. forced: the first answers, whatever the data say."""

    forced: tuple[Answer, ...] = ()
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
                value = kind(tensor) if self._given >= len(self.forced) else self.forced[self._given]
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


def decisions_of(
    step: nn.Module,
    leaves: Sequence[Tensor],
    run: Callable[[nn.Module, Decisions], Any],
    forced: tuple[Answer, ...] = (),
) -> Decisions:
    """The answers of the step on the example's leaves. run: the step once, asking these decisions. forced: see `Decisions`.
    Raises CaptureError where it fails, InputError where it has no values."""
    tensors = {f"input {i}": leaf for i, leaf in enumerate(leaves)}
    tensors |= dict(step.named_parameters()) | dict(step.named_buffers())
    for name, tensor in tensors.items():
        if tensor.is_meta or hasattr(tensor, "fake_mode"):
            raise InputError(
                f"to follow it the model is run on the example batch, and {name} holds no values (a meta or fake tensor); "
                "compile with weights and an example with values, or write the branch with torch.where"
            )
    decisions = Decisions(forced, _recording=True)
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
        ask = self.decisions.answer
        one = args[0] if args and isinstance(args[0], Tensor) and not args[0].is_complex() else None
        if one is not None and one.numel() == 1:
            if func in _ANSWERS:
                return ask(one, _ANSWERS[func])
            if func is Tensor.item:
                return self._number(one)
            if func is Tensor.__format__ and one.ndim == 0:
                return format(self._number(one), *args[1:])
        if func is Tensor.tolist and one is not None:
            return self._listed(one)
        if func in _COMPARISONS:
            return ask(_COMPARISONS[func](*args, **kwargs), bool)
        if (result := filled(func, args, kwargs)) is not None:
            return result
        args, kwargs = with_operands(func, args, kwargs, ask)
        return func(*args, **kwargs)

    def _number(self, tensor: Tensor) -> Any:
        one = tensor.detach().reshape(())
        return self.decisions.answer(one, bool) if one.dtype == torch.bool else Number(one, self.decisions.answer)

    def _listed(self, tensor: Tensor) -> Any:
        if tensor.numel() > MOST_LISTED:
            raise refusal(
                f"makes a list of {tensor.numel()} numbers of the data, and {MOST_LISTED} are the most",
                "compute with the tensor itself",
            )
        return self._number(tensor) if tensor.ndim == 0 else [self._listed(row) for row in tensor.detach().unbind()]


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).all() if a.shape == b.shape else torch.zeros((), dtype=torch.bool)


def _contains(x: Tensor, element: Any) -> Tensor:
    return (x == (element.tensor if type(element) is Number else element)).any()


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
    Tensor.__contains__: _contains,
    torch.allclose: _close,
    Tensor.allclose: _close,
}


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
