"""Statements with marks: a line is printed once, and what may differ between lines that are otherwise alike is marked in it.

Marked are local names, numbers, and quoted strings; a NUL stands on either side of a mark, which no printed text holds:

    "\\0lx_3\\0 = f(rt, \\0n3\\0, rt.params[\\0q'layers.2.w'\\0])"      x_3 = f(rt, 3, rt.params['layers.2.w'])

The shape of such a text is what is left without the names, and without the numbers in the rest: lines of one shape
can be rounds of a loop, with `3` and `'layers.2.w'` written as `i + 1` and `f'layers.{i}.w'`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

BREAK = "\t"
"""Where a statement may go on in another line; the items between two of them are joined by a comma."""

_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")
_MOST = 116

Shape = tuple[str, tuple[int, ...]]
"""A text without its names and numbers, and the numbers."""


def local(name: str) -> str:
    """A local name, marked."""
    return name if name == "_" else f"\0l{name}\0"


def number(value: int) -> str:
    """A number, marked."""
    return f"\0n{value}\0"


def quoted(text: str) -> str:
    """A string as Python writes it, marked."""
    return f"\0q{text!r}\0"


def _varies(mark: str) -> bool:
    """Whether the numbers in a mark may vary: not in names, and not where escapes hold digits."""
    return mark[0] != "l" and "\\" not in mark


def _shape_of_mark(mark: str) -> Shape:
    if not _varies(mark):
        return mark, ()
    return _NUMBER.sub("#", mark), tuple(map(int, _NUMBER.findall(mark)))


def shape(text: str) -> Shape:
    """The shape of a marked text, and its numbers in order."""
    pieces = text.split("\0")
    numbers: tuple[int, ...] = ()
    for k in range(1, len(pieces), 2):
        if pieces[k][0] == "l":
            pieces[k] = "l"
        else:
            pieces[k], varying = _shape_of_mark(pieces[k])
            numbers += varying
    return "\0".join(pieces), numbers


def fill(text: str, name: Callable[[str], str], numbers: Sequence[str | None] = ()) -> list[str]:
    """The lines of a marked text: names as `name` writes them, and every number that has an expression by that."""
    pieces = text.split("\0")
    expressions = iter(numbers)
    for k in range(1, len(pieces), 2):
        kind, value = pieces[k][0], pieces[k][1:]
        if kind == "l":
            value = name(value)
        elif numbers and _varies(pieces[k]):
            value = _by_expressions(value, [next(expressions) for _ in _NUMBER.findall(value)], kind == "q")
        pieces[k] = value
    return _broken("".join(pieces))


def _by_expressions(value: str, expressions: list[str | None], in_quotes: bool) -> str:
    """A number, or a quoted string, with expressions for numbers."""
    if not any(expressions):
        return value
    replaced = iter(expressions)
    held = "{%s}" if in_quotes else "%s"
    value = value.replace("{", "{{").replace("}", "}}") if in_quotes else value
    text = _NUMBER.sub(lambda found: held % e if (e := next(replaced)) else found[0], value)
    return f"f{text}" if in_quotes else text


def _broken(text: str) -> list[str]:
    """The lines of a statement, broken where it is too long for one."""
    opening, *items = text.split(BREAK)
    if not items:
        return text.splitlines()
    closing = items.pop()
    lines: list[str] = []
    if len(opening) > _MOST:
        targets, opening = opening.split(" = ")
        lines, opening = ["(", *_filled(targets.rstrip(",").split(", "))], f") = {opening}"
    one = f"{opening}{', '.join(items)}{closing}"
    return [*lines, *([one] if len(one) <= _MOST else [opening, *_filled(items), closing])]


def _filled(items: Sequence[str]) -> list[str]:
    """Items in lines, a comma after each."""
    lines = ["   "]
    for item in items:
        if len(lines[-1]) + len(item) > _MOST - 4:
            lines.append("   ")
        lines[-1] += f" {item},"
    return lines
