"""The loop of `run.py --run-dir DIR`: trains to a step, whatever happens on the way.

The same command starts a run and continues it: the last step of the directory that is whole is taken, its seed and its place in
the data with it, and steps that are damaged are named and left. The state is saved every so many steps, beside training. A signal
(SIGTERM, and SIGUSR1, with which Slurm warns) on any rank makes all of them save after the same step and end. A loss
that is no number ends the run, or takes it back to the last step that was saved and on past the batches since.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import torch.distributed as dist
from torch import Tensor

from ..checkpoint.run_directory import RunDirectory, StepRecord
from ..checkpoint.saver import Saver
from ..comm.comm import Comm
from ..comm.environment import machine_name
from ..comm.process import TorchComm
from ..comm.text_exchange import one_line
from ..data.fields import form_of, to_data
from ..data.schema import MOST_SIZE, integer, listed, paragraph, text
from ..data.whole_files import share_of
from ..errors import CheckpointError, RankError, RuntimeProgramError, TooManySkips
from ..health.launcher import launcher
from ..program.batches import random_batches, user_batches
from ..program.manifest import Manifest
from ..program.worlds import started_ranks
from ..step.session import Session
from ..update.skips import spoiled_text
from .excluded_nodes import SLOW, Failure, failures, note, too_few, unwanted
from .metrics import Metrics, StepLine
from .ownership import Ownership
from .program_files import recorded
from .rank_consistency import Told, copies_of, not_finite, odd_text, slow_ranks, slow_text, steps_to_next
from .sdc_check import recompute, why_not
from .spares import AGAIN, DONE, LOST, START_AGAIN, tell_spares
from .spikes import Losses
from .stop import Stop

ENDINGS = {AGAIN: "to leave out a machine", LOST: "as torchrun, or the job's store, is gone"}
"""The endings of a run whose ranks are to be started again."""
MOST_REWINDS = 3
"""The most rewinds in a row, without a new saved step between them."""
MOST_FAILED_SAVES = 3
"""The most failed saves in a row; then a run ends, as it would lose more and more."""
SAVE_EVERY = 100
"""Steps, where nothing else is asked for."""


def state_bytes(session: Session) -> int:
    """Bytes of what all ranks together save, at most: replicated values are counted once per rank."""
    own = sum(
        e.value.numel() * e.value.element_size()
        for e in session.state_entries().values()
        if isinstance(e.value, Tensor)
    )
    return sum(session.comm.share(own, integer(0, MOST_SIZE)))


def tell(comm: Comm, line: str, stream: TextIO | None = None) -> None:
    """Rank 0 prints a line, to standard output or this stream. A log may be on a disk that takes long."""
    if comm.rank == 0:
        with comm.excused("writing a line of its log"):
            print(line, file=stream, flush=True)


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


def check_arguments(arguments: argparse.Namespace, session: Session) -> None:
    """Raises RuntimeProgramError for what does not go together."""
    if not session.training:
        raise RuntimeProgramError("--run-dir is for training; this program was compiled for inference")
    for name in ("save", "resume", "profile"):
        if getattr(arguments, name):
            raise RuntimeProgramError(f"--run-dir saves and resumes by itself; leave out --{name}, or --run-dir")
    if arguments.recompute and (problem := why_not(session)):
        raise RuntimeProgramError(f"--recompute: {problem}; leave it out (--recheck compares copies of parameters)")


class Run:
    """A run of one rank, from where the directory stands to `--steps`."""

    def __init__(
        self, program: Any, arguments: argparse.Namespace, store: dist.Store, owner: Ownership | None = None
    ) -> None:
        """program: a LoadedProgram; owner: of the directory, where that is this rank."""
        self.program = program
        self.session: Session = program.session
        check_arguments(arguments, self.session)
        self.manifest: Manifest = program.manifest
        self.arguments = arguments
        self.comm, self.store = self.session.comm, store
        self.machines: list[str] = self.comm.share(machine_name(), text())
        if isinstance(self.comm, TorchComm):
            self.comm.flight.machines = self.machines
        self.save_every = arguments.save_every or self.manifest.save_every or SAVE_EVERY
        self.directory = RunDirectory(Path(arguments.run), arguments.keep, arguments.keep_every)
        if owner is not None:
            self.directory.taken_over = owner.problem
        needed = state_bytes(self.session)
        self._on_first_rank(lambda: self.directory.prepare(needed))
        self.seed = self.manifest.seed if arguments.seed is None else arguments.seed
        self._on_first_rank(self._say_changes)
        self.position = 0
        self.batches: Iterator[Any] = iter(())
        found = last_good_step(self.directory, self.session)
        if found is not None and arguments.seed not in (None, found.seed):
            raise RuntimeProgramError(
                f"--run-dir {arguments.run} was started with --seed {found.seed}, not {arguments.seed}; leave --seed out, or "
                "give another directory"
            )
        self.seed = self.seed if found is None else found.seed
        for form in self.session.forms:
            for stage in form.stages.values():
                stage.rt.seed = self.seed
        self.saver = Saver(self.directory, self.session, self.seed, self.manifest.plan_hash, arguments.timeout)
        if arguments.on_nan == "skip":
            self.session.skip_not_finite()
        self._take(found)
        self.stop = Stop(store, cast(TorchComm, self.comm), arguments.timeout)
        if (torchrun := launcher()) is not None:
            torchrun.saves_s = arguments.timeout
        self.metrics, self.line = Metrics(self.session, self.manifest, arguments), StepLine(arguments.steps)
        self.rewinds = self.failed_saves = self.skipped = 0
        self.losses = Losses(arguments.spike)
        self.session.updater.measure_norm = arguments.grad_norm
        self._tellings, self._tell_after = 0, 0
        self._slow: dict[str, int] = {}
        self._lost = set[Path]()
        self._said, self._settled = "", self.saver.saved
        self._steps_told, self._told_at, self._waited_s, self._seen_s = 0, time.perf_counter(), 0.0, 0.0

    def train(self) -> int:
        """Steps until the last; the exit status. Raises RuntimeProgramError."""
        arguments, first = self.arguments, self.session.rt.step
        tell(self.comm, f"{self.manifest.show()}, {self.comm.device.type}, steps {first + 1} to {arguments.steps}")
        last = arguments.steps
        try:
            while (step := self.session.rt.step) < last:
                ending = self.stop.last_step(step + 1)
                last = last if ending is None else min(last, ending)
                if step >= last:
                    break
                self._step(step + 1)
                if step + 1 == last or (step + 1) % self.save_every == 0:
                    began = time.perf_counter()
                    self._settle()
                    self.saver.start(step + 1, self.position)
                    if not arguments.asynchronous:
                        self.saver.finish()
                    self.metrics.saved(time.perf_counter() - began)
                self._say_problem()
        finally:
            self.saver.finish()
        self._settle()
        if self.saver.problem:
            raise CheckpointError(f"{self.saver.problem}; the last saved step is {self.saver.saved}")
        if self.comm.rank == 0:
            print(f"saved step {self.saver.saved or first} in {self.directory.root}", flush=True)
            if last < arguments.steps:
                what = ENDINGS.get(self.stop.why, "by a signal")
                print(f"stopped {what} after step {self.session.rt.step}; the same command goes on", flush=True)
            why = DONE if last == arguments.steps else self.stop.why
            if not self.stop.store_gone:
                tell_spares(self.store, started_ranks() - self.comm.world_size, why)
        if last == arguments.steps:
            return 0
        return START_AGAIN if self.stop.why in ENDINGS or (self.manifest.worlds and self.stop.others_go()) else 0

    def _step(self, step: int) -> None:
        self.metrics.begin()
        start = time.perf_counter()
        batch = next(self.batches)
        recheck = self.arguments.recheck and step % self.arguments.recheck == 0
        if self._steps_told >= self._tell_after or recheck:
            self._compare(step, bool(recheck) or not self._tellings)
        if self.arguments.recompute and step % self.arguments.recompute == 0:
            leaves = self.program.leaves(batch)
            if self.session.same_data is not None:
                self.session.same_data.ahead(leaves, step)
            recompute(self.session, leaves, step, self.machines)
        try:
            loss = self.program(batch)
        except TooManySkips as error:
            self._settle()
            raise TooManySkips(
                f"{error}; the last saved step is {self.saver.saved}. Other batches do not mend it"
            ) from None
        self._steps_told += 1
        self.position += 1
        value, updater = loss.item(), self.session.updater
        if updater.not_finite or updater.skips.in_a_row == 2:
            self._name_spoiled(step)
        if updater.not_finite:
            self._skip(step, value)
        elif not math.isfinite(value):
            self._not_finite(step, value)
        elif (median := self.losses.spike(value)) is not None:
            self._rewind(step, f"{value:.6g}, above {self.losses.factor:g} times the median {median:.6g} before it")
        elif self.comm.rank == 0:
            seconds, norm = time.perf_counter() - start, self.session.grad_norm
            shown = "" if norm is None else f"  norm {float(norm):.6g}"
            with self.comm.excused(f"reporting step {step}"):
                self.line.show(step, f"loss {value:.6f}{shown}", seconds)
                self.metrics.step(step, value, seconds, self.program.leaves(batch))

    def _compare(self, step: int, copies: bool) -> None:
        """See that all ranks run the same; say which of them are slow. copies: that their copies of parameters are equal, too.
        Raises RankError."""
        flight = self.comm.flight if isinstance(self.comm, TorchComm) else None
        now, waited_s, steps = time.perf_counter(), flight.waited_s if flight else 0.0, self._steps_told
        own = Told(
            now - self._told_at,
            waited_s - self._waited_s,
            self.machines[self.comm.rank],
            f"{self.manifest.plan_hash} {self.seed}",
            copies_of(self.session) if copies else {},
            flight is not None and flight.seen.stood_since(self._seen_s),
        )
        everyone = self.comm.share(to_data(own), form_of(Told).read)
        odd, problem = odd_text(step, everyone)
        if odd:
            raise RankError(problem, odd)
        text = slow_text(everyone, steps) if self._tellings > 1 and steps else ""  # the first step warms up
        if text:
            tell(self.comm, f"step {step}  {text}")
        told = not any(one.stood for one in everyone)
        if self.arguments.exclude_slow and self.comm.rank == 0 and self._tellings > 1 and told:
            self._leave_out_slow(step, {everyone[rank].host for rank in slow_ranks(everyone)}, text)
        self._tellings, self._tell_after = self._tellings + 1, steps_to_next(step, steps, everyone)
        self._steps_told, self._told_at, self._waited_s = 0, time.perf_counter(), flight.waited_s if flight else 0.0
        self._seen_s = flight.seen.seconds if flight else 0.0

    def _leave_out_slow(self, step: int, slow: set[str], text: str) -> None:
        """End the run soon, where machines were slow again and again, so that it starts again without them."""
        self._slow = {machine: self._slow.get(machine, 0) + 1 for machine in slow}
        root, times = self.directory.root, self.arguments.exclude_slow
        for machine in sorted(machine for machine, count in self._slow.items() if count == times):
            spares = [""] * (started_ranks() - self.comm.world_size)
            least = min((self.comm.world_size, *self.manifest.worlds))
            if problem := too_few([*self.machines, *spares], [machine], least):
                tell(self.comm, f"step {step}: machine {machine} is not left out: {problem}", sys.stderr)
                continue
            with self.comm.excused("noting a slow machine"):
                noted = machine in unwanted(failures(root), 0, True, time.time())
                if not noted:
                    why = f"was slow {times} times in a row, last at step {step}: {text}"
                    note(root, Failure(time.time(), machine, SLOW, why))
            if not noted:
                self.stop.ask(step, AGAIN)

    def _skip(self, step: int, loss: float) -> None:
        """The update was left out, on all ranks."""
        self.skipped += 1
        tell(self.comm, f"{spoiled_text(step, loss)}: its update is skipped, {self.skipped} so far")

    def _not_finite(self, step: int, loss: float) -> None:
        """Stop, or go back. Nothing is saved of what came of it."""
        if self.arguments.on_nan != "stop":
            self._rewind(step, str(loss))
            return
        self._settle()
        self.session.settle("at a loss that is no number")
        good = self.saver.saved
        raise RuntimeProgramError(
            f"the loss of step {step} is {loss}; the last saved step is {good if good is not None else 'none'}. "
            "--on-nan rewind goes back to it and on with other batches"
        )

    def _name_spoiled(self, step: int) -> None:
        """Raises RankError where the batches or the parameters of a rank are why a loss is no number."""
        self.session.settle("at a loss that is no number")
        everyone = self.comm.share(not_finite(self.session), listed(text()))
        ranks = [rank for rank, names in enumerate(everyone) if names]
        if ranks:
            said = "; ".join(f"rank {rank}: {', '.join(everyone[rank][:4])}" for rank in ranks[:4])
            raise RankError(
                f"step {step}: there are parameters with entries that are no numbers ({said}), so no later step can be one; the "
                f"last saved step is {self.saver.saved}, the same command goes on from there",
                ranks,
            )

    def _rewind(self, step: int, loss: str) -> None:
        """Back to the last saved step, and past the batches since. Raises RuntimeProgramError."""
        self._settle()
        good = self.saver.saved
        self.rewinds += 1
        if self.rewinds > MOST_REWINDS:
            raise RuntimeProgramError(
                f"the loss of step {step} is {loss}, after {MOST_REWINDS} rewinds since the last saved step ({good}): other "
                "batches do not mend it"
            )
        found = last_good_step(self.directory, self.session)
        if found is None:
            raise RuntimeProgramError(f"the loss of step {step} is {loss}, and no step is saved yet to go back to")
        tell(self.comm, f"step {step}: the loss is {loss}; back to step {found.step}, past the batches since")
        position = self.position
        self._take(found, position)

    def _take(self, found: StepRecord | None, position: int | None = None) -> None:
        """Continue from a saved step. position: in the data, where it is not the step's own."""
        if found is not None:
            self.program.resume(self.directory.folder(found.step), checked=True)
            self.saver.saved = found.step
            self.position = found.position if position is None else position
        if self.arguments.data:
            self.batches = user_batches(self.arguments.data, self.position)
        else:
            self.batches = random_batches(self.manifest.inputs, self.seed, self.position)

    def _say_problem(self) -> None:
        """Say at once what was not saved."""
        problem = self.saver.problem
        if problem and problem != self._said:
            tell(self.comm, f"{problem}; the run goes on, the last saved step is {self.saver.saved}", sys.stderr)
        self._said = problem

    def _say_lost(self) -> None:
        """Say once that somebody deleted what was saved."""
        saved = self.saver.saved
        folder = self.directory.root if saved is None else self.directory.folder(saved)
        if self.comm.rank == 0 and folder not in self._lost and not folder.is_dir():
            self._lost.add(folder)
            print(f"{folder} is gone; the run goes on, and saves there again", file=sys.stderr, flush=True)

    def _settle(self) -> None:
        """Wait for the step that is being written, and count: every rank does at the same place. Raises CheckpointError where
        steps fail to be written again and again."""
        self.saver.finish()
        self._say_problem()
        with self.comm.excused("looking for what was saved"):
            self._say_lost()
        self.failed_saves = self.failed_saves + 1 if self.saver.problem else 0
        if self.saver.saved != self._settled:
            self._settled, self.rewinds = self.saver.saved, 0
        if self.failed_saves >= MOST_FAILED_SAVES:
            raise CheckpointError(f"{self.saver.problem}; that is {self.failed_saves} in a row, so the run ends")

    def _say_changes(self) -> None:
        """Print what changed since this run was last started. Raises CheckpointError."""
        if changes := recorded(self.directory.root, self.manifest, self.seed):
            print(f"since this run was last started: {changes}", flush=True)

    def _on_first_rank(self, action: Any) -> None:
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
