"""A mesh is a named grid of ranks.

Two devices as `Mesh.of(dp=2)`; eight as `Mesh.of(dp=2, tp=4)`. Ranks are numbered row-major over the axes, the last
axis fastest, so the last axis lies on the closest (fastest) links. An *axis* is a mesh's; a *dim* is a tensor's.

The size of an axis may be told with shares, `Mesh.of(dp=Shares((3, 2, 2)))`: dims of 7 units are cut in blocks of 3, 2 and 2
(`autopar/runtime/comm/mesh.py`). The length of a block is then another on every rank: an `Extent`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, Any, cast

from autopar.errors import ShardingError
from autopar.runtime.comm.mesh import Shares, cut, interval
from autopar.runtime.data.fields import Form, Identifier, Pairs, kept
from autopar.runtime.data.schema import MOST_RANKS, inside, integer, is_identifier, listed, must_be, shown

_RANKS, _UNITS = integer(1, MOST_RANKS), listed(listed(integer(1), 2, MOST_RANKS), 1, 64)


def _size(data: Any, path: str) -> int:
    """The size of an axis as a file has it: a number, or lists of units."""
    if isinstance(data, Shares) or not isinstance(data, list | tuple):
        return _RANKS(data, path)
    try:
        return Shares(*_UNITS(data, path))
    except ValueError as error:
        raise must_be(path, f"a number of ranks or lists of their units ({error})", data) from error


AxisSize = Annotated[int, Form(_size, lambda size: [*map(list, size.units)] if isinstance(size, Shares) else size)]


class Extent(int):
    """The length of a rank's block of a dim of `size` over `axes` that are cut by shares. As a number, that of the longest."""

    size: int
    axes: tuple[str, ...]

    def __new__(cls, longest: int, size: int, axes: tuple[str, ...]) -> Extent:
        extent = super().__new__(cls, longest)
        extent.size, extent.axes = size, axes
        return extent

    @property
    def told(self) -> tuple[int, tuple[str, ...]]:
        """The size and axes."""
        return self.size, self.axes

    def __eq__(self, other: object) -> bool:
        return int(self) == other and (not isinstance(other, Extent) or self.told == other.told)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Extent, (int(self), *self.told)


class Seen(Shares):
    """Shares of an axis as the rank `at` along it sees them: extents are as numbers those of its own blocks."""

    at: int

    def __new__(cls, shares: Shares, at: int) -> Seen:
        seen = cast("Seen", super().__new__(cls, *shares.units))
        seen.at = at
        return seen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and (self.units, self.at) == (other.units, other.at)

    def __hash__(self) -> int:
        return hash((self.units, self.at))

    def __reduce__(self) -> tuple[Any, ...]:
        return Seen, (Shares(*self.units), self.at)


def _cut_alike(size: int, period: int) -> int:
    shared = math.gcd(size, period)
    return shared * (period + 1) if size > shared * period else size


