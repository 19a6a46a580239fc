"""Ending a run after the same step on all ranks, because one of them got a signal, or is to start again with others.

The rank that knows writes the step into the job's store, and every rank looks there before each step. Where the store is gone, as
with a torchrun that was killed, no rank can look: each then says in a message which step it was about to begin, goes on with it,
and hears of the others before the one after it. They all come to a next step: for that they need no step of a rank that it
has not gone on with.
"""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..comm.backends import HOST
from ..comm.process import TorchComm
from ..health.flight import say
from ..health.launcher import launcher
from .spares import LOST, STOPPED
from .train_loop import Listener, Loop

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
AHEAD = 2
"""Steps from a signal to the last one, where hosts wait for every loss: they are then at most one step apart. A host that waits
for losses later may have begun as many steps more."""
APART_S = 10.0
"""Seconds within which all torchruns notice that machines came or went."""


class Stop(Listener):
    """Agrees on the last step after a signal. why: it is the last; store_gone: there is no store any more."""

    def __init__(self, store: dist.Store, comm: TorchComm, timeout_s: float, late: int = 0) -> None:
        """All ranks make one, in the same order among their groups. timeout_s: of the agreement without a store; late: of the
        loop's `LossReader`, which no host runs further ahead than."""
        self._store, self._ahead = store, AHEAD + late
        self._flight = comm.flight
        self._group = dist.new_group(backend=HOST.transport.name, timeout=timedelta(seconds=timeout_s))
        self._proposed: tuple[torch.Tensor, Any] | None = None
        self._last: int | None = None
        self._signal = 0
        self._asked_lost = False
        self.asked = False
        self.why = ""
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as a shell has it in the background
        for number in SIGNALS[:-1] if ignored else SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self._signal, self.asked = number, True
        if number == signal.SIGINT:  # a second one, which torchrun passes on as SIGTERM, ends this process at once
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def store_gone(self) -> bool:
        return self._proposed is not None

    def others_go(self) -> bool:
        """Whether only other ranks were asked to end. Machines that come or go are noticed by each torchrun by itself, a little
        apart, and one whose workers ended well before would take the run for done: so this waits for a signal, for a while."""
        end = time.monotonic() + APART_S
        while not self.asked and time.monotonic() < end:
            time.sleep(0.05)
        return not self.asked

    def begin(self, loop: Loop) -> None:
        """End the loop where all ranks do. Raises RuntimeError as `last_step` does."""
        ending = self.last_step(loop.step + 1)
        if ending is not None:
            loop.last = min(loop.last, ending)

    def last_step(self, step: int) -> int | None:
        """The step after which all ranks end, if one of them is to. step: about to begin. Raises RuntimeError where ranks without
        a store do not hear of each other."""
        if self._proposed is None:
            try:
                with self._flight.asks("the job's store, which says whether the run is to end"):
                    self._ask_store(step)
            except RuntimeError:
                self._propose(step)
        elif self._last is None:
            proposed, work = self._proposed
            with self._flight.asks("the others, to end after the same step"):
                work.wait()
            self._last = int(proposed.item()) + 1
        return self._last

    def ask(self, step: int, why: str) -> None:
        """All ranks are to end soon. step: about to begin."""
        self._store.compare_set("stop", "", f"{step + self._ahead} {why}")

    def _ask_store(self, step: int) -> None:
        torchrun = launcher()
        if self._signal:
            self.ask(step, STOPPED)
            self._signal = 0
        elif torchrun is not None and torchrun.is_gone and not self._asked_lost:
            self.ask(step, LOST)
            self._asked_lost = True
        if self._store.check(["stop"]):
            last, self.why = self._store.get("stop").decode().split()
            if self._last is None and self._flight.rank == 0:
                say(f"all ranks save after step {last} and end")
            self._last = int(last)

    def _propose(self, step: int) -> None:
        """Begin to tell all which step this rank is about to begin, or the one before the last, as there is no store any more."""
        torchrun = launcher()
        if torchrun is not None and torchrun.is_going():
            torchrun.say_gone()
        else:
            say(f"rank {self._flight.rank}: the job's store is gone; all ranks save after the same step and end")
        self.why = self.why or LOST
        proposed = torch.tensor([step if self._last is None else self._last - 1])
        self._proposed = proposed, dist.all_reduce(proposed, dist.ReduceOp.MAX, self._group, async_op=True)
