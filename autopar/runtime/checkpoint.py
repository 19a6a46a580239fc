"""Checkpoints with torch.distributed.checkpoint: every rank writes and reads only what it holds.

A sharded value is described to torch as a DTensor. DTensor splits a dim over mesh dims from left to right, a spec
splits it major axis first; so the DeviceMesh of a spec has its dims ordered as the spec names the axes (first those of
dim 0, then of dim 1, …, then the unused ones, over which the value is replicated):

    mesh dp=2, tp=4, spec (("tp",), ("dp",))   ->   DeviceMesh dims (tp, dp), placements (Shard(0), Shard(1))

The ranks of a DeviceMesh are those of the stage that holds the value; on a stage of one rank it is a plain tensor. The
file format knows global tensors only, so a checkpoint loads under any other mesh and plan, and one written by
`write_full` in a single process loads under all of them.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .comm import Comm
from .errors import CheckpointError
from .layout import SpecDims, StateEntry, gather_full, local_view
from .process import TorchComm
from .session import Session

_lock = threading.Lock()


def axis_order(mesh: Mapping[str, int], spec: SpecDims) -> tuple[str, ...]:
    """Mesh axes (those larger than one) as the DeviceMesh of a spec has them."""
    used = [axis for axes in spec for axis in axes if mesh[axis] > 1]
    return (*used, *(axis for axis, size in mesh.items() if size > 1 and axis not in used))


def layout(entry: StateEntry) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """A spec in torch's terms."""
    assert isinstance(entry.comm, TorchComm)
    order = axis_order(entry.comm.mesh, entry.spec)
    dim_of = {axis: dim for dim, axes in enumerate(entry.spec) for axis in axes}
    mesh = entry.comm.device_mesh(order)
    return mesh, tuple(Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in order)


def as_dtensor(value: Tensor, entry: StateEntry) -> DTensor:
    """The global tensor of which `value` is this rank's part; it shares value's memory."""
    mesh, placements = layout(entry)
    strides = [1] * len(entry.shape)
    for dim in range(len(entry.shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * entry.shape[dim + 1]
    return DTensor.from_local(
        value.contiguous(), mesh, placements, run_check=False, shape=torch.Size(entry.shape), stride=tuple(strides)
    )


def pack(entry: StateEntry) -> Any:
    """A value as `Session.state_dict` shows it: DTensor over processes, full tensor over threads."""
    if not isinstance(entry.value, Tensor) or not entry.shape:
        return entry.value
    if isinstance(entry.comm, TorchComm):
        return as_dtensor(entry.value, entry) if entry.comm.world_size > 1 else entry.value
    return gather_full(entry.value, entry.spec, entry.comm, "state").clone()


def merge(state: dict[str, Any], comm: Comm) -> dict[str, Any]:
    """Over threads, the values of all ranks' stages."""
    if isinstance(comm, TorchComm):
        return state
    return {name: value for part in reversed(comm.share(state)) for name, value in part.items()}


def unpack(value: Any, entry: StateEntry) -> Any:
    """This rank's part of a full tensor or DTensor."""
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


def save(directory: str | Path, session: Session) -> None:
    """Write the session's state; every rank calls it. An existing checkpoint in the directory is replaced."""
    state = session.state_dict()
    if isinstance(session.comm, TorchComm):
        dcp.save(state, checkpoint_id=str(directory))
    else:
        if session.comm.rank == 0:
            write_full(directory, state)
        session.comm.barrier(site="checkpoint.save")


def write_full(directory: str | Path, state: Mapping[str, Any]) -> None:
    """Write full tensors from this process alone, process group or not."""
    with _alone():
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(str(directory)), no_dist=True)


def load(directory: str | Path, session: Session) -> None:
    """Fill the session from a checkpoint of any mesh and plan; every rank calls it.

    Parameters and buffers must be in it. Optimizer state and step are taken when they are (a checkpoint of weights
    alone starts at step 0). Raises CheckpointError naming what is missing or has another shape.
    """
    available = read_signatures(directory)
    session.prepare_optimizer_state(available)
    entries, own = session.state_entries(), session.names()
    wanted = {}
    for name, entry in entries.items():
        optional = name == "step" or name.startswith("optim")
        if name not in available:
            if optional and name not in own:
                continue
            raise CheckpointError(f"{directory}: no tensor {name!r} in this checkpoint ({len(available)} entries)")
        signature = available[name]
        if isinstance(entry.value, Tensor) and signature is not None and signature[0] != entry.shape:
            raise CheckpointError(f"{directory}: {name} has shape {signature[0]}, the program has {entry.shape}")
        wanted[name] = entry
    values: dict[str, Any] = {name: entry.value for name, entry in entries.items()}
    if isinstance(session.comm, TorchComm):
        target = {name: pack(entry) for name, entry in wanted.items()}
        dcp.load(target, checkpoint_id=str(directory))
        values |= {name: unpack(target[name], entry) for name, entry in wanted.items()}
    else:
        for name, entry in wanted.items():
            values[name] = unpack(_read_alone(directory, name, entry, available[name]), entry)
    session.accept(values)


def read_signatures(directory: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Names in a checkpoint with shape and dtype; None for values that are no tensors."""
    try:
        metadata = dcp.FileSystemReader(str(directory)).read_metadata()
    except OSError as error:
        raise CheckpointError(f"{directory} is no checkpoint directory: {error}") from error
    return {
        name: (tuple(item.size), item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        for name, item in metadata.state_dict_metadata.items()
    }


def _read_alone(
    directory: str | Path, name: str, entry: StateEntry, signature: tuple[tuple[int, ...], torch.dtype] | None
) -> Any:
    """One value, full, without a process group."""
    value = entry.value if signature is None else torch.empty(signature[0], dtype=signature[1])
    target = {name: value}
    with _alone():
        dcp.load(target, storage_reader=dcp.FileSystemReader(str(directory)), no_dist=True)
    return target[name]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One thread at a time, and no warning that there is no process group: that is what was asked for."""
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
