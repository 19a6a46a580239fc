"""Ending a run after the same step on all ranks, because one of them got a signal, or is to start again with others.

The rank that knows writes the step into the job's store, and every rank looks there before each step.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import torch.distributed as dist

from .spares import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
AHEAD = 2
"""Steps from a signal to the last one: ranks are at most one step apart, as all of them are told every loss."""
APART_S = 10.0
"""Seconds within which all torchruns notice that machines came or went."""


class Stop:
    """Agrees on the last step after a signal, through the job's store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._signal = 0
        self.asked = False
        self.why = ""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self._signal, self.asked = number, True

    def others_go(self) -> bool:
        """Whether only other ranks were asked to end. Machines that come or go are noticed by each torchrun by itself, a little
        apart, and one whose workers ended well before would take the run for done: so this waits for a signal, for a while."""
        end = time.monotonic() + APART_S
        while not self.asked and time.monotonic() < end:
            time.sleep(0.05)
        return not self.asked

    def last_step(self, step: int) -> int | None:
        """The step after which all ranks end, if one of them is to. step: about to begin."""
        if self._signal:
            self.ask(step, STOPPED)
            self._signal = 0
        if not self._store.check(["stop"]):
            return None
        last, self.why = self._store.get("stop").decode().split()
        return int(last)

    def ask(self, step: int, why: str) -> None:
        """All ranks are to end soon. step: about to begin."""
        self._store.compare_set("stop", "", f"{step + AHEAD} {why}")
