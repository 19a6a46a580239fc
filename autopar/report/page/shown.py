"""The nouns of a page: figures, tables, bars, and the folding of what is alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """A number of the answer, as text. note: what it is measured against; bad: whether it says that the plan cannot run."""

    name: str
    value: str
    note: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under a head. text_columns: how many columns from the left are words; the others are numbers."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1


@dataclass(frozen=True)
class Part:
    """A part of a bar: its amount as text, and its share of the whole."""

    name: str
    amount: str
    share: float
    idle: bool = False


@dataclass(frozen=True)
class Bar:
    """A whole cut in parts, drawn as a bar and told as a table."""

    caption: str
    whole: str
    parts: tuple[Part, ...]


def bar(caption: str, rows: Iterable[tuple[str, float]], text: Callable[[float], str], idle: Sequence[str] = ()) -> Bar:
    """A bar of the rows that are not nothing. idle: names of parts in which nothing is done."""
    kept = [(name, amount) for name, amount in rows if amount > 0]
    whole = sum(amount for _, amount in kept)
    parts = tuple(Part(name, text(amount), amount / whole, name in idle) for name, amount in kept)
    return Bar(caption, text(whole), parts)


def runs(items: Sequence[T], key: Callable[[T], Hashable]) -> Iterator[tuple[int, int]]:
    """First and last index of every run of neighbours that are alike."""
    start = 0
    keys = [key(item) for item in items]
    for i in range(1, len(items) + 1):
        if i == len(items) or keys[i] != keys[start]:
            yield start, i - 1
            start = i


def span_text(first: object, last: object) -> str:
    """`3`, or `3–7`."""
    return str(first) if first == last else f"{first}–{last}"


def share_text(share: float) -> str:
    """`12.3%`."""
    return f"{share:.1%}"
