"""Rows of a table in an emitted file; those that repeat are a comprehension, in the same order.

{'layers.0.w': A, 'layers.0.b': B, 'layers.1.w': A, 'layers.1.b': B}
{**{name: row for i in range(2) for name, row in {f'layers.{i}.w': A, f'layers.{i}.b': B}.items()}}
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.codegen.marks import fill, shape
from autopar.codegen.repeats import Variable, progressions, runs

_MOST_ROWS = 8
"""The number of rows up to which they are all written out, repeated or not."""


def table_lines(rows: Sequence[str], named: bool = False) -> list[str]:
    """The lines between the brackets of a list or, `named`, of a dict. rows: marked text."""
    shapes = [shape(row) for row in rows]
    lines: list[str] = []
    written = 0
    for run in runs(shapes, lambda run: run.period * (run.count - 1) > _MOST_ROWS):
        lines += _written(rows[written : run.start])
        firsts, seconds = (shapes[run.start + k * run.period : run.start + (k + 1) * run.period] for k in (0, 1))
        numbers = [p for pair in zip(firsts, seconds, strict=True) for p in progressions(*pair)]
        variable = Variable.choose("i", run.count, numbers)
        round_ = [
            f"        {line},"
            for row, first, second in zip(rows[run.start :], firsts, seconds, strict=False)
            for line in fill(row, str, variable.expressions(first, second))
        ]
        opening, item, closing = (
            ("**{name: row", "name, row in {", "}.items()}") if named else ("*[row", "row in [", "]]")
        )
        lines += [f"    {opening} {variable.header} for {item}", *round_, f"    {closing},"]
        written = run.end
    return lines + _written(rows[written:])


def _written(rows: Sequence[str]) -> list[str]:
    return [f"    {line}," for row in rows for line in fill(row, str)]
