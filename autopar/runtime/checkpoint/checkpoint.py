"""Checkpoints with torch.distributed.checkpoint: every rank writes and reads only what it holds.

A sharded value is described to torch as a DTensor (dtensors.py). The file format knows global tensors only, so a
checkpoint loads under any other mesh and plan, and one written by `write_full` in a single process loads under all of
them. A directory holds the checkpoint that was there before, or the new one, whole (whole_files.py); both are held against the
record of their files when they are read (checkpoint_reader.py).
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..comm.comm import Comm
from ..comm.process import TorchComm
from ..comm.text_exchange import MOST_BYTES, one_line
from ..data.fields import form_of, to_data
from ..data.schema import SchemaError, paragraph, text
from ..data.whole_files import COMPLETE, begin, commit, file_facts, give_up, partial, write_record
from ..errors import CheckpointError
from ..memory.host_copy import HostCopy
from ..program.layout import StateEntry
from ..step.dtensors import described, in_place, unpack
from ..step.run_tensor import RunTensor
from ..step.session import Session
from ..step.state import AVERAGES
from .checkpoint_files import Files, RecordedWriter, plan_files
from .checkpoint_reader import METADATA, DataPlanner, DataReader, named, verified
from .save_plans import Written

Signature = tuple[tuple[int, ...], torch.dtype] | None
Signatures = dict[str, Signature]
_UNWRITABLE = ("cannot be written", "choose another directory")
_lock = threading.Lock()


def save(directory: str | Path, session: Session) -> None:
    """Write the session's state; every rank calls it. An existing checkpoint in the directory is replaced, once the new one is
    whole. Raises CheckpointError where `directory` is no directory and cannot be made one, or cannot be written."""
    comm, folder = session.comm, Path(directory)
    if not isinstance(comm, TorchComm):
        state = session.state_dict()
        _on_first_rank(session, lambda: write_full(folder, state), directory)
        return
    entries = session.state_entries()
    _on_first_rank(session, lambda: begin(folder), directory)
    with named(directory, "cannot be planned", "see what is wrong with it"):
        state = {name: described(entry) for name, entry in entries.items()}
        files = plan_files(state, comm.rank, lambda said: comm.share(said, text(MOST_BYTES)))
    with comm.excused(f"writing its file of {directory}"):
        own = _write_own(partial(folder), files, entries)
    everyone = comm.share(to_data(own), form_of(Written).read)
    problem = next((one.problem for one in everyone if one.problem), "")

    def complete() -> None:
        if problem:
            give_up(folder)
            raise CheckpointError(problem)
        with named(directory, *_UNWRITABLE):
            files.write_metadata(partial(folder), [one.texts for one in everyone])
        _complete(folder, {name: facts for one in everyone for name, facts in one.files.items()})

    _on_first_rank(session, complete, directory)


def _write_own(folder: Path, files: Files, entries: Mapping[str, StateEntry]) -> Written:
    """Write this rank's file of a state."""
    copy = HostCopy({name: entries[name].value for name in files.own.tensors})
    copy.fill({name: entries[name].value for name in files.own.tensors})
    try:
        texts = files.own.write(
            folder, copy.numbers, {index.fqn: entries[index.fqn].value for index in files.own.texts}
        )
        return Written({files.own.name: file_facts(folder / files.own.name)}, texts)
    except OSError as error:
        return Written({}, [], f"{folder.parent} cannot be written: {error.strerror or error}")
    except CheckpointError as error:
        return Written({}, [], str(error))


def write_full(directory: str | Path, state: Mapping[str, Any]) -> None:
    """Write full tensors from this process alone, process group or not. Raises CheckpointError."""
    with named(directory, *_UNWRITABLE):
        begin(Path(directory))
        _write_alone(Path(directory), state)


