"""The training loop, one for runs with a directory and for those without.

    while step < last:  begin → a batch → before_step → the step → its loss is read → on_loss → save, where it is time to
                        → after_step

What a run does beside its steps is done by *listeners*, each with one concern (metrics, saving, stopping, …), which are called in
the order in which the run lists them. What the device computed is read in one place, `LossReader`: where kernels queue behind the
host, one step late, so that there is always a step for the device to do.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TextIO

from ..comm.backends import Arriving, backend_of
from ..comm.comm import Comm
from ..errors import RuntimeProgramError
from ..program.batches import DataFunction, random_batches
from ..program.extras import named_leaves
from ..step.entries import FIRST
from ..step.ready import Ready, made_ready
from ..step.session import Session
from .loaded import LoadedProgram
from .read_ahead import InTurn, ReadAhead


@dataclass(frozen=True)
class Done:
    """A step that is done. not_finite: its update was left out, as its loss or a gradient is no number; skips: updates in a row
    that were left out; loss, norm (of gradients): None where there is none, or this rank does not read it; extras: numbers that
    the step gives beside the loss, by name."""

    step: int
    batch: Any
    start_s: float
    not_finite: bool
    skips: int
    loss: float | None = None
    norm: float | None = None
    seconds: float = 0.0
    extras: Mapping[str, float] = field(default_factory=dict)


class LossReader:
    """The one place of the loop where the host waits for what the device computed: a step's loss, its gradients' norm, and before
    these what guards and looks at parameters found. Every rank waits for the loss, so that no host runs further ahead of another
    one; its copy to the host begins with its own step. Numbers that a step gives beside its loss are read with it."""

    def __init__(self, session: Session, reads: bool, late: int) -> None:
        """reads: whether this rank does; late: later steps that are done before a loss is read."""
        self._session, self._reads, self._late = session, reads, late
        session.guards.late = session.updater.late = late
        self._unread: deque[tuple[Done, Arriving | None, Arriving | None, Mapping[str, Arriving]]] = deque()
        self._read_at = 0.0

    def read(self, step: int, batch: Any, loss: Any, start_s: float, *, at_once: bool) -> Iterator[Done]:
        """Take a step's loss; the steps whose losses are read now. at_once: that of this one, too."""
        session, updater = self._session, self._session.updater
        done = Done(step, batch, start_s, updater.not_finite, updater.skips.in_a_row)
        values = loss if session.training else None, session.grad_norm
        told, norm = (None if value is None else Arriving([value]) for value in values)
        extras = named_leaves(session.extras) if self._reads else ()
        numbers = {name: Arriving([one]) for name, one in extras if one.numel() == 1 and not one.is_complex()}
        self._unread.append((done, told, norm, numbers))
        if at_once:
            session.guards.settle()
            updater.settle_look(step)
        while len(self._unread) > (0 if at_once else self._late):
            yield self._read(*self._unread.popleft())

    def forget(self) -> None:
        """Losses that were not read belong to steps that were taken back."""
        self._unread.clear()
        self._session.guards.forget()
        self._session.updater.forget_look()

    def _read(
        self, done: Done, told: Arriving | None, measured: Arriving | None, numbers: Mapping[str, Arriving]
    ) -> Done:
        arrived = [None if value is None else value.wait()[0] for value in (told, measured)]
        loss, norm = (value.item() if self._reads and value is not None else None for value in arrived)
        now = time.perf_counter()
        seconds, self._read_at = now - max(done.start_s, self._read_at), now
        extras = {name: float(value.wait()[0].item()) for name, value in numbers.items()}
        return replace(done, loss=loss, norm=norm, seconds=seconds, extras=extras)


class Listener:
    """One concern of a run, called at the moments of a step that it has a method for."""

    def begin(self, loop: Loop) -> None:
        """Step `loop.step + 1` is about to begin, unless a listener lowers `loop.last`."""

    def before_step(self, loop: Loop, batch: Any) -> None:
        """The batch of step `loop.step + 1` was taken."""

    def after_step(self, loop: Loop) -> None:
        """Step `loop.step` is done, its parameters are updated, and nothing was taken back; its loss may not have been read."""

    def on_loss(self, loop: Loop, done: Done) -> bool:
        """The loss of a step was read. True: the step is none to report, and later listeners do not hear of it."""
        return False

    def save(self, loop: Loop) -> None:
        """Step `loop.step` is done, its loss was heard of, and it is one that is saved."""

    def at_end(self, loop: Loop) -> None:
        """The last step is done."""


