"""Checkpoints with torch.distributed.checkpoint: every rank writes and reads only what it holds.

A sharded value is described to torch as a DTensor (dtensors.py). The file format knows global tensors only, so a
checkpoint loads under any other mesh and plan, and one written by `write_full` in a single process loads under all of
them.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .checkpoint_reader import DataPlanner, DataReader, named
from .dtensors import pack, unpack
from .errors import CheckpointError
from .layout import StateEntry
from .process import TorchComm
from .schema import paragraph
from .session import Session
from .telling import one_line

Signature = tuple[tuple[int, ...], torch.dtype] | None
Signatures = dict[str, Signature]
_UNWRITABLE = ("cannot be written", "choose another directory")
_lock = threading.Lock()


def save(directory: str | Path, session: Session) -> None:
    """Write the session's state; every rank calls it. An existing checkpoint in the directory is replaced. Raises
    CheckpointError where `directory` is no directory and cannot be made one."""
    state = session.state_dict()
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be a checkpoint directory: {error.strerror}; choose another"
        ) from error
    if isinstance(session.comm, TorchComm):
        with named(directory, *_UNWRITABLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            dcp.save(state, checkpoint_id=str(directory))
    else:
        if session.comm.rank == 0:
            write_full(directory, state)
        session.comm.barrier(site="checkpoint.save")


def write_full(directory: str | Path, state: Mapping[str, Any]) -> None:
    """Write full tensors from this process alone, process group or not."""
    with named(directory, *_UNWRITABLE), _alone():
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(str(directory)), no_dist=True)


def load(directory: str | Path, session: Session) -> None:
    """Fill the session from a checkpoint of any mesh and plan; every rank calls it.

    Parameters and buffers must be in it. Optimizer state and step are taken when they are (a checkpoint of weights
    alone starts at step 0). Raises CheckpointError naming what is missing or has another shape.
    """
    reader = DataReader(directory)
    available = signatures(reader)
    session.prepare_optimizer_state(available)
    entries, own = session.state_entries(), session.names()
    wanted = {}
    for name, entry in entries.items():
        optional = name == "step" or name.startswith("optim")
        if name not in available:
            if optional and name not in own:
                continue
            raise CheckpointError(f"{directory}: no tensor {name!r} in this checkpoint ({len(available)} entries)")
        _check_kind(f"{directory}: {name}", entry, available[name])
        wanted[name] = entry
    values: dict[str, Any] = {name: entry.value for name, entry in entries.items()}
    if isinstance(session.comm, TorchComm):
        target, problem = {name: pack(entry) for name, entry in wanted.items()}, ""
        try:
            with named(directory), _alone():  # every rank plans by itself what it reads, so torch has nothing to send
                dcp.load(target, storage_reader=reader, planner=DataPlanner(), no_dist=True)
        except CheckpointError as error:
            problem = str(error)
        problem = next(filter(None, (problem, *session.comm.share(one_line(problem), paragraph()))), "")
        if problem:
            raise CheckpointError(problem)
        values |= {name: unpack(target[name], entry) for name, entry in wanted.items()}
    else:
        for name, entry in wanted.items():
            with named(directory):
                values[name] = unpack(_read_alone(reader, name, entry.value, available[name]), entry)
    session.accept(values)


def read_full(directory: str | Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Full tensors of a checkpoint, read by this rank alone. Raises CheckpointError."""
    source = TensorSource(directory)
    return {name: source.read(name) for name in names}


class TensorSource:
    """A checkpoint whose tensors are read one by one, full, without a process group."""

    def __init__(self, directory: str | Path) -> None:
        """Raises CheckpointError where the directory holds no checkpoint, or a damaged one."""
        self.directory = directory
        self.reader = DataReader(directory)
        self.signatures = signatures(self.reader)

    def read(self, name: str) -> Tensor:
        """Raises CheckpointError where there is no such tensor, or its file is damaged."""
        signature = self.signatures.get(name)
        if signature is None:
            raise CheckpointError(f"{self.directory}: no tensor {name!r} in this checkpoint")
        with named(self.directory):
            return _read_alone(self.reader, name, None, signature)


def read_signatures(directory: str | Path) -> Signatures:
    """Names in a checkpoint with shape and dtype; None for values that are no tensors. Raises CheckpointError."""
    return signatures(DataReader(directory))


def signatures(reader: DataReader) -> Signatures:
    """The same of a checkpoint that is being read."""
    return {
        name: (tuple(item.size), item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        for name, item in reader.metadata.state_dict_metadata.items()
    }


def _check_kind(what: str, entry: StateEntry, signature: Signature) -> None:
    """Raises CheckpointError where the checkpoint has another kind of value than the program, or another shape."""
    value = entry.value
    if value is not None and isinstance(value, Tensor) != (signature is not None):
        raise CheckpointError(
            f"{what} is {'no tensor' if signature is None else 'a tensor'} in the checkpoint, in the program it is "
            f"{'one' if signature is None else 'none'}; take a checkpoint of this model"
        )
    if not isinstance(value, Tensor) or signature is None:
        return
    shape, dtype = signature
    if shape != entry.shape:
        raise CheckpointError(f"{what} has shape {shape}, the program has {entry.shape}")
    if (dtype.is_floating_point, dtype.is_complex) != (value.is_floating_point(), value.is_complex()):
        raise CheckpointError(f"{what} has dtype {dtype}, the program has {value.dtype}")


def _read_alone(reader: DataReader, name: str, plain: Any, signature: Signature) -> Any:
    """One value, full, without a process group. plain: what stands for it where it is no tensor."""
    target = {name: plain if signature is None else torch.empty(signature[0], dtype=signature[1])}
    with _alone():
        dcp.load(target, storage_reader=reader, planner=DataPlanner(), no_dist=True)
    return target[name]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One thread at a time, and no warning that there is no process group: that is what was asked for."""
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
