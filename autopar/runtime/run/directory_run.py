"""The run of `run.py --run-dir DIR`: trains to a step, whatever happens on the way.

The same command starts a run and continues it: the last step of the directory that is whole is taken, its seed and its place in
the data with it, and steps that are damaged are named and left. The state is saved every so many steps, beside training. A signal
(SIGTERM; SIGUSR1, with which Slurm warns; Ctrl-C) on any rank makes all of them save after the same step and end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch.distributed as dist

from ..checkpoint.run_directory import RunDirectory
from ..checkpoint.saver import Saver
from ..comm.environment import machine_name
from ..comm.process import TorchComm
from ..comm.text_exchange import one_line
from ..data.schema import paragraph, text
from ..errors import CheckpointError, RuntimeProgramError, TooManySkips
from ..health.launcher import launcher
from ..program.worlds import started_ranks
from ..step.session import Session
from .evaluation import evaluations
from .excluded_nodes import SlowMachines
from .learned_speeds import LearnedSpeeds
from .loaded import LoadedProgram
from .loss_checks import LossChecks
from .metrics import Metrics, StepLine
from .other_plans import OtherPlans
from .ownership import Ownership
from .program_files import recorded
from .rank_consistency import Comparing
from .saving import Saving, last_good_step, state_bytes
from .sdc_check import Recomputing
from .spares import AGAIN, DONE, LOST, MOVED, START_AGAIN, tell_spares
from .stop import Stop
from .train_loop import Listener, Loop, tell

ENDINGS = {
    AGAIN: "to leave out a machine",
    LOST: "as torchrun, or the job's store, is gone",
    MOVED: "to go on under another plan",
}
"""The endings of a run whose ranks are to be started again."""
SAVE_EVERY = 100
"""Steps, where nothing else is asked for."""


class Run:
    """A run of one rank, from where the directory stands to `--steps`."""

    def __init__(
        self,
        program: LoadedProgram,
        arguments: argparse.Namespace,
        store: dist.Store,
        owner: Ownership | None = None,
        began_s: float = 0.0,
    ) -> None:
        """store: of this round's workers; owner: of the directory, where that is this rank; began_s: when this start began, by
        `time.perf_counter`."""
        session, manifest = program.session, program.manifest
        check_arguments(arguments, session)
        self.program, self.manifest = program, manifest
        self.comm, self.store = session.comm, store
        machines: list[str] = self.comm.share(machine_name(), text())
        if isinstance(self.comm, TorchComm):
            self.comm.flight.machines = machines
        recomputing = [Recomputing(session, arguments.recompute, machines)] if arguments.recompute else []
        self.directory = RunDirectory(Path(arguments.run), arguments.keep, arguments.keep_every)
        if owner is not None:
            self.directory.taken_over = owner.problem
        needed = state_bytes(session)
        self._on_first_rank(lambda: self.directory.prepare(needed))
        self.seed: int = manifest.seed if arguments.seed is None else arguments.seed
        self._on_first_rank(self._say_changes)
        found = last_good_step(self.directory, session)
        if found is not None and arguments.seed not in (None, found.seed):
            raise RuntimeProgramError(
                f"--run-dir {arguments.run} was started with --seed {found.seed}, not {arguments.seed}; leave --seed out, or "
                "give another directory"
            )
        self.seed = self.seed if found is None else found.seed
        for form in session.forms:
            for stage in form.stages.values():
                stage.rt.seed = self.seed
        self.saver = Saver(self.directory, session, self.seed, manifest.plan_hash, arguments.timeout)
        self.saving = Saving(program, self.saver, arguments.asynchronous)
        if arguments.on_nan == "skip":
            session.skip_not_finite()
        if found is not None:
            self.saving.resume(found)
        save_every = arguments.save_every or manifest.save_every or SAVE_EVERY
        self.loop = Loop(program, arguments, self.seed, save_every, reads=True)
        self.loop.go_to(session.rt.step, 0 if found is None else found.position)
        self.stop = Stop(store, cast(TorchComm, self.comm), arguments.timeout, self.loop.late)
        if (torchrun := launcher()) is not None:
            torchrun.saves_s = arguments.timeout
        session.updater.measure_norm = arguments.grad_norm
        least = min((self.comm.world_size, *manifest.worlds))
        slow = SlowMachines(self.directory.root, arguments.exclude_slow, machines, least, self.comm, self.stop)
        own = session.rebalancer
        learning = list[Listener]()
        if own is not None:
            speeds = LearnedSpeeds(self.directory.root, own, machines, self.loop)
            other_plans = OtherPlans(program, own, speeds, self.stop, time.perf_counter() - began_s)
            learning = [speeds, other_plans]
        self.listeners: list[Listener] = [
            self.stop,
            self.saving,
            Comparing(machines[self.comm.rank], arguments.recheck, slow),
            *recomputing,
            *learning,
            *evaluations(program, arguments),
            LossChecks(session, self.saving, arguments.on_nan, arguments.spike),
            StepLine(arguments.steps),
            Metrics(session, manifest, arguments),
        ]

    def train(self) -> int:
        """Steps until the last; the exit status. Raises RuntimeProgramError."""
        loop, stop = self.loop, self.stop
        try:
            loop.run(self.listeners)
        except TooManySkips as error:
            self.saving.settle()
            raise TooManySkips(
                f"{error}; the last saved step is {self.saver.saved}. Other batches do not mend it"
            ) from None
        finally:
            self.saver.finish()
        done = loop.last == loop.steps
        if not done:
            how = ENDINGS.get(stop.why, "by a signal")
            tell(self.comm, f"stopped {how} after step {loop.step}; the same command goes on")
        if self.comm.rank == 0 and not stop.store_gone:
            tell_spares(self.store, started_ranks() - self.comm.world_size, DONE if done else stop.why)
        again = not done and (stop.why in ENDINGS or (self.manifest.worlds and stop.others_go()))
        return START_AGAIN if again else 0

    def _say_changes(self) -> None:
        """Print what changed since this run was last started. Raises CheckpointError."""
        if changes := recorded(self.directory.root, self.manifest, self.seed):
            print(f"since this run was last started: {changes}", flush=True)

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        """Run something on rank 0, whose error every rank raises."""
        problem = ""
        if self.comm.rank == 0:
            try:
                with self.comm.excused("looking at the directory of the run"):
                    action()
            except CheckpointError as error:
                problem = str(error)
        (problem, *_) = self.comm.share(one_line(problem), paragraph())
        if problem:
            raise CheckpointError(problem)


def check_arguments(arguments: argparse.Namespace, session: Session) -> None:
    """Raises RuntimeProgramError for what does not go together."""
    if not session.training:
        raise RuntimeProgramError("--run-dir is for training; this program was compiled for inference")
    for name in ("save", "resume", "profile"):
        if getattr(arguments, name):
            raise RuntimeProgramError(f"--run-dir saves and resumes by itself; leave out --{name}, or --run-dir")
