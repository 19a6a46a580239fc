"""When a search ends before its time, and what it says meanwhile.

A search ends when its seconds are over or on Ctrl-C, but not before it has found a plan (Ctrl-C without one is an error as
ever). Seconds are looked at wherever prices are asked for (`Pricers.until`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from autopar.ir.text import time_text


class Clock:
    """seconds: of a search (None: no bound). now: seconds of some clock. has_plan: whether there is a plan already."""

    def __init__(self, seconds: float | None, now: Callable[[], float]) -> None:
        self.now, self.started = now, now()
        self.ends = math.inf if seconds is None else self.started + seconds
        self.has_plan = False

    def is_over(self) -> bool:
        """Whether the search is to end with what it has."""
        return self.has_plan and self.now() > self.ends

    def stop(self) -> None:
        """The search has ended: whoever asks later has time."""
        self.ends = math.inf
        self._show("")

    def say(self, kind: str, best_s: float) -> None:
        """Tell a terminal which kind of plans is looked at. best_s: seconds of a step of the best plan so far."""
        best = f", best so far {time_text(best_s)} a step" if best_s < math.inf else ""
        self._show(f"autopar: {kind}, {self.now() - self.started:.0f} s{best}")

    @staticmethod
    def _show(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