def _write_alone(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint in one process, as `save` does after `begin`. Raises CheckpointError, OSError, SchemaError."""
    written = partial(folder)
    try:
        with named(folder, *_UNWRITABLE), _alone():
            dcp.save(dict(state), storage_writer=RecordedWriter(written), no_dist=True)
        _complete(folder, {path.name: file_facts(path) for path in written.glob("__*")})
    except (CheckpointError, OSError):
        give_up(folder)
        raise


def _complete(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Make files that all ranks have written, and `.metadata`, the directory's checkpoint. files: bytes and SHA-256 of each.
    Raises OSError, SchemaError."""
    written = partial(folder)
    files[METADATA] = file_facts(written / METADATA)
    write_record(written, {"files": dict(sorted(files.items()))})
    others = [path.name for path in folder.glob("__*_*.distcp") if path.name not in files]
    commit(folder, last=(COMPLETE, METADATA), gone=(METADATA, COMPLETE, *others))


def _on_first_rank(session: Session, action: Callable[[], object], directory: str | Path) -> None:
    """Run something on rank 0, whose error every rank raises as a CheckpointError."""
    problem = ""
    if session.comm.rank == 0:
        try:
            with session.comm.excused(f"writing {directory}"):
                action()
        except OSError as error:
            problem = f"{directory} cannot be a checkpoint directory: {error.strerror or error}; choose another"
        except (SchemaError, CheckpointError) as error:
            problem = str(error)
    (problem, *_) = session.comm.share(one_line(problem), paragraph())
    if problem:
        raise CheckpointError(problem)


def load(directory: str | Path, session: Session, *, checked: bool = False, weights_alone: bool = False) -> None:
    """Fill the session from a checkpoint of any mesh and plan; every rank calls it. checked: its files were held against their
    record a moment ago, on all ranks; weights_alone: take parameters and buffers, and nothing of the run that wrote them.

    Parameters and buffers must be in it. Optimizer state, averages and step are taken when they are (a checkpoint of weights
    alone starts at step 0, averages begin where parameters are). Raises CheckpointError naming what is missing or has another
    shape.
    """
    reader = verified(directory, session.comm, checked=checked)
    own = session.names()
    available = {name: one for name, one in signatures(reader).items() if not weights_alone or name in own}
    session.prepare_optimizer_state(available)
    entries = session.state_entries()
    wanted = {}
    for name, entry in entries.items():
        optional = name == "step" or name.startswith(("optim", *AVERAGES))
        if name not in available:
            if optional and name not in own:
                continue
            raise CheckpointError(f"{directory}: no tensor {name!r} in this checkpoint ({len(available)} entries)")
        _check_kind(f"{directory}: {name}", entry, available[name])
        wanted[name] = entry
    values: dict[str, Any] = {name: entry.value for name, entry in entries.items()}
    if isinstance(session.comm, TorchComm):
        target, problem = {name: in_place(entry) for name, entry in wanted.items()}, ""
        planner = DataPlanner(crc=reader.files is None)
        try:
            # every rank plans by itself what it reads, so torch has nothing to send
            with named(directory), _alone(), session.comm.excused(f"reading {directory}"):
                dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointError as error:
            problem = str(error)
        problem = next(filter(None, (problem, *session.comm.share(one_line(problem), paragraph()))), "")
        if problem:
            raise CheckpointError(problem)
        values |= {
            name: one.to_local() if isinstance(one, (DTensor, RunTensor)) else one for name, one in target.items()
        }
    else:
        for name, entry in wanted.items():
            with named(directory):
                values[name] = unpack(_read_alone(reader, name, entry.value, available[name]), entry)
    session.accept(values)


def read_full(directory: str | Path, names: Iterable[str], comm: Comm | None = None) -> dict[str, Tensor]:
    """Full tensors of a checkpoint, of which every rank may take others. comm: of the ranks that call it together; none where
    this one is alone. Raises CheckpointError."""
    source = TensorSource(directory, comm)
    return {name: source.read(name) for name in names}


class TensorSource:
    """A checkpoint whose tensors are read one by one, full, without a process group."""

    def __init__(self, directory: str | Path, comm: Comm | None = None) -> None:
        """comm: of the ranks that make one together. Raises CheckpointError where the directory holds no checkpoint, or a damaged
        one."""
        self.directory = directory
        self.reader = verified(directory, comm)
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
    reader.check_room(name)
    target = {name: plain if signature is None else torch.empty(signature[0], dtype=signature[1])}
    with _alone():
        planner = DataPlanner(crc=reader.files is None)
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    return target[name]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One thread at a time, and no warning that there is no process group: that is what was asked for."""
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
