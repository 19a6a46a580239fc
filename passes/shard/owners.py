"""The owners of tensors that optimizers need whole: which rank has which, so that all have as much.

A solver decides that a parameter rests whole on one rank along axes (`Spec.owner`), not on which. Here every one gets an owner:
the largest first, each to the rank that has least so far, as longest processing times first does it. No rank then has more than
the mean and one tensor. The bytes of an update are in proportion to its seconds, so both are in balance.

    four equal matrices and one of twice the size on two ranks    2 1 | 1 1 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.resting import planned
from autopar.ir.setting import Setting
from autopar.plan import ParameterPlan
from autopar.runtime.comm.mesh import index_along, mesh_index


@dataclass(frozen=True)
class Owned:
    """A tensor that one of the ranks along axes is to own. cost: its share of what is to be balanced."""

    axes: tuple[str, ...]
    cost: float


def balanced(tensors: Sequence[Owned], mesh: Mesh) -> list[int]:
    """The owner of each tensor, its place along the axes: largest first, each where the most that a rank has grows least. Of
    ranks that are alike the last takes it."""
    loads = [0.0] * mesh.size
    positions = [mesh_index(mesh.sizes, rank) for rank in range(mesh.size)]
    owners = [0] * len(tensors)
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].cost):
        candidates: dict[int, list[int]] = {}
        for rank, position in enumerate(positions):
            candidates.setdefault(index_along(tensors[i].axes, mesh.sizes, position), []).append(rank)
        owners[i] = min(candidates, key=lambda owner: (max(loads[rank] for rank in candidates[owner]), -owner))
        for rank in candidates[owners[i]]:
            loads[rank] += tensors[i].cost
    return owners


def with_owners(
    parameters: Mapping[str, ParameterPlan], program: Program, mesh: Mesh, setting: Setting
) -> dict[str, ParameterPlan]:
    """The parameters of a stage, those that one rank has whole each with an owner."""
    names = [name for name, p in parameters.items() if p.optimizer.owner is not None]
    tensors = []
    for name in names:
        p = parameters[name]
        held = planned(program.parameters[name].type, p.storage, p.optimizer, mesh, True, (name,))
        stored = held.stored if p.storage.owner is not None else 0.0
        tensors.append(Owned(p.optimizer.run, stored + held.gradient + held.state_bytes(setting)))
    owned = dict(parameters)
    for name, owner in zip(names, balanced(tensors, mesh), strict=True):
        p = owned[name]
        optimizer = replace(p.optimizer, owner=owner)
        owned[name] = replace(p, storage=optimizer if p.storage.owner is not None else p.storage, optimizer=optimizer)
    return owned
