"""Which rank sends which block when a tensor goes from one stage's mesh to another's.

Every target rank needs the box of its spec; the source ranks hold boxes of theirs. The blocks are the intersections,
sent directly: each element reaches a target rank once, from a rank that has it. Where several source ranks hold the
same box, a target that is one of them keeps what it has, and the others are spread over the holders in turn. With
(8, 6) rows over dp=2 on ranks 0, 1 to columns over tp=2 on ranks 2, 3:

    0 -> 2: rows 0-3, columns 0-2      0 -> 3: rows 0-3, columns 3-5      1 -> 2, 1 -> 3: rows 4-7 likewise

A box meets a box in one block at most, so there is at most one message per pair of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comm.mesh import Box, SpecDims, box_of, mesh_index, mesh_size


@dataclass(frozen=True)
class Placed:
    """A spec on a mesh that begins at a rank."""

    mesh: Mapping[str, int]
    first_rank: int
    spec: SpecDims

    def boxes(self, shape: Sequence[int], what: str) -> dict[Box, list[int]]:
        """Every box that is held, and its ranks_by_box."""
        ranks_by_box: dict[Box, list[int]] = {}
        for number in range(mesh_size(self.mesh)):
            box = box_of(shape, self.spec, self.mesh, mesh_index(self.mesh, number), what)
            ranks_by_box.setdefault(box, []).append(self.first_rank + number)
        return ranks_by_box


@dataclass(frozen=True)
class Piece:
    """A block on its way: where it lies in the source's local tensor, and where in the target's."""

    source: int
    target: int
    source_slices: tuple[slice, ...]
    target_slices: tuple[slice, ...]


def pieces(shape: Sequence[int], source: Placed, target: Placed, what: str = "tensor") -> tuple[Piece, ...]:
    """All blocks of a transfer, by source and target rank."""
    moved = []
    wanted = target.boxes(shape, what)
    for held, holders in source.boxes(shape, what).items():
        turn = 0
        for box, targets in sorted(wanted.items(), key=lambda item: item[1]):
            block = _meet(held, box)
            if block is None:
                continue
            for rank in targets:
                if rank in holders:
                    sender = rank
                else:
                    sender = holders[turn % len(holders)]
                    turn += 1
                moved.append(Piece(sender, rank, _within(block, held), _within(block, box)))
    return tuple(sorted(moved, key=lambda piece: (piece.source, piece.target)))


def _meet(a: Box, b: Box) -> Box | None:
    block = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return block if all(start < stop for start, stop in block) else None


def _within(block: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(block, box, strict=True))
