"""Where ranks stand: meshes of named axes, the groups of a collective, and which part of a tensor a rank holds.

Ranks are numbered row-major over the mesh axes (the last axis is the fastest), from the mesh's first rank on. With the
mesh dp=2, tp=2 from rank 4 on:

    rank 6 = (dp=1, tp=0)   group of "tp": ranks 6, 7    group of "dp": ranks 4, 6    group of ("tp", "dp"): 4, 6, 5, 7

A spec says per tensor dim which axes shard it, major first: (("dp", "tp"), ()) of an (8, 6) tensor gives rank 6 rows
4 and 5. A rank's part is a box, an interval per dim. A spec with one entry more than there are dims names there the axes
over which the elements of the box are cut in *runs*: equal parts of the elements one after another, the last filled up with
zeros. (("tp",), (), ("dp",)) of an (8, 6) tensor gives rank 6 elements 12 to 24 of rows 0 to 3. One entry more says that the
box is not cut: all of it is on one of the ranks along these axes, its *owner*. (("tp",), (), ("dp",), (0,)) gives rank 4 rows 0
to 3, rank 5 rows 4 to 7, and ranks 6 and 7 nothing.

The ranks along an axis need not hold equally much: the size of such an axis is told with their *shares*. dp=Shares((3, 2, 2))
has three ranks, of which the first holds 3 of every 7 units of a dim that has a multiple of 7.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RuntimeProgramError

SpecDims = tuple[tuple[Any, ...], ...]
Box = tuple[tuple[int, int], ...]


class Shares(int):
    """The size of a mesh axis along which ranks hold blocks of unequal size: of a dim of so many units they hold so many each.

    `Shares((4, 3), (9, 8))` is an axis of two ranks: dims whose size is a multiple of 7 are cut in parts of 4/7 and 3/7, others
    that are a multiple of 17 in parts of 9/17 and 8/17, and the rest in halves. Raises ValueError where ranks would hold nothing,
    or lists differ in length.
    """

    units: tuple[tuple[int, ...], ...]

    def __new__(cls, *units: Sequence[int]) -> Shares:
        ranks = {len(one) for one in units}
        if len(ranks) != 1 or min(ranks) < 2 or any(n < 1 for one in units for n in one):
            raise ValueError(
                f"shares {units}: every list has a number of units, at least one, for each of two ranks or more"
            )
        size = super().__new__(cls, ranks.pop())
        size.units = tuple(tuple(map(int, one)) for one in units)
        return size

    def fitting(self, size: int) -> tuple[int, ...]:
        """The first list of units that a dim of this size is a multiple of; none where there is none."""
        return next((units for units in self.units if size and size % sum(units) == 0), ())

    def of(self, size: int) -> tuple[int, ...] | None:
        """The lengths that ranks hold of a dim of this size, by the list that fits it; None where none does."""
        units = self.fitting(size)
        return tuple(n * (size // sum(units)) for n in units) or None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shares) and self.units == other.units

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.units)

    def __repr__(self) -> str:
        return f"Shares({', '.join(map(repr, self.units))})"

    def __reduce__(self) -> tuple[type[Shares], tuple[tuple[int, ...], ...]]:
        return Shares, self.units


def told_sizes(mesh: Mapping[str, int]) -> dict[str, Any]:
    """The sizes of a mesh as plain data: of an axis that is cut by shares its lists of units."""
    return {axis: size.units if isinstance(size, Shares) else size for axis, size in mesh.items()}


def sizes_of(told: Mapping[str, Any]) -> dict[str, int]:
    """The inverse of `told_sizes`."""
    return {axis: size if isinstance(size, int) else Shares(*size) for axis, size in told.items()}


def cut(size: int, ranks: int) -> tuple[int, ...] | int | None:
    """The lengths that ranks along an axis hold of a dim of this size, or one for all; None where it does not divide."""
    uneven = ranks.of(size) if isinstance(ranks, Shares) else None
    return uneven or (None if size % ranks else size // ranks)


def interval(
    size: int, axes: Sequence[str], mesh: Mapping[str, int], position: Mapping[str, int]
) -> tuple[int, int] | None:
    """The (start, stop) of a dim that the rank at a position of the mesh holds; None where it does not divide."""
    start = 0
    for axis in axes:
        lengths, index = cut(size, mesh[axis]), position[axis]
        if lengths is None:
            return None
        if isinstance(lengths, int):
            start, size = start + index * lengths, lengths
        else:
            start, size = start + sum(lengths[:index]), lengths[index]
    return start, start + size


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
    """The (start, stop) per dim of the part that the rank at a position of the mesh holds, or of that whose run it holds."""
    if not 0 <= len(spec) - len(shape) <= 2:
        raise RuntimeProgramError(f"{what}: spec {spec} has {len(spec)} dims, the shape {tuple(shape)} {len(shape)}")
    box = []
    for dim, (size, axes) in enumerate(zip(shape, spec, strict=False)):
        for axis in axes:
            if axis not in mesh:
                raise RuntimeProgramError(f"{what}: the mesh {dict(mesh)} has no axis {axis!r}")
        held = interval(size, axes, mesh, position)
        if held is None:
            parts = math.prod(mesh[axis] for axis in axes)
            raise RuntimeProgramError(
                f"{what}: dim {dim} of shape {tuple(shape)} cannot be split over {parts} ranks ({' × '.join(axes)})"
            )
        box.append(held)
    return tuple(box)


def cut_by_shares(spec: SpecDims, mesh: Mapping[str, int]) -> bool:
    """Whether ranks may hold blocks of unequal size under a spec."""
    return any(isinstance(mesh.get(axis), Shares) for axes in spec for axis in axes)


def slices_of(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def run_axes(shape: Sequence[int], spec: SpecDims) -> tuple[str, ...]:
    """The axes over which the elements of blocks are cut, or along which one rank has all of them."""
    return spec[len(shape)] if len(spec) > len(shape) else ()


def owner_index(shape: Sequence[int], spec: SpecDims) -> int | None:
    """The place of the rank that has all elements of a block, among those along the axes; None where these are cut."""
    return int(spec[-1][0]) if len(spec) > len(shape) + 1 else None


def index_along(axes: Sequence[str], mesh: Mapping[str, int], position: Mapping[str, int]) -> int:
    """The place of a position among the ranks along axes, major first."""
    index = 0
    for axis in axes:
        index = index * mesh[axis] + position[axis]
    return index


def is_elsewhere(shape: Sequence[int], spec: SpecDims, mesh: Mapping[str, int], position: Mapping[str, int]) -> bool:
    """Whether the rank at a position holds nothing, as another one owns the block."""
    owner = owner_index(shape, spec)
    return owner is not None and owner != index_along(run_axes(shape, spec), mesh, position)


def held_shape(
    shape: Sequence[int], spec: SpecDims, mesh: Mapping[str, int], position: Mapping[str, int], what: str = "tensor"
) -> tuple[int, ...]:
    """The shape of what the rank at a position holds: of a block that another one owns no elements."""
    block = tuple(stop - start for start, stop in box_of(shape, spec, mesh, position, what))
    axes = run_axes(shape, spec)
    if owner_index(shape, spec) is not None:
        return (0, *block[1:]) if is_elsewhere(shape, spec, mesh, position) else block
    return run_shape(block, math.prod(mesh[axis] for axis in axes)) if axes else block


def run_shape(block: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape of each of so many runs of a block: as many dims, of which the first has its elements."""
    return (-(-math.prod(block) // parts), *(1 for _ in block[1:]))


def run_boxes(block: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements of a block from one to another, one after another: as boxes, of which there are at most 2 · dims - 1.

    Of a (3, 4) block elements 2 to 11 are columns 2 and 3 of row 0, row 1, and columns 0 to 2 of row 2.
    """
    if start >= stop:
        return []
    if len(block) == 1:
        return [((start, stop),)]
    row = math.prod(block[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return [((last, last + 1), *box) for box in run_boxes(block[1:], start - last * row, stop - last * row)]
    boxes = [((first - 1, first), *box) for box in run_boxes(block[1:], start - (first - 1) * row, row)]
    if first < last:
        boxes.append(((first, last), *((0, n) for n in block[1:])))
    return [*boxes, *(((last, last + 1), *box) for box in run_boxes(block[1:], 0, stop - last * row))]


def boxes_of(
    shape: Sequence[int], spec: SpecDims, mesh: Mapping[str, int], position: Mapping[str, int], what: str = "tensor"
) -> list[Box]:
    """The parts that the rank at a position of the mesh holds: its elements are theirs, one after another, and zeros after them
    in a run that is filled up."""
    box, axes = box_of(shape, spec, mesh, position, what), run_axes(shape, spec)
    if is_elsewhere(shape, spec, mesh, position):
        return []
    if not axes or owner_index(shape, spec) is not None:
        return [box]
    block, index = [stop - start for start, stop in box], index_along(axes, mesh, position)
    length, elements = run_shape(block, math.prod(mesh[axis] for axis in axes))[0], math.prod(block)
    within = run_boxes(block, min(index * length, elements), min((index + 1) * length, elements))
    return [tuple((low + a, low + b) for (low, _), (a, b) in zip(box, part, strict=True)) for part in within]


def show_mesh(mesh: Mapping[str, int]) -> str:
    """`dp=2 × tp=2`."""
    return " × ".join(f"{axis}={size:d}" for axis, size in mesh.items()) or "one rank"
