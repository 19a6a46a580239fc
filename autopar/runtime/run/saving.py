"""Saving of a run in its directory: the last whole step is found there, steps are written, and those that were not are said."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

from ..checkpoint.run_directory import RunDirectory, StepRecord
from ..checkpoint.saver import Saver
from ..comm.text_exchange import one_line
from ..data.schema import MOST_SIZE, integer, listed, paragraph
from ..data.whole_files import share_of
from ..errors import CheckpointError
from ..step.session import Session
from .loaded import LoadedProgram
from .train_loop import Listener, Loop, tell

MOST_FAILED_SAVES = 3
"""The most failed saves in a row; then a run ends, as it would lose more and more."""


class Saving(Listener):
    """Saves steps beside training, and says at once what was not saved."""

    def __init__(self, program: LoadedProgram, saver: Saver, asynchronous: bool) -> None:
        self.saver = saver
        self._program, self._comm, self._asynchronous = program, program.session.comm, asynchronous
        self._failed = 0
        self._said = ""
        self._lost = set[Path]()

    def resume(self, found: StepRecord) -> None:
        """Load a step that was held against its record a moment ago."""
        self._program.resume(self.saver.directory.folder(found.step), checked=True)
        self.saver.saved = found.step

    def begin(self, loop: Loop) -> None:
        """Say at once what was not saved."""
        self._say_problem()

    def save(self, loop: Loop) -> None:
        """Begin to write a step, once the one before it is written."""
        self.settle()
        self.saver.start(loop.step, loop.position)
        if not self._asynchronous:
            self.saver.finish()

    def at_end(self, loop: Loop) -> None:
        """Wait for the last step. Raises CheckpointError where it was not saved."""
        self.settle()
        if self.saver.problem:
            raise CheckpointError(f"{self.saver.problem}; the last saved step is {self.saver.saved}")
        tell(self._comm, f"saved step {self.saver.saved or loop.step} in {self.saver.directory.root}")

    def settle(self) -> None:
        """Wait for the step that is being written, and count: every rank does at the same place. Raises CheckpointError where
        steps fail to be written again and again."""
        self.saver.finish()
        self._say_problem()
        with self._comm.excused("looking for what was saved"):
            self._say_lost()
        self._failed = self._failed + 1 if self.saver.problem else 0
        if self._failed >= MOST_FAILED_SAVES:
            raise CheckpointError(f"{self.saver.problem}; that is {self._failed} in a row, so the run ends")

    def _say_problem(self) -> None:
        problem = self.saver.problem
        if problem and problem != self._said:
            tell(self._comm, f"{problem}; the run goes on, the last saved step is {self.saver.saved}", sys.stderr)
        self._said = problem

    def _say_lost(self) -> None:
        """Say once that somebody deleted what was saved."""
        directory = self.saver.directory
        folder = directory.root if self.saver.saved is None else directory.folder(self.saver.saved)
        if self._comm.rank == 0 and folder not in self._lost and not folder.is_dir():
            self._lost.add(folder)
            print(f"{folder} is gone; the run goes on, and saves there again", file=sys.stderr, flush=True)


def state_bytes(session: Session) -> int:
    """Bytes of what all ranks together save, at most: replicated values are counted once per rank."""
    own = sum(
        e.value.numel() * e.value.element_size()
        for e in session.state_entries().values()
        if isinstance(e.value, Tensor)
    )
    return sum(session.comm.share(own, integer(0, MOST_SIZE)))


def last_good_step(directory: RunDirectory, session: Session) -> StepRecord | None:
    """The last step whose files are what was written; nothing where there is no step. Every rank checks a part of the files.

    Raises CheckpointError where there are steps, and none is whole.
    """
    comm, problems, damaged = session.comm, list[str](), list[int]()
    with comm.excused("looking for steps"):
        own = directory.steps()
    (steps, *_) = comm.share(own, listed(integer(0, 1 << 53)))
    for step in steps:
        try:
            with comm.excused(f"checking step {step}"):
                found = directory.read(step)
                problem = directory.check(found, share_of(found.files, comm.rank, comm.world_size))
        except CheckpointError as error:
            found, problem = None, str(error)
        problem = next((text for text in comm.share(one_line(problem), paragraph()) if text), "")
        if not problem:
            if comm.rank == 0:
                with comm.excused("setting damaged steps aside"):
                    directory.set_aside(damaged)
            comm.barrier(site="damaged steps")
            return found
        problems.append(problem)
        damaged.append(step)
        tell(comm, f"damaged: {problem}; the step before it is taken", sys.stderr)
    if problems:
        raise CheckpointError(
            f"--run-dir {directory.root}: no step is whole ({'; '.join(problems[:3])}); restore one, or delete all to begin anew"
        )
    return None
