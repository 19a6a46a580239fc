"""The time that a process saw pass itself, and for how long of it it has been waiting for one thing.

A process that was stopped, swapped out or suspended with its machine finds every clock far ahead when it goes on, and others may
set clocks meanwhile. So a thread sleeps for a moment again and again, and adds up what its sleeps took. A sleep that took much
longer than it should says that the process *stood still*: it counts as the sleep that was meant. What a rank waits for is told
apart by its identity, so that of two waits that follow each other neither has the other's seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

TICK_S = 0.1
STOOD_S = 1.0
"""A sleep that takes so much longer than it should: the process stood still. A busy machine delays one by less."""
GRACE_S = 2.0
"""From a limit until it ends a run: a stall that was a little shorter takes a moment to be over for all, longest on a busy
machine."""
KEPT_STANDSTILLS = 32


def clock_s() -> float:
    """Seconds that nobody can set; where the system tells them, those count too for which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SeenTime:
    """Told by one thread, which calls `tick`; others read. seconds: seen so far; awaited: what is waited for, and the seconds of
    it that were seen; standstills: when they ended (as seen) and what they took, the last ones."""

    def __init__(self, clock: Callable[[], float] = clock_s) -> None:
        self.seconds = 0.0
        self.awaited: tuple[object | None, float] = (None, 0.0)
        self.standstills: deque[tuple[float, float]] = deque(maxlen=KEPT_STANDSTILLS)
        self._clock = clock
        self._last = clock()

    def tick(self, meant_s: float, awaited: object | None = None) -> None:
        """A sleep of meant_s is over. awaited: what the process waits for now."""
        now = self._clock()
        took_s, self._last = now - self._last, now
        if took_s > meant_s + STOOD_S:
            self.standstills.append((self.seconds + meant_s, took_s - meant_s))
            took_s = meant_s
        self.seconds += took_s
        before, awaited_s = self.awaited
        self.awaited = awaited, awaited_s + took_s if awaited is not None and awaited is before else 0.0

    def stood_since(self, seconds: float) -> bool:
        """Whether the process stood still after it had seen so many seconds."""
        return any(ended_s > seconds for ended_s, _ in list(self.standstills))

    def stood(self) -> tuple[tuple[float, float], ...]:
        """The last standstills: for how many seconds each has been over, and what it took."""
        return tuple((self.seconds - ended_s, took_s) for ended_s, took_s in list(self.standstills))
