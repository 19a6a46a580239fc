"""Which rank sends which block when a tensor goes from one stage's mesh to another's.

Every target rank needs the box of its spec; the source ranks hold boxes of theirs. The blocks are the intersections,
sent directly: each element reaches a target rank once, from a rank that has it. Where several source ranks hold the
same box, a target that is one of them keeps what it has, and the others are spread over the holders in turn. With
(8, 6) rows over dp=2 on ranks 0, 1 to columns over tp=2 on ranks 2, 3:

    0 -> 2: rows 0-3, columns 0-2      0 -> 3: rows 0-3, columns 3-5      1 -> 2, 1 -> 3: rows 4-7 likewise

A box meets a box in one block at most, so there is at most one message per pair of ranks, but where a rank holds a run of
elements, which is several boxes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ..comm.mesh import Box, SpecDims, boxes_of, held_shape, mesh_index, mesh_size, run_axes, slices_of


@dataclass(frozen=True)
class Placed:
    """A spec on a mesh that begins at a rank."""

    mesh: Mapping[str, int]
    first_rank: int
    spec: SpecDims

    def held(self, shape: Sequence[int], rank: int, what: str) -> dict[Box, int | None]:
        """The boxes that a rank holds, none where it is not on the mesh: those of a run with the place of their first element in
        it, others with None."""
        if not 0 <= rank - self.first_rank < mesh_size(self.mesh):
            return {}
        boxes = boxes_of(shape, self.spec, self.mesh, mesh_index(self.mesh, rank - self.first_rank), what)
        if not run_axes(shape, self.spec):
            return dict.fromkeys(boxes)
        return dict(zip(boxes, accumulate((math.prod(_sizes(box)) for box in boxes), initial=0), strict=False))

    def boxes(self, shape: Sequence[int], what: str) -> dict[Box, tuple[int | None, list[int]]]:
        """Every box that is held, as of `held`, and its ranks."""
        found: dict[Box, tuple[int | None, list[int]]] = {}
        for rank in range(self.first_rank, self.first_rank + mesh_size(self.mesh)):
            for box, start in self.held(shape, rank, what).items():
                found.setdefault(box, (start, []))[1].append(rank)
        return found

    def local_shape(self, shape: Sequence[int], rank: int, what: str) -> tuple[int, ...] | None:
        """The shape that a rank of the mesh holds; None of another."""
        number = rank - self.first_rank
        if not 0 <= number < mesh_size(self.mesh):
            return None
        return held_shape(shape, self.spec, self.mesh, mesh_index(self.mesh, number), what)


@dataclass(frozen=True)
class Within:
    """A block of a rank's local tensor: of the tensor itself, or of a box of a run, which begins at an element of it."""

    slices: tuple[slice, ...]
    start: int | None = None
    sizes: tuple[int, ...] = ()

    def of(self, local: Tensor) -> Tensor:
        """A view of the local tensor."""
        if self.start is None:
            return local[self.slices]
        return local.view(-1)[self.start : self.start + math.prod(self.sizes)].view(self.sizes)[self.slices]


@dataclass(frozen=True)
class Piece:
    """A block on its way: where it lies in the source's local tensor, and where in the target's."""

    source: int
    target: int
    sent: Within
    arrives: Within


def pieces(shape: Sequence[int], source: Placed, target: Placed, what: str = "tensor") -> tuple[Piece, ...]:
    """All blocks of a transfer, by source and target rank."""
    moved = []
    wanted = target.boxes(shape, what)
    for held, (at, holders) in source.boxes(shape, what).items():
        turn = 0
        for box, (start, targets) in sorted(wanted.items(), key=lambda item: item[1][1]):
            block = _meet(held, box)
            if block is None:
                continue
            for rank in targets:
                if rank in holders:
                    sender = rank
                else:
                    sender = holders[turn % len(holders)]
                    turn += 1
                moved.append(Piece(sender, rank, _within(block, held, at), _within(block, box, start)))
    return tuple(sorted(moved, key=lambda piece: (piece.source, piece.target)))


def _meet(a: Box, b: Box) -> Box | None:
    block = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return block if all(start < stop for start, stop in block) else None


def _within(block: Box, box: Box, start: int | None) -> Within:
    slices = slices_of(tuple((a - low, b - low) for (a, b), (low, _) in zip(block, box, strict=True)))
    return Within(slices) if start is None else Within(slices, start, _sizes(box))


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
