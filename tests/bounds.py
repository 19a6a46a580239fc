"""Reading a file within bounds: processor time and memory of a process, forked from this one for as many files as stay within
bounds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

MOST_MB, MOST_S = 200, 5.0
WAITS_S = 120
"""Seconds after which an attempt that waits is ended: far more than a busy machine takes for one that does not."""
LEFT_MB = 50.0
"""Bytes that files before may leave in a process before the next one gets a process of its own."""


@dataclass(frozen=True)
class Reading:
    """said: `accepted`, or the error's type and message; megabytes: that the process grew by at its peak; seconds: of its
    processor, which other processes do not change."""

    said: str
    named: bool
    megabytes: float
    seconds: float

    @property
    def within(self) -> bool:
        return self.megabytes <= MOST_MB and self.seconds <= MOST_S


def readings(attempts: Mapping[str, Callable[[], Any]], named: tuple[type[BaseException], ...]) -> dict[str, Reading]:
    """Outcomes of attempts, by their names. named: the errors that they may raise. Dead, a process was ended by a signal:
    that of a clock, where an attempt took longer than it may."""
    names, found = list(attempts), []
    while len(found) < len(names):
        found += _in_a_fork([attempts[name] for name in names[len(found) :]], named)
    return dict(zip(names, found, strict=True))


def _in_a_fork(attempts: list[Callable[[], Any]], named: tuple[type[BaseException], ...]) -> list[Reading]:
    """Outcomes of the first attempts, at least one."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        with contextlib.suppress(BrokenPipeError), os.fdopen(sink, "wb") as pipe:
            _attempt(attempts, named, pipe)
        os._exit(0)
    os.close(sink)
    rows: list[Reading] = []
    with os.fdopen(source, "rb") as pipe, contextlib.suppress(EOFError):
        while True:
            rows.append(pickle.load(pipe))
    _, status = os.waitpid(child, 0)
    return rows if status == 0 else [*rows, Reading(f"ended with status {status}", False, float("inf"), float("inf"))]


def _attempt(attempts: list[Callable[[], Any]], named: tuple[type[BaseException], ...], pipe: BufferedWriter) -> None:
    """One after the other. All grow from where the first began: what one leaves counts for those after it."""
    begun = _megabytes("VmRSS")
    for attempt in attempts:
        signal.setitimer(signal.ITIMER_PROF, MOST_S + 1)
        signal.alarm(WAITS_S)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
        start, right, said = time.process_time(), True, "accepted"
        try:
            attempt()
        except BaseException as error:
            right, said = isinstance(error, named), f"{type(error).__name__}: {str(error)[:500]}"
        seconds = time.process_time() - start
        pickle.dump(Reading(said, right, _megabytes("VmHWM") - begun, seconds), pipe)
        pipe.flush()
        ctypes.CDLL(None).malloc_trim(0)
        if _megabytes("VmRSS") - begun > LEFT_MB:
            return


def _megabytes(kind: str) -> float:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
