"""A mesh is a named grid of ranks.

Two devices as `Mesh.of(dp=2)`; eight as `Mesh.of(dp=2, tp=4)`. Ranks are numbered row-major over the axes, the last
axis fastest, so the last axis lies on the closest (fastest) links. An *axis* is a mesh's; a *dim* is a tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from autopar.errors import ShardingError
from autopar.runtime.data.fields import Identifier, Pairs, kept
from autopar.runtime.data.schema import MOST_RANKS, inside, integer, is_identifier, must_be, shown

AxisSize = Annotated[int, integer(1, MOST_RANKS)]


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
        return Mesh(tuple((str(k), int(v)) for k, v in sizes.items()))

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
        return "×".join(f"{name}={size}" for name, size in self.axes) or "one rank"
