"""Blocks that go round the ranks of an axis, from neighbour to neighbour.

In step j rank r works on the block that started at rank r - j, while the next one is on its way to it: a rank holds two
blocks beside its own, never all of them. What the ranks make for a block is summed on the way: its sums follow it one step
behind, n - 1 hops in the block's dtype, the last of them home. (Sending every rank's part straight home would be as many
bytes over longer ways.) There a rank's own block comes last, so nothing of it is held or sent: its part is added to what
arrives.

What is large goes round in turns, some heads after the others: all that is under way, and what is made of it, is then a
fraction, and of that the first message alone is waited for, as each turn starts behind the end of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .along import Along
from .comm import Handle

Tensor = torch.Tensor
Part = tuple[int, tuple[Tensor, ...]]
"""Where along dim 2 of a block it starts, and a summand for each tensor of the block."""


Blocks = Sequence[tuple[Tensor, ...]]
MOST_TURNS, LEAST_BYTES = 4, 1 << 20


def turns(along: Along | None, block: Sequence[Tensor], dim: int = 1) -> int:
    """In how many turns a block goes round: as many as divide its dim, up to four; of at least a MiB each."""
    if along is None:
        return 1
    size, nbytes = block[0].shape[dim], sum(x.numel() * x.element_size() for x in block)
    most = min(MOST_TURNS, nbytes // LEAST_BYTES)
    return max((n for n in range(1, most + 1) if size % n == 0), default=1)


def go_round(along: Along | None, blocks: Blocks, visit: Callable[..., None]) -> None:
    """visit(turn, rank, *block) with the block of every rank along the axis, this rank's own first. blocks: this rank's own,
    one for each turn. No axis: this rank is the only one."""
    ranks, me = _place(along)
    for turn, own in enumerate(blocks):
        block = own
        for step in range(ranks):
            coming = _shifted(along, block) if step + 1 < ranks else []
            visit(turn, (me - step) % ranks, *block)
            block = tuple(handle.wait() for handle in coming)


def go_round_and_home(
    along: Along | None, blocks: Blocks, visit: Callable[..., list[Part]]
) -> list[tuple[Tensor, ...]]:
    """visit(turn, rank, *block) with the block of every rank, this rank's own last, gives parts of a sum for it. Returns of
    every turn the sums of all ranks for this rank's own. In a step the next block and the sums for the one before are under
    way."""
    ranks, me = _place(along)
    coming = _shifted(along, blocks[0]) if ranks > 1 else []
    at_home: list[tuple[Tensor, ...]] = []
    for turn, own in enumerate(blocks):
        coming_sums: list[Handle[Tensor]] = []
        for step in range(1, ranks + 1):
            block = tuple(handle.wait() for handle in coming) if step < ranks else own
            following = (
                block if step + 1 < ranks else blocks[turn + 1] if step == ranks and own is not blocks[-1] else ()
            )
            coming = _shifted(along, following) if ranks > 1 else []
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


def _shifted(along: Along | None, tensors: Sequence[Tensor]) -> list[Handle[Tensor]]:
    assert along is not None, "there is nobody to send to"
    return [along.start_shift(x) for x in tensors]


def _nothing(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def _add(sums: Sequence[Tensor], parts: Sequence[Part]) -> None:
    """Apart, so that no name of a loop holds a part on."""
    for start, part in parts:
        for total, x in zip(sums, part, strict=True):
            total.narrow(2, start, x.shape[2]).add_(x)
