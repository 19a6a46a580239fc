"""Blocks that go round the ranks of an axis, from neighbour to neighbour.

In step j rank r works on the block that started at rank r - j, while the next one is on its way to it: a rank holds two
blocks beside its own, never all of them. What the ranks make for a block is summed on the way: its sums follow it one step
behind, n - 1 hops in the block's dtype, the last of them home. (Sending every rank's part straight home would be as many
bytes over longer ways.) There a rank's own block comes last, so nothing of it is held or sent: its part is added to what
arrives.

What is large goes round in turns, some heads after the others: all that is under way, and what is made of it, is then a
fraction, and of that the first message alone is waited for, as each turn sets out while the last block of the one before is
worked on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...comm.axis_comm import Along
from ...comm.calls import Handle

Tensor = torch.Tensor
Part = tuple[int, tuple[Tensor, ...]]
"""Where along dim 2 of a block it starts, and a summand for each tensor of the block."""
Blocks = Sequence[tuple[Tensor, ...]]
"""This rank's own block, cut into one for each turn."""
MOST_TURNS, LEAST_BYTES = 4, 1 << 18
"""A part of a block: where along dim 2 of the block it starts, and a summand for each tensor of the block."""


def turns(along: Along | None, block: Sequence[Tensor]) -> int:
    """The number of turns in which a block (batch, heads, …) goes round."""
    return 1 if along is None else turn_count(block[0].shape[1], sum(x.numel() * x.element_size() for x in block))


def turn_count(heads: int, nbytes: float) -> int:
    """The most turns that share out so many heads, for a block of so many bytes."""
    most = min(MOST_TURNS, int(nbytes // LEAST_BYTES))
    return max((n for n in range(1, most + 1) if heads % n == 0), default=1)


def go_round(along: Along | None, blocks: Blocks, visit: Callable[..., None]) -> None:
    """visit(turn, rank, *block) with the block of every rank along the axis, this rank's own first. No axis: there is no other
    rank."""
    ranks, me = _place(along)
    coming = _shifted(along, blocks[0]) if ranks > 1 else []
    for turn, (own, own_of_next_turn) in enumerate(_with_next(blocks)):
        block = own
        for step in range(ranks):
            if step > 0:
                block = tuple(handle.wait() for handle in coming)
                coming = _shifted(along, block if step < ranks - 1 else own_of_next_turn)
            visit(turn, (me - step) % ranks, *block)


def go_round_and_home(
    along: Along | None, blocks: Blocks, visit: Callable[..., list[Part]]
) -> list[tuple[Tensor, ...]]:
    """visit(turn, rank, *block) with the block of every rank, this rank's own last, gives parts of a sum for it. Returns of
    every turn the sums of all ranks for this rank's own. In a step the next block and the sums for the one before are under
    way."""
    ranks, me = _place(along)
    coming = _shifted(along, blocks[0]) if ranks > 1 else []
    at_home: list[tuple[Tensor, ...]] = []
    for turn, (own, own_of_next_turn) in enumerate(_with_next(blocks)):
        coming_sums: list[Handle[Tensor]] = []
        for step in range(1, ranks + 1):
            block = own
            if step < ranks:
                block = tuple(handle.wait() for handle in coming)
                coming = _shifted(along, block if step < ranks - 1 else own_of_next_turn)
            parts = visit(turn, (me - step) % ranks, *block)
            sums = tuple(handle.wait() for handle in coming_sums) or tuple(map(_nothing, own))
            _add(sums, parts)
            del parts
            if step < ranks:
                coming_sums = _shifted(along, sums)
            else:
                at_home.append(sums)
    return at_home


def _place(along: Along | None) -> tuple[int, int]:
    return (1, 0) if along is None else (along.size, along.index)


def _with_next(blocks: Blocks) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Every block with the one of the next turn, which sets out while the last one of this turn is worked on."""
    return zip(blocks, [*blocks[1:], ()], strict=True)


def _shifted(along: Along | None, tensors: Sequence[Tensor]) -> list[Handle[Tensor]]:
    return [along.start_shift(x) for x in tensors] if along is not None else []


def _nothing(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _add(sums: Sequence[Tensor], parts: Sequence[Part]) -> None:
    """Apart, so that no name of a loop holds a part on."""
    for start, part in parts:
        for total, x in zip(sums, part, strict=True):
            total.narrow(2, start, x.shape[2]).add_(x)
