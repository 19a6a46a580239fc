"""Writes a session's state into a run directory, beside training.

`start` copies the state into host memory, which is what training waits for; a thread of every rank then writes its
file, takes its hash and tells the others in a process group of its own (what training sends and what saving sends must not
wait for each other), and rank 0 completes the step. Who writes what is planned at the first step and kept, as long as the
state has the same tensors on every rank. One step is written at a time: the next `start` waits for it. Whether it
worked is the same on every rank, and is looked at every step (`problem`): a run does not go on for hours without a
checkpoint because nobody looked.

The thread shares Python's lock with training, so what it does in Python makes steps longer; hence no tensor is described or
pickled again (checkpoint_files.py), and what takes long (copying, writing, hashing) is done without that lock.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.backends import HOST
from ..comm.process import TorchComm
from ..comm.text_exchange import one_line, tell_all
from ..data.fields import to_data
from ..data.schema import flag
from ..data.whole_files import file_facts
from ..errors import CheckpointError
from ..memory.host_copy import HostCopy
from ..program.layout import StateEntry
from ..step.dtensors import described
from ..step.session import Session
from .checkpoint_files import Files, plan_files
from .checkpoint_reader import named
from .run_directory import RunDirectory, StepRecord
from .save_plans import Written, read_written

Signature = dict[str, tuple[torch.Size, torch.dtype, torch.device] | None]
"""The facts about state that files depend on: of tensors the local shape, dtype and device; None for values that are none."""


class Saver:
    """One rank's part of saving. Every rank makes one and calls its methods in the same order."""

    def __init__(self, directory: RunDirectory, session: Session, seed: int, plan: str, timeout_s: float) -> None:
        self.directory = directory
        self.session = session
        self.saved: int | None = None
        self._seed = seed
        self._plan = plan
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend=HOST.transport.name, timeout=timedelta(seconds=timeout_s))
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._signature: Signature = {}
        self._files: Files
        self._copy: HostCopy

    def start(self, step: int, position: int) -> None:
        """Copy the state and begin to write it as a step. position: global batches taken so far. Raises CheckpointError where
        files cannot be planned."""
        self.finish()
        self._problem = ""
        entries = self.session.state_entries()
        self._prepare(entries)
        self._copy.fill({name: entries[name].value for name in self._copy.tensors})
        values = {index.fqn: entries[index.fqn].value for index in self._files.own.texts}
        found = StepRecord(step, position, self._seed, self._ranks, self._plan, {})
        self._thread = threading.Thread(target=self._write, args=(values, found), name=f"saving step {step}")
        self._thread.start()

    def finish(self) -> None:
        """Wait until what was started is written, or has failed."""
        if self._thread is not None:
            with self.session.comm.excused(self._thread.name):
                self._thread.join()
            self._thread = None

    @property
    def problem(self) -> str:
        """Why the last step that was to be written is not there; empty where it is, or is being written."""
        return "" if self._thread is not None and self._thread.is_alive() else self._problem

    def _prepare(self, entries: Mapping[str, StateEntry]) -> None:
        """Plan files, and make room for what this rank writes, where the state of any rank is not as it was. Raises
        CheckpointError."""
        signature = {name: _signature(entry.value) for name, entry in entries.items()}
        if not any(self.session.comm.share(signature != self._signature, flag())):
            return
        with named(self.directory.root, "cannot be planned", "see what is wrong with it"):
            state = {name: described(entry) for name, entry in entries.items()}
            self._files = plan_files(state, self._rank, lambda said: tell_all(said, self._group))
        self._copy = HostCopy({name: entries[name].value for name in self._files.own.tensors})
        self._signature = signature

    def _write(self, values: Mapping[str, Any], found: StepRecord) -> None:
        """The thread. values: those that are no tensors."""
        comm = self.session.comm
        flight = comm.flight if isinstance(comm, TorchComm) else None
        if flight is not None:
            flight.working = f"writing its files of step {found.step}"
        try:
            written = self._write_own(values, found.step)
        except (OSError, CheckpointError) as error:
            written = Written({}, [], str(error))
        if flight is not None:
            flight.working = ""
        try:
            everyone = [read_written(told) for told in tell_all(json.dumps(to_data(written)), self._group)]
            problem = next((one.problem for one in everyone if one.problem), "")
            if not problem and self._rank == 0:
                problem = self._complete(found, everyone)
            problem = tell_all(one_line(problem) if self._rank == 0 else "", self._group)[0]
        except RuntimeError as error:  # another rank is gone; its own error says why
            problem = f"rank {self._rank}: {str(error).splitlines()[0]}"
        if problem and self._rank == 0:
            self.directory.give_up(found.step)
        self._problem = f"step {found.step} was not saved: {problem}" if problem else ""
        self.saved = self.saved if problem else found.step

    def _write_own(self, values: Mapping[str, Any], step: int) -> Written:
        """Write this rank's file and see that it is durable. Raises CheckpointError, OSError."""
        self._copy.check_finite()
        folder, own = self.directory.partial(step), self._files.own
        folder.mkdir(parents=True, exist_ok=True)
        texts = own.write(folder, self._copy.numbers, values)
        return Written({own.name: file_facts(folder / own.name)}, texts)

    def _complete(self, found: StepRecord, everyone: list[Written]) -> str:
        """Write what there is of all files and give the step its name; what was wrong."""
        folder = self.directory.partial(found.step)
        try:
            path = self._files.write_metadata(folder, [one.texts for one in everyone])
            files = {name: facts for one in everyone for name, facts in one.files.items()}
            files = dict(sorted({**files, path.name: file_facts(path)}.items()))
            self.directory.complete(dataclasses.replace(found, files=files))
        except OSError as error:
            return f"{folder}: {error.strerror or error}"
        return ""


def _signature(value: Any) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None
