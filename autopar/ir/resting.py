"""Bytes that rest on a rank, told once: whoever counts, prices, places or bounds them reads these rows.

How a rank holds a parameter is a value, `ParameterOnRank`: bytes of its stored block, of the block that the optimizer updates,
and of the gradient that this needs. Its rows say what rests, and with which of `memory_levers.MOVABLE` that leaves the device:

    kind         bytes                                                            moves with
    parameters   the stored block                                                 parameters
    parameters   its copy in lower precision, where the plan keeps one            parameters
    gradients    the reduced gradient, from backward until the optimizer used it  parameters
    optimizer    the optimizer's state (`OptimizerState`)                         optimizer
    optimizer    the updated block, where it is a copy beside the stored one      parameters
    averages     averages of the stored block over steps                          parameters

On two ranks a float32 (8, 4) under Adam, stored whole and updated by columns, has rows of 128, 64, 128 and 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.setting import Bytes, Setting
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.runtime.comm.mesh import mesh_index


@dataclass(frozen=True)
class RestingBytes(Generic[Bytes]):
    """Bytes of a kind. moves: the state (of MOVABLE) with which they leave the device ("": they never do)."""

    kind: str
    moves: str
    nbytes: Bytes


@dataclass(frozen=True)
class ParameterOnRank(Generic[Bytes]):
    """A parameter as one rank holds it, or as it may hold it in several ways (arrays).

    stored: bytes of its block in storage. updated: of the block that the optimizer updates. trained: whether it has a gradient.
    names: the parameter's, or those of several that are alike, where an optimizer updates them here; bytes of state are their
    average. copied: bytes of the updated block where that is a copy. narrow: of the copy of the stored block in lower precision.
    """

    type: TensorType
    stored: Bytes
    updated: Bytes
    trained: bool = False
    names: tuple[str, ...] = ()
    copied: Bytes | None = None
    narrow: float = 0.0

    @property
    def gradient(self) -> Bytes:
        """Bytes of the reduced gradient."""
        return gradient_bytes(self.updated) if self.trained else 0 * self.updated

    def state_bytes(self, setting: Setting) -> Bytes:
        """Bytes of the optimizer's state."""
        return setting.optimizer.shard_bytes(self.type, self.updated, *self.names) if self.names else 0 * self.updated

    def on_device(self, setting: Setting, away: Collection[str]) -> Bytes:
        """Bytes of all that rests on the device where the movable state `away` does not."""
        return sum((row.nbytes for row in self.rows(setting) if row.moves not in away), 0.0 * self.stored)

    def rows(self, setting: Setting) -> Iterator[RestingBytes[Bytes]]:
        """All that rests for the parameter."""
        yield RestingBytes("parameters", "parameters", self.stored + self.narrow)
        if self.trained:
            yield RestingBytes("gradients", "parameters", self.gradient)
        if self.names:
            yield RestingBytes("optimizer", "optimizer", self.state_bytes(setting))
        if self.names and self.copied is not None:
            yield RestingBytes("optimizer", "parameters", self.copied)
        if copies := sum(setting.averaged.get(name, 0) for name in self.names):
            yield RestingBytes("averages", "parameters", copies / len(self.names) * self.stored)


def on_rank(
    p: StoredParameter, mesh: Mesh, kept: Collection[str] = (), rank: int | None = None
) -> ParameterOnRank[float]:
    """A parameter as one rank of a stage holds it. kept: of `Setting`; rank: of the mesh (None: on average, where one rank has it
    whole)."""
    names = (p.name,) if p.owned else ()
    held = planned(p.type, p.storage, p.optimizer, mesh, p.contributions > 0, names, p.name in kept, rank)
    return replace(held, narrow=p.stored_bytes(mesh, p.narrow)) if p.narrow is not None else held


def planned(
    type_: TensorType,
    storage: Spec,
    optimizer: Spec,
    mesh: Mesh,
    trained: bool,
    names: tuple[str, ...],
    kept: bool = False,
    rank: int | None = None,
) -> ParameterOnRank[float]:
    """A parameter as one rank holds it under two specs. names: as of `ParameterOnRank`, where it is trained, by this step or
    (kept) by another one; rank: as of `on_rank`."""
    stored, updated = (spec.local_bytes(type_, mesh) * held_share(spec, mesh, rank) for spec in (storage, optimizer))
    if not (trained or kept):
        return ParameterOnRank(type_, stored, updated)
    return ParameterOnRank(
        type_, stored, updated, trained, names, updated if is_apart(type_, storage, optimizer, mesh) else None
    )


