"""Results that are found once and known for as long as somebody plans: a task's prices own them, and they go with the task.

    memo = Memo()
    memo[steps_between](letters, owed)              a function of arguments that tell everything
    memo.get((bill, lowered), lambda: bill(...))    a key that tells as much as the arguments

What is found about one object and known for as long as that lives is in `once.py`. A cache of a module is for what follows from
the code alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Memo:
    """Results of functions so far."""

    def __init__(self) -> None:
        self._functions: dict[Callable[..., Any], Any] = {}
        self._results: dict[Hashable, Any] = {}

    def __getitem__(self, function: Callable[Given, Result]) -> Callable[Given, Result]:
        """The same function, which is run once for the same arguments."""
        if function not in self._functions:
            self._functions[function] = functools.cache(function)
        known: Callable[Given, Result] = self._functions[function]
        return known

    def get(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """The result of a key, made when it is first asked for."""
        if key not in self._results:
            self._results[key] = make()
        result: Result = self._results[key]
        return result
