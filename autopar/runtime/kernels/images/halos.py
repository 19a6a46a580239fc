"""Halos: a rank gets the rows beyond its block that an op over windows of rows needs.

Along a dim in blocks, rank r of R wants some rows of the whole, say those that its rows of a convolution's result read:

    rows of the whole    0 1 2 3 | 4 5 6 7        blocks of 4, kernel 3, padding 1
    wanted by rank 0   . 0 1 2 3   4              `.` lies outside: filled (zero, the edge's row, its mirror image)
    wanted by rank 1           3   4 5 6 7 .

`extended` brings them; an op without padding on them makes exactly the rank's own block of results. `overlapped` is its
adjoint: what ranks computed for the rows that they want goes to whom each row belongs, and is added there. Both are one
exchange of the rows that others have, from whichever rank has them, so windows may be wider than blocks, and strides
may let blocks of results drift against blocks of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...comm.axis_comm import Along

Tensor = torch.Tensor
Run = tuple[int, int, int]
"""A run of rows of a block: whose block, its first row, how many rows. Whose is -1: rows that lie outside."""


@dataclass(frozen=True)
class Window:
    """Rank r wants the rows from r · step - before, so many. outside: what stands for rows that the whole lacks: "fill",
    its "edge" row, those that "reflect" in the edge, or those of the other end ("wrap")."""

    step: int
    before: int
    length: int
    outside: str = "fill"

    def wanted(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Runs of rows of a whole of so many: first (-1: outside) and how many, in the order of the window."""
        first = rank * self.step - self.before
        end = first + self.length
        inside = (max(first, 0), min(end, size) - max(first, 0))
        before, after = range(first, min(end, 0)), range(max(first, size), end)
        return [*self._outside(before, size), *([inside] if inside[1] > 0 else []), *self._outside(after, size)]

    def _outside(self, rows: range, size: int) -> list[tuple[int, int]]:
        if self.outside == "fill":
            return [(-1, len(rows))] if rows else []
        if self.outside == "edge":
            return [(0 if row < 0 else size - 1, 1) for row in rows]
        if self.outside == "wrap":
            return [(row % size, 1) for row in rows]
        return [(-row if row < 0 else 2 * (size - 1) - row, 1) for row in rows]


@lru_cache(maxsize=4096)
def runs(window: Window, rank: int, ranks: int, block: int) -> tuple[Run, ...]:
    """The rows that a rank wants, block by block, in the order of its window."""
    found: list[Run] = []
    for first, count in window.wanted(rank, ranks * block):
        if first < 0:
            found.append((-1, 0, count))
        while first >= 0 and count:
            whose, row = divmod(first, block)
            here = min(count, block - row)
            found.append((whose, row, here))
            first, count = first + here, count - here
    return tuple(found)


@lru_cache(maxsize=4096)
def lent(window: Window, rank: int, whose: int, ranks: int, block: int) -> tuple[tuple[int, int], ...]:
    """The rows of another rank's block that a rank wants, each once: runs of first row and how many, ascending."""
    merged: list[tuple[int, int]] = []
    for _, row, count in sorted(run for run in runs(window, rank, ranks, block) if run[0] == whose != rank):
        start, have = merged[-1] if merged else (0, 0)
        if merged and row <= start + have:
            merged[-1] = (start, max(start + have, row + count) - start)
        else:
            merged.append((row, count))
    return tuple(merged)


@lru_cache(maxsize=4096)
def most_rows(window: Window, ranks: int, block: int) -> int:
    """The most rows that a rank gets from others."""
    return max(sum(_rows(window, rank, whose, ranks, block) for whose in range(ranks)) for rank in range(ranks))


def _rows(window: Window, rank: int, whose: int, ranks: int, block: int) -> int:
    return sum(count for _, count in lent(window, rank, whose, ranks, block))


def extended(x: Tensor, dim: int, window: Window, along: Along, fill: float = 0) -> Tensor:
    """The rows that this rank wants, a new tensor. x: this rank's block; fill: what stands outside."""
    me, ranks, block = along.index, along.size, x.shape[dim]
    borrowed, places = x, {}
    if most_rows(window, ranks, block):
        going = [[x.narrow(dim, *run) for run in lent(window, to, me, ranks, block)] for to in range(ranks)]
        rows = _joined([piece for pieces in going for piece in pieces], x, dim).movedim(dim, 0)
        sent, received = _counts(window, me, ranks, block)
        borrowed = along.start_exchange(rows, sent, received).wait().movedim(0, dim)
        places = _places(window, me, ranks, block)
    pieces = []
    for whose, row, count in runs(window, me, ranks, block):
        if whose < 0:
            pieces.append(x.new_full(_shape(x, dim, count), fill))
        elif whose == me:
            pieces.append(x.narrow(dim, row, count))
        else:
            pieces.append(borrowed.narrow(dim, places[whose, row], count))
    return torch.cat(pieces, dim)


