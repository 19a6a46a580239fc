"""Objects that stand for a value of Python state while a step runs, and note whether anything asks for it.

A stand-in for a number can be added to and multiplied, one for a list can be appended to; anything else is a question.
"""

from __future__ import annotations

import collections
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


class Asked(Exception):
    """Something asked a stand-in for what it stands for."""


@dataclass
class Questions:
    """Whether a stand-in was asked for its value."""

    asked: bool = False


class StandIn:
    """Stands for a value that may be replaced, but not read."""

    def __init__(self, questions: Questions, kind: type) -> None:
        self.__dict__.update(_questions=questions, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        return _refuse(self)


class Counter(StandIn):
    """Stands for a number that is added to."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` asks about."""
        return self.__dict__["_kind"]

    def _with(self, other: object) -> Counter:
        if type(other) not in (bool, int, float, Counter):
            _refuse(self)
        floats = float in (self.__dict__["_kind"], other.__dict__["_kind"] if type(other) is Counter else type(other))
        return Counter(self.__dict__["_questions"], float if floats else int)

    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __mul__ = __rmul__ = __imul__ = _with


class Log(StandIn):
    """Stands for a list or a queue that is appended to."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` asks about."""
        return self.__dict__["_kind"]

    def append(self, item: object) -> None:
        """The item is dropped, as nobody reads the list."""

    def extend(self, items: Collection[object]) -> None:
        """The items are made, as the list would make them, and dropped."""
        collections.deque(items, maxlen=0)

    def __iadd__(self, items: Collection[object]) -> Log:
        self.extend(items)
        return self


def _refuse(self: StandIn, *args: object, **kwargs: object) -> Any:
    self.__dict__["_questions"].asked = True
    raise Asked


_QUESTIONS = """
abs bool call complex contains delitem divmod enter eq float floordiv format ge getitem gt hash index int invert iter le len lt
matmul mod ne neg next or and xor pos pow rdivmod repr reversed rfloordiv rmatmul rmod round rpow rtruediv setitem str truediv
trunc reduce_ex deepcopy copy dir bytes add radd iadd sub rsub isub mul rmul imul
"""
for _name in _QUESTIONS.split():
    setattr(StandIn, f"__{_name}__", _refuse)
