"""The visible scores of a matrix whose rows and keys are blocks of a sequence, as rectangles and triangles.

Row r of the sequence sees keys <= r under a causal mask. Of a run of rows and a run of keys that means: the keys before
the rows are seen by all of them, the keys after them by none, and where the two runs meet there is a square of which the
lower triangle is seen:

    keys   0 1 2 3 4 5
    row 2  x x x . . .        rows 2..4, keys 0..5:  keys 0, 1 full; rows and keys 2..4 the triangle; key 5 skipped
    row 3  x x x x . .
    row 4  x x x x x .

A block is a tuple of runs, in the order in which it holds them, so an order of the sequence in which a rank holds several
runs is another tuple here and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """Positions start, start + 1, … stop - 1 of the sequence."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(self.stop - self.start, 0)


Block = tuple[Run, ...]


class Piece(NamedTuple):
    """Rows and keys of the sequence that see each other: all of them, or the lower triangle of a square.

    row, key: where the runs start in the blocks that hold them. column: where the keys start among those of all blocks.
    """

    rows: Run
    keys: Run
    triangle: bool
    row: int
    key: int
    column: int


def pieces(rows: Block, keys: Block, causal: bool, before: int = 0) -> Iterator[Piece]:
    """The pieces of a block of keys that a block of rows sees, no score twice. before: keys of the blocks before this one."""
    row = 0
    for row_run in rows:
        key = 0
        for key_run in keys:
            for r, k, triangle in _seen(row_run, key_run) if causal else [(row_run, key_run, False)]:
                if r.size and k.size:
                    place = key + k.start - key_run.start
                    yield Piece(r, k, triangle, row + r.start - row_run.start, place, before + place)
            key += key_run.size
        row += row_run.size


def _seen(rows: Run, keys: Run) -> Iterator[tuple[Run, Run, bool]]:
    """The keys before the rows, the square where they meet, and the rows after it."""
    low, high = max(rows.start, keys.start), min(rows.stop, keys.stop)
    yield Run(low, rows.stop), Run(keys.start, min(low, keys.stop)), False
    if low < high:
        yield Run(low, high), Run(low, high), True
        yield Run(high, rows.stop), Run(low, high), False