def overlapped(g: Tensor, dim: int, window: Window, along: Along, block: int) -> Tensor:
    """This rank's block of the sum of what all ranks have for the rows that they want. g: this rank's, row by row as wanted;
    what it has for rows outside belongs to nobody."""
    me, ranks = along.index, along.size
    own = g.new_zeros(_shape(g, dim, block))
    sent, received = _counts(window, me, ranks, block)
    back, places = g.new_zeros(_shape(g, dim, sum(received))), _places(window, me, ranks, block)
    at = 0
    for whose, row, count in runs(window, me, ranks, block):
        if whose >= 0:
            target, first = (own, row) if whose == me else (back, places[whose, row])
            target.narrow(dim, first, count).add_(g.narrow(dim, at, count))
        at += count
    if most_rows(window, ranks, block):
        rows = along.start_exchange(back.movedim(dim, 0), received, sent).wait().movedim(0, dim)
        at = 0
        for row, count in (run for of in range(ranks) for run in lent(window, of, me, ranks, block)):
            own.narrow(dim, row, count).add_(rows.narrow(dim, at, count))
            at += count
    return own


def _counts(window: Window, me: int, ranks: int, block: int) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to and gets from every other so that all have what they want."""
    sent = [_rows(window, other, me, ranks, block) for other in range(ranks)]
    return sent, [_rows(window, me, other, ranks, block) for other in range(ranks)]


def _places(window: Window, me: int, ranks: int, block: int) -> dict[tuple[int, int], int]:
    """Where a run of rows of another rank starts among all that this one gets, by rank and row."""
    places, at = {}, 0
    for whose in range(ranks):
        for row, count in lent(window, me, whose, ranks, block):
            places.update({(whose, row + i): at + i for i in range(count)})
            at += count
    return places


def _joined(pieces: list[Tensor], like: Tensor, dim: int) -> Tensor:
    return torch.cat(pieces, dim) if pieces else like.narrow(dim, 0, 0)


def _shape(x: Tensor, dim: int, rows: int) -> list[int]:
    return [*x.shape[:dim], rows, *x.shape[dim + 1 :]]


# --- several dims at once: emitted text names them, `along2=rt.along('sp')`


def dims_of(along: Mapping[str, Along]) -> dict[int, Along]:
    """Axes by dim of the tensor."""
    return {int(name.removeprefix("along")): axis for name, axis in along.items()}


def all_extended(x: Tensor, windows: Mapping[int, Window], dims: Mapping[int, Along], fill: float = 0) -> Tensor:
    """`extended` along every dim that has a window: the later bring the corners."""
    for dim, window in windows.items():
        x = extended(x, dim, window, dims[dim], fill)
    return x


def all_overlapped(
    g: Tensor, windows: Mapping[int, Window], dims: Mapping[int, Along], block: Sequence[int] | Mapping[int, int]
) -> Tensor:
    """`overlapped` along every dim that has a window. block: rows of this rank's block by dim."""
    for dim in reversed(list(windows)):
        g = overlapped(g, dim, windows[dim], dims[dim], block[dim])
    return g


def without(values: Sequence[int], first: int, dims: Mapping[int, Any]) -> list[int]:
    """Numbers, one per dim from `first` on, with zeros for dims that windows see to."""
    return [0 if first + i in dims else n for i, n in enumerate(values)]


def resized(shape: Sequence[int], rows: Mapping[int, int]) -> list[int]:
    """A shape with other sizes in some dims."""
    return [rows.get(dim, n) for dim, n in enumerate(shape)]


def wanted_shape(shape: Sequence[int], windows: Mapping[int, Window]) -> list[int]:
    """The shape of what a rank wants, given the shape of its block."""
    return resized(shape, {dim: window.length for dim, window in windows.items()})


def whole_shape(shape: Sequence[int], dims: Mapping[int, Along]) -> list[int]:
    """The shape of the whole, given the shape of a block."""
    return resized(shape, {dim: shape[dim] * axis.size for dim, axis in dims.items()})
