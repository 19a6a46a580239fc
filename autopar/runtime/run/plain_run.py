"""A run without a directory: it resumes and saves where it is told to, and may record what every rank does when (`--profile`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..comm.recorder import Recorder
from ..errors import RuntimeProgramError
from .evaluation import evaluations
from .loaded import LoadedProgram
from .metrics import Metrics, StepLine
from .train_loop import Listener, Loop, tell


def train(program: LoadedProgram, arguments: argparse.Namespace) -> None:
    """Train to step `--steps` (or infer so many batches), rank 0 reporting. Raises RuntimeProgramError."""
    session, manifest = program.session, program.manifest
    if not (arguments.resume or arguments.weights or manifest.weights):
        raise RuntimeProgramError(
            "this program has no weights (its model was on the meta device when it was compiled); give --weights "
            "DIRECTORY, of torch.distributed.checkpoint (full or sharded tensors) or of safetensors, or --resume CHECKPOINT"
        )
    if arguments.resume:
        program.resume(arguments.resume)
    first = program.step
    if arguments.steps < first:
        raise RuntimeProgramError(
            f"--resume {arguments.resume} is of step {first}, and --steps {arguments.steps} are those of the whole run; give "
            f"more than {first}"
        )
    seed = manifest.seed if arguments.seed is None else arguments.seed
    save_every = arguments.save_every if arguments.save else 0
    loop = Loop(program, arguments, seed, save_every, reads=session.comm.rank == 0)
    loop.go_to(first, first)
    profile = [Profile(program, Path(arguments.profile))] if arguments.profile else []
    evaluating = evaluations(program, arguments)
    loop.run(
        [
            *evaluating,
            Metrics(session, manifest, arguments),
            StepLine(arguments.steps),
            Checkpoint(arguments.save),
            *profile,
        ]
    )


class Checkpoint(Listener):
    """Saving into one directory, which is replaced, or nowhere."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._saved: int | None = None

    def save(self, loop: Loop) -> None:
        """Save the state after a step."""
        if self._directory:
            loop.program.save(self._directory)
            self._saved = loop.step

    def at_end(self, loop: Loop) -> None:
        """Save also where no step was to be done, and say so."""
        session = loop.program.session
        if self._saved != loop.step:
            session.settle("ending the run")
            self.save(loop)
        if self._directory:
            tell(session.comm, f"saved {self._directory}")


class Profile(Listener):
    """A record of what this rank does when, a file per rank."""

    def __init__(self, program: LoadedProgram, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._recorder = folder, Recorder(program.session.comm.device)
        program.session.recorder = self._recorder

    def at_end(self, loop: Loop) -> None:
        """Write what was recorded."""
        comm, folder = loop.program.session.comm, self._folder
        (folder / f"rank_{comm.rank}.json").write_text(json.dumps(self._recorder.as_data(comm.rank)), encoding="utf-8")
        tell(comm, f"recorded {folder}; autopar-dump {loop.program.manifest.directory} --profile {folder}")
