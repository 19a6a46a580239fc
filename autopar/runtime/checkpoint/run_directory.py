"""The directory of a run: numbered steps, each of which is complete or not there.

A step is written beside the others under a name that starts with a dot. When every file of it is durable, `complete.json`
says what they are (bytes, SHA-256 of each, and of itself), and the folder gets its name in one rename. Older steps go only
after that. So whatever ends a run, at whatever moment, the steps that have a name are whole; and where a file was damaged
since, `check` finds it and the step before is taken.

    RUN/steps/0000000040/    files of torch.distributed.checkpoint, and complete.json
    RUN/steps/.0000000050/   not finished; the next start deletes it

Nothing here talks to other ranks (saver.py does): one rank calls what changes the directory.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from ..data.fields import Form, form_of
from ..data.schema import MOST_RANKS, SchemaError, integer
from ..data.whole_files import COMPLETE, FILES, problem_of, read_record, sync, write_record
from ..errors import CheckpointError

_DIGITS = 10
Count = Annotated[int, integer(0, 1 << 53)]
Files = Annotated[Mapping[str, Mapping[str, Any]], Form(FILES)]


@dataclass(frozen=True)
class StepRecord:
    """The record of a step in its `complete.json`. position: global batches that were taken from the data; plan: a hash
    of the plan that wrote it; files: bytes and SHA-256 by name."""

    step: Count
    position: Count
    seed: Annotated[int, integer(-(1 << 63), (1 << 63) - 1)]
    ranks: Annotated[int, integer(1, MOST_RANKS)]
    plan: str
    files: Files


class RunDirectory:
    """keep: so many of the last steps stay, and of the others every `keep_every`-th (0: none)."""

    def __init__(self, root: Path, keep: int = 3, keep_every: int = 0) -> None:
        self.root = root
        self.keep = keep
        self.keep_every = keep_every
        self.taken_over: Callable[[], str] = str
        """Why the directory is another run's by now; empty where it is not (ownership.py)."""

    @property
    def _steps(self) -> Path:
        return self.root / "steps"

    def folder(self, step: int) -> Path:
        """The folder of a step."""
        return self._steps / f"{step:0{_DIGITS}}"

    def partial(self, step: int) -> Path:
        """The folder in which a step is written."""
        return self._steps / f".{step:0{_DIGITS}}"

    def steps(self) -> list[int]:
        """Steps that have a name, the last first."""
        if not self._steps.is_dir():
            return []
        names = (path.name for path in self._steps.iterdir() if path.is_dir())
        return sorted((int(name) for name in names if len(name) == _DIGITS and name.isdigit()), reverse=True)

    def prepare(self, state_bytes: int) -> None:
        """Make the directory, see that it can be written and has room for two states of so many bytes, and delete what was
        never finished. Raises CheckpointError."""
        try:
            self._steps.mkdir(parents=True, exist_ok=True)
            probe = self._steps / f".probe-{os.getpid()}"
            probe.write_bytes(b"?")
            probe.unlink()
            free_bytes = shutil.disk_usage(self._steps).free
            for path in self._steps.glob(".*"):
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(
                f"--run-dir {self.root}: {error.strerror or error}; give a directory that every rank can write to"
            ) from error
        if free_bytes < 2 * state_bytes:
            raise CheckpointError(
                f"--run-dir {self.root}: a step takes {state_bytes / 1e9:.3g} GB and two must have room, since one is kept until "
                f"the next is complete; {free_bytes / 1e9:.3g} GB are free there. Make room, or give another directory"
            )

    def read(self, step: int) -> StepRecord:
        """The record of a step. Raises CheckpointError."""
        path = self.folder(step) / COMPLETE
        try:
            found = read_record(self.folder(step), form_of(StepRecord).read)
        except (OSError, SchemaError) as error:
            raise CheckpointError(
                f"step {step}: {path} is damaged ({getattr(error, 'strerror', None) or error})"
            ) from None
        if found.step != step:
            raise CheckpointError(f"step {step}: {path} is that of step {found.step}")
        return found

    def check(self, found: StepRecord, names: Iterable[str]) -> str:
        """A text of what is wrong with some files of a step; empty where nothing is."""
        problem = problem_of(self.folder(found.step), found.files, names)
        return f"step {found.step}: {problem}" if problem else ""

    def complete(self, found: StepRecord) -> None:
        """Give a step whose files are durable its name, then delete steps that are not to stay. Raises OSError."""
        folder = self.partial(found.step)
        write_record(folder, asdict(found))
        if problem := self.taken_over():
            raise OSError(errno.EPERM, problem)
        folder.rename(self.folder(found.step))
        sync(self._steps)
        for step in self._superfluous():
            shutil.rmtree(self.folder(step), ignore_errors=True)

    def set_aside(self, steps: Iterable[int]) -> None:
        """Give steps that turned out to be damaged another name, so that they are not among those that are kept. Raises
        OSError."""
        for step in steps:
            self.folder(step).rename(self._steps / f"damaged-{step:0{_DIGITS}}-{uuid.uuid4().hex[:8]}")

    def _superfluous(self) -> list[int]:
        old = self.steps()[max(self.keep, 1) :]
        return [step for step in old if not (self.keep_every and step % self.keep_every == 0)]

    def give_up(self, step: int) -> None:
        """Delete what was written of a step that cannot be completed."""
        shutil.rmtree(self.partial(step), ignore_errors=True)


def newest_step_said(folder: Path) -> str:
    """Words that name the newest step, where a folder that was given for a checkpoint is the directory of a run; else none."""
    run = RunDirectory(folder)
    steps = run.steps()
    return (
        f"; it is the directory of a run, whose newest step is {run.folder(steps[0])}: give that one" if steps else ""
    )
