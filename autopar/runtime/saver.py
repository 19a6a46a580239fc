"""Writes a session's state into a run directory, beside training.

`start` copies the state into host memory, which is what training waits for; a thread of every rank then writes its
files, takes their hashes and tells the others in a process group of its own (what training sends and what saving sends must not
wait for each other), and rank 0 completes the step. One step is written at a time: the next `start` waits for it. Whether it
worked is the same on every rank, and is looked at every step (`problem`): a run does not go on for hours without a
checkpoint because nobody looked.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from .checkpoint_reader import named
from .errors import CheckpointError
from .process import TorchComm
from .run_directory import RunDirectory, StepRecord, file_facts
from .session import Session


def check_finite(state: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a value has entries that are no numbers: from such a step nothing can go on."""
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and local.is_floating_point() and not bool(local.isfinite().all()):
            raise CheckpointError(f"{name} is not finite")


class Saver:
    """One rank's part of saving. Every rank makes one and calls its methods in the same order."""

    def __init__(self, directory: RunDirectory, session: Session, seed: int, plan: str, timeout_s: float) -> None:
        self.directory = directory
        self.session = session
        self.saved: int | None = None
        self._seed = seed
        self._plan = plan
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread: threading.Thread | None = None
        self._problem = ""

    def start(self, step: int, position: int) -> None:
        """Copy the state and begin to write it as a step. position: global batches taken so far."""
        self.finish()
        self._problem = ""
        state = BlockingAsyncStager().stage(self.session.state_dict())
        found = StepRecord(step, position, self._seed, self._ranks, self._plan, {})
        self._thread = threading.Thread(target=self._write, args=(state, found), name=f"saving step {step}")
        self._thread.start()

    def finish(self) -> None:
        """Wait until what was started is written, or has failed."""
        comm = self.session.comm
        if self._thread is not None:
            with comm.flight.excused(self._thread.name) if isinstance(comm, TorchComm) else nullcontext():
                self._thread.join()
            self._thread = None

    @property
    def problem(self) -> str:
        """Why the last step that was to be written is not there; empty where it is, or is being written."""
        return "" if self._thread is not None and self._thread.is_alive() else self._problem

    def _write(self, state: Mapping[str, Any], found: StepRecord) -> None:
        """The thread."""
        problem = ""
        comm = self.session.comm
        flight = comm.flight if isinstance(comm, TorchComm) else None
        if flight is not None:
            flight.working = f"writing its files of step {found.step}"
        try:
            check_finite(state)
            files = self._files(state, found.step)
        except (OSError, CheckpointError) as error:
            files, problem = {}, str(error)
        if flight is not None:
            flight.working = ""
        try:
            everyone: list[Any] = [None] * self._ranks
            dist.all_gather_object(everyone, (files, problem), group=self._group)
            problem = next((text for _, text in everyone if text), "")
            if not problem and self._rank == 0:
                problem = self._complete(found, {name: facts for own, _ in everyone for name, facts in own.items()})
            told = [problem]
            dist.broadcast_object_list(told, src=0, group=self._group)
            problem = told[0]
        except RuntimeError as error:  # another rank is gone; its own error says why
            problem = problem or f"rank {self._rank}: {str(error).splitlines()[0]}"
        if problem and self._rank == 0:
            self.directory.give_up(found.step)
        self._problem = f"step {found.step} was not saved: {problem}" if problem else ""
        self.saved = self.saved if problem else found.step

    def _files(self, state: Mapping[str, Any], step: int) -> dict[str, dict[str, Any]]:
        """Write this rank's files and see that they are durable; their facts by name. Raises CheckpointError, OSError."""
        folder = self.directory.partial(step)
        with named(folder, "cannot be written", "see what is wrong with it"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            writer = dcp.FileSystemWriter(folder)
            dcp.save(dict(state), storage_writer=writer, process_group=self._group)
        own = sorted(folder.glob(f"__{self._rank}_*"))
        own += [folder / ".metadata"] if self._rank == 0 else []
        return {path.name: file_facts(path) for path in own}

    def _complete(self, found: StepRecord, files: Mapping[str, Mapping[str, Any]]) -> str:
        """Give the step its name; what was wrong."""
        try:
            self.directory.complete(
                StepRecord(found.step, found.position, found.seed, found.ranks, found.plan, dict(sorted(files.items())))
            )
        except OSError as error:
            return f"{self.directory.partial(found.step)}: {error.strerror or error}"
        return ""
