"""Lines, headings and tables that are printed, as data and as plain text.

Columns of plain text are as wide as what stands in them, so that it is the same wherever it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """The name of what follows."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head, which may be empty. right: columns of numbers, by index; indent: spaces before plain rows."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[int, ...] = ()
    title: str = ""
    indent: int = 0

    def lines(self) -> Iterator[str]:
        """The table as plain text."""
        if self.title:
            yield self.title
        table = [*([self.head] if self.head else []), *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = (
                f"{cell:>{width}}" if n in self.right else f"{cell:{width}}"
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            yield (" " * self.indent + "  ".join(cells)).rstrip()


Block = str | Heading | Table


def plain(*blocks: Block) -> str:
    """The blocks as plain text, without a line break at the end."""
    lines: list[str] = []
    for block in blocks:
        lines += [*block.lines()] if isinstance(block, Table) else [block.text if isinstance(block, Heading) else block]
    return "\n".join(lines)
