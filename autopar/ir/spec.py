"""A Spec says how one tensor lies on one mesh.

Per tensor dim the tuple of mesh axes that shard it (major first), and the axes over which it is *partial*: every rank
along such an axis holds a term, and their sum (or max, min) is the value. Two devices, a vector of 8:

    f32[8]          both hold all 8 numbers
    f32[8@dp]       each holds 4
    f32[8] ~sum(dp) each holds 8 terms; adding them gives the value

What rests of a parameter may also be a *run*: the elements of the block that dims leave, one after another, cut into equal
parts, of which zeros fill up the last. So a parameter is shared by any number of ranks, whatever its sizes are:

    f32[3, 3] run(dp)   each holds 5 of 9 elements, the second one's last is a zero

Or the block is not cut, and one of the ranks along these axes, its *owner*, has all of it: so whole matrices are shared out.

    f32[3, 3] whole(dp=1)   the second holds all 9 elements, the first none
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import ShardingError
from autopar.ir.mesh import Mesh
from autopar.ir.types import TensorType
from autopar.runtime.comm.mesh import index_along, mesh_index, run_shape
from autopar.runtime.data.schema import is_identifier

REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True)
class Spec:
    """`dims[i]`: axes sharding dim i, major first. `partial`: sorted (axis, reduction) pairs still owed. `run`: axes over which
    the elements of a block are cut, major first; nothing is owed beside it, and values have none. `owner`: the place among the
    ranks along `run` of the one that has them all instead (None: they are cut)."""

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    run: tuple[str, ...] = ()
    owner: int | None = None

    @staticmethod
    def replicated(rank: int) -> Spec:
        return Spec(((),) * rank)

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial, self.run, self.owner))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def axes(self) -> frozenset[str]:
        """Every axis that this spec uses (shards over or is partial over)."""
        return frozenset(a for dim in (*self.dims, self.run) for a in dim) | frozenset(a for a, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        return not (self.partial or self.run or any(self.dims))

    def shards(self, mesh: Mesh, dim: int) -> int:
        return mesh.product(self.dims[dim])

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Shape held by one rank, with an `Extent` where ranks hold unequal blocks; a run has as many dims, of which the first is
        its elements; of what one rank has whole, the owner's. Raises ShardingError where a dim does not divide."""
        if self.run and self.owner is None:
            return run_shape(self.block.local_shape(shape, mesh), mesh.product(self.run))
        if not any(self.dims):
            return tuple(shape)
        local = []
        for size, axes in zip(shape, self.dims, strict=True):
            length = mesh.extent(size, axes) if axes else size
            if length is None:
                raise ShardingError(
                    f"a dim of size {size} cannot be split over {'×'.join(f'{a}={mesh.sizes[a]:d}' for a in axes)}; "
                    f"use axis sizes whose product divides {size}, or let the planner choose"
                )
            local.append(length)
        return tuple(local)

    def divides(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        pairs = zip(shape, self.dims, strict=True)
        if mesh.uneven:
            return all(mesh.blocks(size, axes) is not None for size, axes in pairs)
        return all(size % mesh.product(axes) == 0 for size, axes in pairs)

    def is_uneven(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        """Whether ranks hold blocks of unequal size."""
        return mesh.uneven and any(mesh.is_uneven(size, axes) for size, axes in zip(shape, self.dims, strict=True))

    def local_bytes(self, type_: TensorType, mesh: Mesh) -> int:
        """Bytes on one rank; of what one rank has whole, the owner's."""
        if mesh.uneven:
            return math.prod(self.local_shape(type_.shape, mesh)) * type_.dtype.itemsize
        parts = 1
        for axes in self.dims:
            parts *= mesh.product(axes)
        if self.run and self.owner is None:
            elements = type_.nbytes // type_.dtype.itemsize // parts
            return -(-elements // mesh.product(self.run)) * type_.dtype.itemsize
        return type_.nbytes // parts

    @cached_property
    def block(self) -> Spec:
        """How the block lies whose elements are cut, or the whole spec where none are."""
        return Spec(self.dims, self.partial) if self.run else self

    @property
    def row(self) -> tuple[tuple[str | int, ...], ...]:
        """The spec as the runtime's tables have it: its dims, the axes of a run where it is one, and the owner, if any."""
        owner = () if self.owner is None else ((self.owner,),)
        return (*self.dims, self.run, *owner) if self.run else self.dims

    @cached_property
    def unassigned(self) -> Spec:
        """The spec with the first rank as its owner, where it has one: which rank that is makes no difference to a price."""
        return self if not self.owner else Spec(self.dims, self.partial, self.run, 0)

    def owner_along(self, axes: Iterable[str], mesh: Mesh) -> int:
        """The place of the owner among the ranks along some of the axes, major first."""
        position = self.owner_position(mesh)
        return index_along([axis for axis in self.run if axis in set(axes)], mesh.sizes, position)

    def owner_position(self, mesh: Mesh) -> dict[str, int]:
        """Where the owner is along the axes of `run`."""
        return mesh_index({axis: mesh.sizes[axis] for axis in self.run}, self.owner or 0)

    def is_elsewhere(self, mesh: Mesh, position: Mapping[str, int]) -> bool:
        """Whether the rank at a position of the mesh has nothing, as another one is the owner."""
        return self.owner is not None and self.owner != index_along(self.run, mesh.sizes, position)

    def share(self, mesh: Mesh) -> float:
        """The share of the owner's bytes that a rank has on average: 1 where there is no owner."""
        return 1.0 if self.owner is None else 1.0 / mesh.product(self.run)

    def refines(self, coarse: Spec) -> bool:
        """Whether blocks are parts of the blocks of another spec that owes nothing, over the same axes first."""
        if coarse.run:
            return self == coarse
        inside = zip(self.dims, coarse.dims, strict=False)
        return len(self.dims) == len(coarse.dims) and all(fine[: len(whole)] == whole for fine, whole in inside)

    def without_partial(self) -> Spec:
        return Spec(self.dims, (), self.run, self.owner)

    def show(self, type_: TensorType | None = None) -> str:
        """`f32[8@dp, 128, 4096@tp] ~sum(cp)`; without a type `[@dp, ., @tp] ~sum(cp)`."""
        sizes = type_.shape if type_ is not None else ("",) * len(self.dims)
        parts = [f"{n}@{'.'.join(axes)}" if axes else (str(n) or ".") for n, axes in zip(sizes, self.dims, strict=True)]
        text = f"{type_.short_dtype if type_ else ''}[{', '.join(parts)}]"
        for op in REDUCTIONS:
            owed = [a for a, reduction in self.partial if reduction == op]
            if owed:
                text += f" ~{op}({','.join(owed)})"
        if self.owner is not None:
            return f"{text} whole({'.'.join(self.run)}={self.owner})"
        return f"{text} run({','.join(self.run)})" if self.run else text

    def __str__(self) -> str:
        return self.show()


_FORM = re.compile(
    r"\w*\[(?P<dims>[^\]]*)\](?P<partial>( ~\w+\([\w,]+\))*)( run\((?P<run>[\w,]+)\)"
    r"| whole\((?P<whole>[\w.]+)=(?P<owner>\d+)\))?",
    re.ASCII,
)
_DIM = re.compile(r" *(?:\.|\d+)? *(?:@(?P<axes>[\w.]+))? *", re.ASCII)


def parse_spec(text: str) -> Spec:
    """Inverse of `Spec.show`, sizes and dtype ignored. Raises ShardingError on anything else."""
    match = _FORM.fullmatch(text.strip())
    parts = (match["dims"].split(",") if match["dims"].strip() else []) if match else []
    entries = [_DIM.fullmatch(part) for part in parts]
    if match is None or not all(entries):
        raise ShardingError(f"{text!r} is no spec; write for example '[@dp, ., @tp] ~sum(cp)'")
    dims = tuple(tuple(entry["axes"].split(".")) if entry and entry["axes"] else () for entry in entries)
    partial = []
    for op, axes in re.findall(r"~(\w+)\(([\w,]+)\)", match["partial"]):
        if op not in REDUCTIONS:
            raise ShardingError(f"{text!r}: unknown reduction {op!r}; known are {', '.join(REDUCTIONS)}")
        partial += [(axis, op) for axis in axes.split(",")]
    named = match["run"] or match["whole"]
    run = tuple(re.split("[,.]", named)) if named else ()
    if run and (partial or not dims):
        raise ShardingError(f"{text!r}: a run is of a tensor with dims, and owes nothing beside it")
    spec = Spec(dims, tuple(sorted(partial)), run, None if match["owner"] is None else int(match["owner"]))
    wrong = [axis for axis in spec.axes if not is_identifier(axis)]
    if wrong:
        raise ShardingError(f"{text!r}: {wrong[0]!r} is no name of a mesh axis; write for example '[@dp.tp, .]'")
    used = [*(axis for dim in (*dims, run) for axis in dim), *(axis for axis, _ in partial)]
    if len(used) > len(spec.axes):
        raise ShardingError(f"{text!r} uses a mesh axis twice; an axis shards one dim, or owes one sum")
    return spec
