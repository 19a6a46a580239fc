"""Checkpoints with torch.distributed.checkpoint: every rank writes and reads only what it holds.

A sharded value is described to torch as a DTensor (dtensors.py). The file format knows global tensors only, so a
checkpoint loads under any other mesh and plan, and one written by `write_full` in a single process loads under all of
them.
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

from .dtensors import pack, unpack
from .errors import CheckpointError
from .layout import StateEntry
from .process import TorchComm
from .session import Session

_lock = threading.Lock()


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