class Loop:
    """The loop of one rank. step: done so far; position: global batches taken so far; steps: asked for; last: the step that it
    ends after, which may be an earlier one; late: steps that are done before a loss is read; save_s: seconds for which saving
    kept training."""

    def __init__(
        self,
        program: LoadedProgram,
        arguments: argparse.Namespace,
        seed: int,
        save_every: int,
        *,
        reads: bool,
        late: int | None = None,
    ) -> None:
        """seed: of random batches; save_every: steps (0: the last one alone is saved); reads, late: of `LossReader` (default: as
        the kind of device has it)."""
        self.program = program
        self.steps = self.last = arguments.steps
        late = self.late = backend_of(program.session.comm.device).ahead if late is None else late
        self.save_s = 0.0
        self._save_every = save_every
        self._losses = LossReader(program.session, reads, late)
        self._batches_from: Callable[[int], Iterator[Any]] = partial(random_batches, program.manifest.inputs, seed)
        if arguments.data:
            data = DataFunction(arguments.data)
            program.own_rows = "shard" in data.takes
            self._batches_from = partial(data.batches, shard=program.shard if program.own_rows else None)
        self.batches: ReadAhead | InTurn | None = None

    def go_to(self, step: int, position: int) -> None:
        """Go on after a step, from a position in the data."""
        self.step, self.position = step, position
        self._losses.forget()
        if self.batches is not None:
            self.batches.close()
        batches, comm = partial(self._batches_from, position), self.program.session.comm
        ahead = backend_of(comm.device).ahead or self.program.own_rows
        self.batches = ReadAhead(batches, self._prepared, comm) if ahead else InTurn(batches)

    def run(self, listeners: Sequence[Listener]) -> None:
        """Steps until the last."""
        comm = self.program.session.comm
        tell(comm, f"{self.program.manifest.show()}, {comm.device.type}, steps {self.step + 1} to {self.last}")
        while self.step < self.last:
            for one in listeners:
                one.begin(self)
            if self.step < self.last:
                self._do_step(listeners)
        for one in listeners:
            one.at_end(self)

    def _prepared(self, batch: Any) -> Ready | None:
        """A batch made ready for its step; nothing of one that the program refuses."""
        session = self.program.session
        with suppress(RuntimeProgramError):
            taking = session.taking(self.program.own_rows)
            return made_ready(self.program.leaves(batch), taking, session.entry(FIRST).forms)
        return None

    def _do_step(self, listeners: Sequence[Listener]) -> None:
        start_s = time.perf_counter()
        assert self.batches is not None
        batch, ready = self.batches.take(more=self.step + 1 < self.last)
        if self.program.session.recorder is not None:
            self.program.session.recorder.input_s = time.perf_counter() - start_s
        for one in listeners:
            one.before_step(self, batch)
        self.program.session.next_inputs.ready = ready
        result = self.program(batch)
        loss = result if self.program.session.extras is None else result[0]
        step = self.step = self.step + 1
        self.position += 1
        saved = step == self.last or (self._save_every > 0 and step % self._save_every == 0)
        for done in self._losses.read(step, batch, loss, start_s, at_once=saved):
            for one in listeners:
                if one.on_loss(self, done):
                    break
        if saved and self.step == step:  # and no listener went back
            began = time.perf_counter()
            for one in listeners:
                one.save(self)
            self.save_s += time.perf_counter() - began
        if self.step == step:
            for one in listeners:
                one.after_step(self)


def tell(comm: Comm, line: str, stream: TextIO | None = None) -> None:
    """Rank 0 prints a line, to standard output or this stream. A log may be on a disk that takes long."""
    if comm.rank == 0:
        with comm.excused("writing a line of its log"):
            print(line, file=stream, flush=True)
