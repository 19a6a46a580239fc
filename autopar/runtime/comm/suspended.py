"""Ops that send messages themselves, so written that others can run while these travel.

Such an op is a generator, which stops where it would wait for a message:

    def _doubled(x, *, along):                  doubled, start_doubled = whole_or_suspended(_doubled)
        coming = along.start_shift(x)
        yield                                   y = doubled(x, along=…)             y_coming = start_doubled(x, along=…)
        return 2 * coming.wait()                                                    z = f(x);  y = y_coming.wait()

How often it stops may depend on data: what is left is done by `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Parts = Generator[None, None, T]


class Suspended(Generic[T]):
    """An op that has begun, and stopped while its messages travel."""

    __slots__ = ("_parts", "_result")

    def __init__(self, parts: Parts[T]) -> None:
        self._parts: Parts[T] | None = parts
        self._result: T | None = None
        self.go_on()

    def go_on(self) -> None:
        """Run on to where the op stops next."""
        if self._parts is not None:
            try:
                next(self._parts)
            except StopIteration as end:
                self._parts, self._result = None, end.value

    def wait(self) -> T:
        """Run to the end; the op's result."""
        while self._parts is not None:
            self.go_on()
        return self._result  # type: ignore[return-value]


def whole_or_suspended(op: Callable[P, Parts[T]]) -> tuple[Callable[P, T], Callable[P, Suspended[T]]]:
    """The op run to its end, and the op begun."""

    @wraps(op)
    def start(*args: P.args, **kwargs: P.kwargs) -> Suspended[T]:
        return Suspended(op(*args, **kwargs))

    @wraps(op)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        return start(*args, **kwargs).wait()

    return whole, start
