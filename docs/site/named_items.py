"""Docstrings of the project as Markdown: arguments and fields that a paragraph tells one after another become a list.

The project writes them as sentences that begin with their names (`model: nn.Module, or … optimizer: a factory …`), several in
a row, which Markdown would run together. This is an extension of griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe


class NamedItems(griffe.Extension):
    """Rewrites docstrings as they are read."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Rewrite what a function says of its parameters."""
        if func.docstring is not None:
            func.docstring.value = listed(func.docstring.value, [parameter.name for parameter in func.parameters])

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Rewrite what a class says of its attributes and of the parameters that make one."""
        if cls.docstring is not None:
            made = cls.members.get("__init__")
            names = [parameter.name for parameter in made.parameters] if isinstance(made, griffe.Function) else []
            cls.docstring.value = listed(cls.docstring.value, [*names, *cls.attributes])


def listed(text: str, names: Collection[str]) -> str:
    """The text with its sentences about these names as items of lists."""
    if not names:
        return text
    name = rf"(?:{'|'.join(map(re.escape, names))})(?:\([^()]*\))?"
    item = re.compile(rf"(?:^|(?<=[.;]\s))({name}(?:, {name})*): ")
    return "\n\n".join(_itemized(paragraph, item) for paragraph in re.split(r"\n\s*\n", text))


def _itemized(paragraph: str, item: re.Pattern[str]) -> str:
    """One paragraph: what stands before its first item, then a list."""
    words = " ".join(line.strip() for line in paragraph.splitlines())
    first, *rest = item.split(words)
    if not rest:
        return paragraph
    items = [f"- `{name}`: {said.strip()}" for name, said in zip(rest[::2], rest[1::2], strict=True)]
    return "\n".join(([first.strip(), ""] if first.strip() else []) + items)
