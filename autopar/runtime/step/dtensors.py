"""Values of a session as torch's DTensors, and back: what `Session.state_dict` shows and checkpoints store.

DTensor splits a dim over mesh dims from left to right, a spec splits it major axis first; so the DeviceMesh of a spec has
its dims ordered as the spec names the axes (first those of dim 0, then of dim 1, …, then the unused ones, over which the
value is replicated):

    mesh dp=2, tp=4, spec (("tp",), ("dp",))   ->   DeviceMesh dims (tp, dp), placements (Shard(0), Shard(1))

Runs of elements and blocks of unequal size, which DTensor does not know, are tensors of a kind of their own (`run_tensor.py`).

The ranks of a DeviceMesh are those of the stage that holds the value; on a stage of one rank it is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..comm.comm import Comm
from ..comm.mesh import cut_by_shares, run_axes
from ..comm.process import TorchComm
from ..comm.threads import ThreadComm
from ..errors import CheckpointError
from ..program.layout import SpecDims, StateEntry, full_of_holders, local_view
from .run_tensor import RunTensor


def axis_order(mesh: Mapping[str, int], spec: SpecDims) -> tuple[str, ...]:
    """Mesh axes (those larger than one) as the DeviceMesh of a spec has them."""
    used = [axis for axes in spec for axis in axes if mesh[axis] > 1]
    return (*used, *(axis for axis, size in mesh.items() if size > 1 and axis not in used))


def layout(entry: StateEntry, device_type: str = "") -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """A spec in torch's terms. device_type: of the mesh, where it is not that of the ranks' devices."""
    assert isinstance(entry.comm, TorchComm)
    order = axis_order(entry.comm.mesh, entry.spec)
    dim_of = {axis: dim for dim, axes in enumerate(entry.spec) for axis in axes}
    mesh = entry.comm.device_mesh(order, device_type)
    return mesh, tuple(Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in order)


def as_dtensor(value: Tensor, entry: StateEntry, device_type: str = "") -> DTensor:
    """The global tensor of which `value` is this rank's part; it shares value's memory, where that lies on the mesh's device."""
    mesh, placements = layout(entry, device_type)
    strides = [1] * len(entry.shape)
    for dim in range(len(entry.shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * entry.shape[dim + 1]
    return DTensor.from_local(
        value.contiguous(), mesh, placements, run_check=False, shape=torch.Size(entry.shape), stride=tuple(strides)
    )


def described(entry: StateEntry) -> Any:
    """A value as `pack` shows it over processes, without its numbers: for those who plan where these go."""
    if not isinstance(entry.value, Tensor):
        return entry.value
    return _over_processes(StateEntry(entry.value.to("meta"), entry.shape, entry.spec, entry.comm))


def in_place(entry: StateEntry) -> Any:
    """A value as `pack` shows it over processes, in its own memory wherever that lies, to be filled."""
    return _over_processes(entry, entry.value.device.type if isinstance(entry.value, Tensor) else "")


def pack(entry: StateEntry) -> Any:
    """A value as `Session.state_dict` shows it: DTensor over processes, full tensor over threads."""
    if isinstance(entry.comm, TorchComm) or not isinstance(entry.value, Tensor) or not entry.shape:
        return _over_processes(entry)
    return full_of_holders(entry).clone()


def _over_processes(entry: StateEntry, device_type: str = "") -> Any:
    """A DTensor of what ranks share, else the value itself."""
    if not isinstance(entry.value, Tensor) or not entry.shape or entry.comm.world_size == 1:
        return entry.value
    if run_axes(entry.shape, entry.spec) or cut_by_shares(entry.spec, entry.comm.mesh):
        return RunTensor(entry)
    return as_dtensor(entry.value, entry, device_type)


def merge(state: dict[str, Any], comm: Comm) -> dict[str, Any]:
    """Merge the values of all ranks' stages, over threads."""
    if not isinstance(comm, ThreadComm):
        return state
    return {name: value for part in reversed(comm.hand_round(state)) for name, value in part.items()}


def unpack(value: Any, entry: StateEntry) -> Any:
    """This rank's part of a full tensor or DTensor."""
    if isinstance(value, RunTensor):
        own = value.entry
        if (own.comm.mesh, own.shape, own.spec) == (entry.comm.mesh, entry.shape, entry.spec):
            return value.to_local()
        value = value.full_tensor()
    if isinstance(value, DTensor):
        comm = entry.comm
        if (
            isinstance(comm, TorchComm)
            and comm.world_size > 1
            and (value.device_mesh, value.placements) == layout(entry)
        ):
            return value.to_local()
        value = value.full_tensor()
    if isinstance(value, Tensor) and tuple(value.shape) != entry.shape:
        raise CheckpointError(f"a tensor of shape {tuple(value.shape)} where the program has {entry.shape}")
    return local_view(value, entry.spec, entry.comm) if isinstance(value, Tensor) and entry.shape else value
