"""A command, run to its end or ended with all that it started.

torchrun gives each of its ranks a session of its own, so no signal to a group of processes reaches them once torchrun is gone. So
what is started here has a mark in its environment, which all have that it starts in turn; where the command ends, for whatever
reason, whoever still has the mark is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "AUTOPAR_STARTED"
ENDING_S = 10.0
"""Seconds that torchrun has to end its ranks, when it is asked to."""
KILLED_S = 5.0
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str] | None:
    """The output of a command, and its status; None where it took longer than timeout_s. None of its processes is left,
    also where an exception ends this."""
    own = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=os.environ | {MARK: own}, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process, f"{MARK}={own}".encode())
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), err.read())


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, a signal that asks this process to end raises SystemExit, as Ctrl-C raises KeyboardInterrupt."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], mark: bytes) -> None:
    """Ask the command to end what it started, and end what is left then."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
    finally:
        process.kill()
        process.wait()
        end = time.monotonic() + KILLED_S
        while (left := _marked(mark)) and time.monotonic() < end:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _marked(mark: bytes) -> list[int]:
    """Processes that have it; none where the system does not tell environments (there ranks see that torchrun is gone)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
