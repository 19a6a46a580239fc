"""The zigzag order of a sequence, in which contiguous blocks have equal shares of causal attention.

Row r of a causal score matrix sees r + 1 keys, so of n blocks of rows the last does almost n times the work of the first.
Cut into 2n chunks, of which rank r has the r-th from the front and the r-th from the back, every block sees as much:

    order 2, of chunks 0 1 2 3:     0 3 | 1 2      rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2

An order is this n, 0 the natural one. (Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2.)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, cat, stack

from .triangle import Block, Run


def reorder(x: Tensor, dim: int, order: int, back: bool = False, size: int = 0, inner: int = 1) -> Tensor:
    """x with the sequence in zigzag order along a dim, or `back` in the natural one. The sequence is `size` (0: all) steps of
    `inner` elements each; what is left of the dim is major to it."""
    dim = dim % x.ndim
    steps = size or x.shape[dim] // inner
    lead = x.shape[dim] // (steps * inner)
    at, rest = dim + 1, steps * inner // (2 * order)
    if back:
        pairs = x.unflatten(dim, (lead, order, 2, rest))
        natural = cat([pairs.select(at + 1, 0), pairs.select(at + 1, 1).flip(at)], at)
        return natural.flatten(dim, at + 1)
    chunks = x.unflatten(dim, (lead, 2 * order, rest))
    pairs = stack([chunks.narrow(at, 0, order), chunks.narrow(at, order, order).flip(at)], at + 1)
    return pairs.flatten(dim, at + 2)


def runs(start: int, stop: int, length: int, order: int) -> Block:
    """Positions start … stop - 1 of a sequence of this length in an order, as runs of the natural one. Neighbours stay apart, so
    that every rank works on as many pieces and holds as much of them."""
    if not order:
        return (Run(start, stop),)
    chunk = length // (2 * order)
    found: list[Run] = []
    while start < stop:
        place, inside = divmod(start, chunk)
        pair, is_from_the_back = divmod(place, 2)
        first = (2 * order - 1 - pair if is_from_the_back else pair) * chunk + inside
        end = min(start + chunk - inside, stop)
        found.append(Run(first, first + end - start))
        start = end
    return tuple(found)


class Turned(NamedTuple):
    """The orders from which rows and keys of attention are put back before it, as all of them are here; 0: they stay."""

    rows: int
    keys: int

    def back(self, x: Tensor) -> Tensor:
        """A tensor (batch, heads, rows, …) as attention takes it."""
        return reorder(x, 2, self.rows, back=True) if self.rows else x

    def keys_back(self, x: Tensor) -> Tensor:
        """A tensor (batch, heads, keys, …) as attention takes it."""
        return reorder(x, 2, self.keys, back=True) if self.keys else x

    def mask_back(self, mask: Tensor | None) -> Tensor | None:
        """A mask (batch, heads, rows, keys), of which one row or one column is one for all."""
        if mask is not None and self.keys and mask.shape[3] > 1:
            mask = reorder(mask, 3, self.keys, back=True)
        return mask if mask is None or mask.shape[2] == 1 else self.back(mask)

    def forth(self, x: Tensor) -> Tensor:
        """A result of attention for rows, put back into the order of the rows."""
        return reorder(x, 2, self.rows) if self.rows else x

    def keys_forth(self, x: Tensor) -> Tensor:
        """A result of attention for keys, put back into the order of the keys."""
        return reorder(x, 2, self.keys) if self.keys else x

    def scores_forth(self, x: Tensor) -> Tensor:
        """Scores of attention, put back into the order of rows and keys."""
        rows = self.forth(x)
        return reorder(rows, 3, self.keys) if self.keys else rows
