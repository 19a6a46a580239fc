"""Runs of a block whose elements do not divide by the ranks, on their way to these.

Rank r of n is to have run r of length L = ceil(N / n) of N elements. What is copied for messages has zeros in the place of
elements that there are not (`packed`). A large block is not copied: scattered as it lies, in chunks of f = floor(N / n), it gives
a rank all that its run has but the end. That comes with small gradients, as one of n short rows (`ends`), and both are joined.
Seven elements on three ranks, f = 2 and L = 3:

    chunks    0 1 | 2 3 | 4 5       ends    2 · · | 4 5 · | 6 0 0       runs    0 1 2 | 3 4 5 | 6 0 0
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

PARTS = 16
"""The most messages in which a large block is sent that is packed; ends are small up to one of so many parts of their runs."""


def packed(rows: Tensor, value: Tensor, start: int, length: int) -> None:
    """Copy columns of a value's runs, (ranks, width, 1, …) of them, from one on; zeros after its end. length: of a run."""
    width = rows.shape[1]
    whole, rest = divmod(value.shape[0], length)
    rows[:whole].copy_(value[: whole * length].unflatten(0, (whole, length))[:, start : start + width])
    rows[whole:].zero_()
    if start < rest:
        last = value[whole * length + start : whole * length + min(start + width, rest)]
        rows[whole : whole + 1, : last.shape[0]].copy_(last.unsqueeze(0))


def filled(value: Tensor, rows: int) -> Tensor:
    """The elements of a value, (elements, 1, …), and zeros after them, in memory of their own."""
    whole = value.new_empty(rows, *value.shape[1:])
    whole[: value.shape[0]].copy_(value)
    whole[value.shape[0] :].zero_()
    return whole


def ends_are_small(value: Tensor, ranks: int, length: int, direct: int) -> bool:
    """Whether ends are small beside the value, and too small for a message of their own, one of `direct` bytes."""
    width = _ends_width(value, ranks, length)
    return PARTS * width <= value.shape[0] // ranks and ranks * width * value.element_size() < direct


def _ends_width(value: Tensor, ranks: int, length: int) -> int:
    return ranks * (length - value.shape[0] // ranks)


def ends(value: Tensor, ranks: int, length: int) -> Tensor:
    """The elements after every chunk of a value, (elements, 1, …), one row after another: as many as the last run lacks."""
    chunk, width = value.shape[0] // ranks, _ends_width(value, ranks, length)
    rows = value.new_empty(ranks, width, *value.shape[1:])
    rows[:-1].copy_(value[chunk : ranks * chunk].unflatten(0, (ranks - 1, chunk))[:, :width])
    last = value[ranks * chunk :]
    rows[ranks - 1 :].zero_()
    rows[ranks - 1 :, : last.shape[0]].copy_(last.unsqueeze(0))
    return rows.flatten(0, 1)


@dataclass(slots=True)
class Run:
    """A rank's run, of which the chunk and the end travel apart. halves: what has arrived, by these names."""

    length: int
    rank: int
    halves: dict[str, Tensor] = field(default_factory=dict)

    def joined(self, half: str, value: Tensor) -> Tensor | None:
        """The run, once both halves have arrived."""
        self.halves[half] = value
        if len(self.halves) < 2:
            return None
        chunk, end = self.halves["chunk"], self.halves["end"]
        first = self.rank * (self.length - chunk.shape[0])
        run = chunk.new_empty(self.length, *chunk.shape[1:])
        run[: chunk.shape[0] - first].copy_(chunk[first:])
        run[chunk.shape[0] - first :].copy_(end[: self.length - chunk.shape[0] + first])
        self.halves.clear()
        return run
