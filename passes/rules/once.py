"""Facts of a template or a program that are found once and known for as long as it lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

Subject = TypeVar("Subject")
Fact = TypeVar("Fact")


def once(find: Callable[[Subject], Fact]) -> Callable[[Subject], Fact]:
    """The same function, which looks at every object once. What it returns must not refer to the object."""
    known: WeakKeyDictionary[Subject, Fact] = WeakKeyDictionary()

    @functools.wraps(find)
    def fact_of(subject: Subject) -> Fact:
        if subject not in known:
            known[subject] = find(subject)
        return known[subject]

    return fact_of
