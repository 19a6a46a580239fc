"""Facts of a template, a program or a stage that are found once and known for as long as it lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

Subject = TypeVar("Subject")
Fact = TypeVar("Fact")
Means = ParamSpec("Means")


def once(find: Callable[Concatenate[Subject, Means], Fact]) -> Callable[Concatenate[Subject, Means], Fact]:
    """The same function, which looks at every object once, with whatever means it is given first. What it returns must not refer
    to the object."""
    known: WeakKeyDictionary[Subject, Fact] = WeakKeyDictionary()

    @functools.wraps(find)
    def fact_of(subject: Subject, *means: Means.args, **named: Means.kwargs) -> Fact:
        if subject not in known:
            known[subject] = find(subject, *means, **named)
        return known[subject]

    return fact_of
