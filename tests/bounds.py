"""The bounds of reading a file: time and memory of a process of its own, which is forked from this one."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_MB, MOST_S = 200, 5.0


@dataclass(frozen=True)
class Reading:
    """said: `accepted`, or the error's type and message; megabytes: that the process grew by at its peak."""

    said: str
    named: bool
    megabytes: float
    seconds: float


def reading(attempt: Callable[[], Any], named: tuple[type[BaseException], ...]) -> Reading:
    """The outcome of an attempt, with its time and memory. named: the errors that it may raise. Dead, it was ended by a
    signal: by that of the clock, where it took longer than it may."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        signal.alarm(int(MOST_S) + 1)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        right, said = True, "accepted"
        try:
            attempt()
        except BaseException as error:
            right, said = isinstance(error, named), f"{type(error).__name__}: {str(error)[:500]}"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        row = Reading(said, right, grown, time.perf_counter() - start)
        with contextlib.suppress(BrokenPipeError):
            os.write(sink, pickle.dumps(row))
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if not data:
        return Reading(f"ended with status {status}", False, float("inf"), float("inf"))
    row = pickle.loads(data)
    assert isinstance(row, Reading)
    return row