@lru_cache(maxsize=65536)
def _blocks(size: int, ranks: tuple[int, ...]) -> tuple[int, ...] | int | None:
    """Lengths of blocks by rank, or of all, of a dim cut by axes of these sizes, major first; None where it does not divide.

    Axes inside one that is cut by shares cut a unit, so blocks divide under any shares of as many units."""
    every: tuple[int, ...] | int = size
    unit = size
    for n in ranks:
        part = cut(unit, n)
        if part is None or not (isinstance(every, int) or isinstance(part, int)):
            return None
        if isinstance(part, tuple):
            assert isinstance(n, Shares)
            every, unit = part, unit // sum(n.fitting(unit))
        elif isinstance(every, int):
            every = unit = part
        else:
            every, unit = tuple(length // n for length in every for _ in range(n)), part
    return every


@dataclass(frozen=True)
class Mesh:
    """Ordered axis names and sizes; `offset` is the first physical rank (stages own consecutive rank ranges).

    Raises ShardingError for an axis whose name is no identifier."""

    axes: Annotated[tuple[tuple[Identifier, AxisSize], ...], Pairs(most=16)] = field(metadata=kept(key="mesh"))
    offset: Annotated[int, integer(0, MOST_RANKS)] = field(default=0, metadata=kept(key="first_rank", required=True))

    def __post_init__(self) -> None:
        for name, _ in self.axes:  # they become names in emitted programs
            if not is_identifier(name):
                raise ShardingError(
                    f"a mesh axis is named {shown(name)}; use a name of letters, digits and _, such as dp or tp"
                )

    def as_read(self, path: str) -> Mesh:
        """The mesh as a file has it. Raises SchemaError for one of more ranks than there may be."""
        if self.size > MOST_RANKS:
            raise must_be(inside(path, "mesh"), f"of at most {MOST_RANKS} ranks", dict(self.axes))
        return self

    @staticmethod
    def of(**sizes: int) -> Mesh:
        """`Mesh.of(dp=2, tp=4)`."""
        return Mesh(tuple(sizes.items()))

    @staticmethod
    def from_dict(sizes: Mapping[str, int]) -> Mesh:
        return Mesh(tuple((str(k), v if isinstance(v, Shares) else int(v)) for k, v in sizes.items()))

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def size(self) -> int:
        return math.prod(n for _, n in self.axes)

    def product(self, axes: Iterable[str]) -> int:
        """Number of ranks spanned by `axes`."""
        sizes, ranks = self.sizes, 1
        for axis in axes:
            ranks *= sizes[axis]
        return ranks

    @cached_property
    def ranks(self) -> tuple[tuple[str, int], ...]:
        """Axes with their numbers of ranks, whatever their shares."""
        return tuple((name, int(size)) for name, size in self.axes)

    @cached_property
    def uneven(self) -> bool:
        """Whether an axis is cut by shares."""
        return any(isinstance(size, Shares) for _, size in self.axes)

    @cached_property
    def period(self) -> int:
        """A number of which dims that share the same divisors with it are cut alike."""
        units = (sum(one) for _, size in self.axes if isinstance(size, Shares) for one in size.units)
        return math.prod(units, start=self.size)

    def cut_alike(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape, the same for many, of which the same axes divide the same dims, and whose blocks are as long as those of
        `shape`, or longer than the mesh has ranks as those are. An uneven mesh leaves a shape as it is."""
        return tuple(shape) if self.uneven else tuple(_cut_alike(n, self.period) for n in shape)

    def blocks(self, size: int, axes: Iterable[str]) -> tuple[int, ...] | int | None:
        """Lengths of the blocks of a dim over axes, by rank, or of all where they are equal; None where it does not divide."""
        return _blocks(size, tuple(self.sizes[axis] for axis in axes))

    def is_uneven(self, size: int, axes: Iterable[str]) -> bool:
        """Whether ranks hold blocks of unequal length of a dim over axes."""
        return self.uneven and isinstance(self.blocks(size, axes), tuple)

    def extent(self, size: int, axes: tuple[str, ...]) -> int | None:
        """The length of a rank's block of a dim over axes; None where it does not divide."""
        lengths = self.blocks(size, axes)
        if isinstance(lengths, tuple) and self._seen_at:
            own = interval(size, axes, self.sizes, dict.fromkeys(axes, 0) | self._seen_at)
            return Extent(own[1] - own[0], size, axes) if own is not None else None
        if isinstance(lengths, tuple):
            longest, shortest = max(lengths), min(lengths)
            return Extent(min(shortest, max(longest - 1, 1)) if self._seen_by_least else longest, size, axes)
        return lengths

    def parts(self, size: int, axes: tuple[str, ...]) -> int | Fraction:
        """Into how many parts a dim is cut, of which the longest has its share."""
        lengths = self.blocks(size, axes) if self.uneven else None
        return Fraction(size, max(lengths)) if isinstance(lengths, tuple) else self.product(axes)

    @cached_property
    def seen_by_least(self) -> Mesh:
        """The same mesh, whose extents are as numbers those of the shortest blocks, or shorter, as shares may be equal."""
        mesh = Mesh(self.axes, self.offset)
        vars(mesh)["_seen_by_least"] = True
        return mesh

    @cached_property
    def _seen_by_least(self) -> bool:
        return False

    def seen_by(self, rank: int) -> Mesh:
        """The same mesh, whose extents are as numbers those of a rank's own blocks."""
        where = self.coordinate(rank)
        axes = ((axis, Seen(n, where[axis]) if isinstance(n, Shares) else n) for axis, n in self.axes)
        return Mesh(tuple(axes), self.offset)

    @cached_property
    def _seen_at(self) -> dict[str, int]:
        return {axis: size.at for axis, size in self.axes if isinstance(size, Seen)}

    def units(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The units that a rank holds along every axis that is cut by shares, by list."""
        where = self.coordinate(rank)
        return tuple(tuple(one[where[axis]] for one in n.units) for axis, n in self.axes if isinstance(n, Shares))

    def share_of_longest(self, rank: int) -> float:
        """How much a rank holds of what the rank with the longest blocks does, by the first list of units of every axis."""
        where, share = self.coordinate(rank), 1.0
        for axis, size in self.axes:
            if isinstance(size, Shares):
                share *= size.units[0][where[axis]] / max(size.units[0])
        return share

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        after = self.names.index(axis) + 1
        return math.prod(n for _, n in self.axes[after:])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index of `rank` along each axis."""
        local, where = rank - self.offset, {}
        for name, size in reversed(self.axes):
            where[name] = local % size
            local //= size
        return where

    def group(self, axes: tuple[str, ...], rank: int | None = None) -> tuple[int, ...]:
        """The ranks that share every other coordinate with `rank` (default: the first rank), `axes` major first."""
        base = self.coordinate(self.offset if rank is None else rank)
        ranks = [self.offset + sum(base[n] * self.stride(n) for n in self.names if n not in axes)]
        for axis in axes:
            ranks = [r + i * self.stride(axis) for r in ranks for i in range(self.sizes[axis])]
        return tuple(ranks)

    def __str__(self) -> str:
        return "×".join(f"{name}={size:d}" for name, size in self.axes) or "one rank"
