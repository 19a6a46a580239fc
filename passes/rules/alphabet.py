"""Specs by number: what is looked up for many states at once is an array over these numbers.

Which specs a tensor may have depends on its number of dims and on the names of the mesh axes alone; sizes say which of
them divide its dims and how many bytes a rank holds. So all specs of a rank over some axes are numbered once, and every
mesh and every tensor type asks for a part of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.spec import REDUCTIONS, Spec
from autopar.ir.types import TensorType
from autopar.runtime.comm.mesh import Shares

BIT = {op: 1 << i for i, op in enumerate(REDUCTIONS)}
"""Reductions as bits of a set."""


@dataclass(frozen=True, eq=False)
class Alphabet:
    """Every spec of a tensor of `rank` dims over axes that have ranks to share among: dims keep them in mesh order, and
    only one kind of reduction is owed. The replicated spec is the first.

    number: of every spec. sharded[n, dim, axis]: whether spec n shards a dim by an axis. owed[n]: the reductions that it
    owes, as bits.
    """

    axes: tuple[str, ...]
    rank: int
    specs: tuple[Spec, ...]
    number: dict[Spec, int]
    sharded: np.ndarray
    owed: np.ndarray


@lru_cache(maxsize=1024)
def alphabet(axes: tuple[str, ...], rank: int) -> Alphabet:
    """All specs of a tensor of so many dims over these axes."""
    specs = []
    for picked in itertools.product([None, *range(rank), *sorted(REDUCTIONS)], repeat=len(axes)):
        partial = tuple(sorted((axis, p) for axis, p in zip(axes, picked, strict=True) if isinstance(p, str)))
        if len({op for _, op in partial}) <= 1:
            dims = tuple(tuple(axis for axis, p in zip(axes, picked, strict=True) if p == dim) for dim in range(rank))
            specs.append(Spec(dims, partial))
    shape = (len(specs), rank, len(axes))
    sharded = np.array([[[axis in dim for axis in axes] for dim in spec.dims] for spec in specs], bool).reshape(shape)
    owed = np.array([BIT[spec.partial[0][1]] if spec.partial else 0 for spec in specs])
    return Alphabet(axes, rank, tuple(specs), {spec: i for i, spec in enumerate(specs)}, sharded, owed)


def shared_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh that have ranks to share among."""
    return _shared(mesh.axes)


@lru_cache(maxsize=1024)
def _shared(axes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    return tuple(name for name, size in axes if size > 1)


@dataclass(frozen=True, eq=False)
class Shards:
    """The specs of an alphabet on one mesh. per_dim[n, dim]: into how many shards spec n cuts a dim; total[n]: into how many
    it cuts the tensor. An axis that is cut by shares counts as many as its longest block would be of."""

    letters: Alphabet
    mesh: Mesh
    per_dim: np.ndarray
    total: np.ndarray

    def of_bytes(self, type_: TensorType, numbers: np.ndarray) -> np.ndarray:
        """Bytes of a tensor that one rank holds under the specs with these numbers, the one that holds most."""
        if self.mesh.uneven:
            specs, fits = self.letters.specs, self.divide(type_.shape)
            return np.array([specs[n].local_bytes(type_, self.mesh) if fits[n] else 0 for n in numbers.tolist()])
        return type_.nbytes // self.total[numbers]

    def divide(self, shape: Sequence[int]) -> np.ndarray:
        """Per spec whether it divides the dims of a tensor."""
        if self.mesh.uneven:
            return np.array([spec.divides(tuple(shape), self.mesh) for spec in self.letters.specs])
        return (np.array(shape, int) % self.per_dim == 0).all(1)


@lru_cache(maxsize=4096)
def shards(axes: tuple[tuple[str, int], ...], rank: int) -> Shards:
    """The specs of a tensor of so many dims on a mesh with these axes."""
    mesh = Mesh(axes)
    sizes = np.array([_counts(size) for _, size in axes if size > 1])
    letters = alphabet(tuple(name for name, size in axes if size > 1), rank)
    per_dim = np.where(letters.sharded, sizes, 1).prod(2)
    return Shards(letters, mesh, per_dim, per_dim.prod(1))


def _counts(size: int) -> int | float:
    """The number of ranks that an axis counts as: where blocks are unequal, as many as its longest would be of."""
    return sum(size.units[0]) / max(size.units[0]) if isinstance(size, Shares) else size


@lru_cache(maxsize=1024)
def refinements(letters: Alphabet) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of all pairs of specs that owe nothing, of which the second shards the shards of the first."""
    whole = np.flatnonzero(letters.owed == 0).tolist()
    dims = [letters.specs[n].dims for n in whole]
    pairs = [
        (a, b)
        for a, coarse in zip(whole, dims, strict=True)
        for b, fine in zip(whole, dims, strict=True)
        if all(f[: len(c)] == c for f, c in zip(fine, coarse, strict=True))
    ]
    first, second = np.array(pairs, int).T
    return first, second


def distinct(numbers: np.ndarray) -> np.ndarray:
    """Every number once, in the order of its first place."""
    return np.array(list(dict.fromkeys(numbers.tolist())), int)
