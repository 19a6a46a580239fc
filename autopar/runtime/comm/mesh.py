"""Where ranks stand: meshes of named axes, the groups of a collective, and which part of a tensor a rank holds.

Ranks are numbered row-major over the mesh axes (the last axis is the fastest), from the mesh's first rank on. With the
mesh dp=2, tp=2 from rank 4 on:

    rank 6 = (dp=1, tp=0)   group of "tp": ranks 6, 7    group of "dp": ranks 4, 6    group of ("tp", "dp"): 4, 6, 5, 7

A spec says per tensor dim which axes shard it, major first: (("dp", "tp"), ()) of an (8, 6) tensor gives rank 6 rows
4 and 5. A rank's part is always a box, an interval per dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import RuntimeProgramError

SpecDims = tuple[tuple[str, ...], ...]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Group:
    """The ranks of one collective in member order; `index` is the calling rank's place among them."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        return f"{'×'.join(self.axes)} (ranks {', '.join(map(str, self.ranks))})"


def mesh_size(mesh: Mapping[str, int]) -> int:
    """How many ranks a mesh has."""
    return math.prod(mesh.values())


def mesh_index(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """The position of a mesh's n-th rank on every axis: 2 of {dp: 2, tp: 2} is {dp: 1, tp: 0}."""
    position: dict[str, int] = {}
    for axis, size in reversed(list(mesh.items())):
        rank, position[axis] = divmod(rank, size)
    return {axis: position[axis] for axis in mesh}


def group_ranks(mesh: Mapping[str, int], rank: int, axes: tuple[str, ...], first_rank: int = 0) -> tuple[int, ...]:
    """Ranks that differ from `rank` on `axes` only, major first in the order the axes are named."""
    here = mesh_index(mesh, rank - first_rank)
    ranks = []
    for combination in itertools.product(*(range(mesh[axis]) for axis in axes)):
        position = here | dict(zip(axes, combination, strict=True))
        number = 0
        for axis, size in mesh.items():
            number = number * size + position[axis]
        ranks.append(first_rank + number)
    return tuple(ranks)


def box_of(
    shape: Sequence[int], spec: SpecDims, mesh: Mapping[str, int], position: Mapping[str, int], what: str = "tensor"
) -> Box:
    """The (start, stop) per dim of the part that the rank at a position of the mesh holds."""
    if len(spec) != len(shape):
        raise RuntimeProgramError(f"{what}: spec {spec} has {len(spec)} dims, the shape {tuple(shape)} {len(shape)}")
    box = []
    for dim, (size, axes) in enumerate(zip(shape, spec, strict=True)):
        parts, index = 1, 0
        for axis in axes:
            if axis not in mesh:
                raise RuntimeProgramError(f"{what}: the mesh {dict(mesh)} has no axis {axis!r}")
            parts, index = parts * mesh[axis], index * mesh[axis] + position[axis]
        if size % parts:
            raise RuntimeProgramError(
                f"{what}: dim {dim} of shape {tuple(shape)} cannot be split over {parts} ranks ({' × '.join(axes)})"
            )
        length = size // parts
        box.append((index * length, (index + 1) * length))
    return tuple(box)


def show_mesh(mesh: Mapping[str, int]) -> str:
    """`dp=2 × tp=2`."""
    return " × ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one rank"