def held_share(spec: Spec, mesh: Mesh, rank: int | None = None) -> float:
    """The share of the bytes of a spec that a rank has: all or nothing where one has it whole. rank: as of `on_rank`."""
    if rank is None or spec.owner is None:
        return spec.share(mesh)
    return 0.0 if spec.is_elsewhere(mesh, mesh_index(mesh.sizes, rank)) else 1.0


def busiest_rank(parameters: Iterable[StoredParameter], mesh: Mesh) -> int:
    """The rank of a mesh that has the most bytes of those that one rank has whole; the last one, where all are alike."""
    owned = [p for p in parameters if p.optimizer.owner is not None]
    loads = [
        sum(p.updated_bytes(mesh) * held_share(p.optimizer, mesh, rank) for p in owned) for rank in range(mesh.size)
    ]
    return max(range(mesh.size), key=lambda rank: (loads[rank], rank)) if owned else mesh.size - 1


def gradient_bytes(updated: Bytes) -> Bytes:
    """Bytes of a reduced gradient where the optimizer updates a block of so many."""
    return updated


def is_apart(type_: TensorType, storage: Spec, optimizer: Spec, mesh: Mesh) -> bool:
    """Whether the block that the optimizer updates is a copy beside the stored one: a run is where zeros fill it up."""
    if storage == optimizer:
        return False
    stored, block = (spec.block.local_shape(type_.shape, mesh) for spec in (storage, optimizer))
    filled = optimizer.owner is None and bool(math.prod(block) % mesh.product(optimizer.run))
    return filled or bool(is_copy(np.array(stored), np.array(block)))


def is_copy(stored: np.ndarray, updated: np.ndarray) -> np.ndarray:
    """Whether updated blocks are copies, as they are no contiguous part of the stored ones: (…, dims) shapes of both."""
    before = np.ones_like(updated)
    before[..., 1:] = np.cumprod(updated[..., :-1], -1)
    is_apart: np.ndarray = ((stored != updated) & (before != 1)).any(-1)
    return is_apart


def of_program(program: Program, setting: Setting) -> Iterator[RestingBytes[float]]:
    """All that rests for a program's parameters, each once and whole: no plan has less on all its ranks together."""
    trained = set(program.trained) if program.training else set()
    for name, p in program.parameters.items():
        nbytes, names = float(p.type.nbytes), (name,) if name in trained or name in setting.kept else ()
        yield from ParameterOnRank(p.type, nbytes, nbytes, name in trained, names).rows(setting)


def resting(stage: LoweredStage, setting: Setting) -> dict[str, dict[str, float]]:
    """Bytes that the rank of a stage that has most always has, by memory tier ("": the device) and kind. Gradients, which rest
    only within a step, are the gradient store's."""
    tiers = {"": dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)}
    for p, row in resting_rows(stage, setting):
        if row.kind != "gradients":
            kinds = tiers.setdefault(p.tiers[row.moves], {})
            kinds[row.kind] = kinds.get(row.kind, 0.0) + row.nbytes
    tiers[""]["buffers"] = float(sum(t.nbytes for t in stage.buffers.values()))
    return tiers


def resting_rows(stage: LoweredStage, setting: Setting) -> Iterator[tuple[StoredParameter, RestingBytes[float]]]:
    """All that rests for every parameter on the rank of a stage that has most."""
    rank = busiest_rank(stage.parameters.values(), stage.mesh)
    alike: dict[Hashable, tuple[RestingBytes[float], ...]] = {}
    for p in stage.parameters.values():
        specs = p.type, p.storage, p.optimizer, p.narrow
        kind = setting.optimizer.kind(p.name), p.name in setting.kept, setting.averaged.get(p.name, 0)
        key = specs, kind, p.contributions > 0, p.owned
        if key not in alike:
            alike[key] = tuple(on_rank(p, stage.mesh, setting.kept, rank).rows(setting))
        for row in alike[key]:
            yield p, row
