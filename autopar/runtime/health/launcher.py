"""torchrun, as a rank sees it that it started: where it is gone the rank says so and ends.

torchrun ends its ranks when it is asked to go. Where it is killed it cannot, and its ranks would train on, with nobody who starts
them again or takes their machines back. A thread looks once a second whether it is still there. In a run that is saved
(train_loop.py) all ranks then save after the same step (stop.py) and end, else they end at once. A rank that was started by
hand, by mpirun or by srun may outlive that.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path

from .flight import say

POLL_S = 1.0
TOGETHER_S = 1.5
"""Seconds within which all ranks of a machine see that torchrun is gone, so that none takes the end of another for what
is wrong."""
ENDING_S = 1.0
"""Seconds that a killed process takes to end, from its first connection to its last thread."""
STARTED = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")
"""Variables that torchrun gives a rank, and that all have which stand between the two."""


class Launcher:
    """pid: of torchrun. saves_s: seconds that this rank may take to save once torchrun is gone (0: it ends without). is_gone: as
    the thread last saw it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.saves_s = 0.0
        self.is_gone = False
        self._parent = os.getppid()
        self._born = _born(pid)
        self._said = threading.Lock()

    @property
    def gone(self) -> bool:
        """Whether it ended, or what it started this process by did."""
        return os.getppid() != self._parent or (self.pid != self._parent and _born(self.pid) != self._born)

    def is_going(self) -> bool:
        """Whether it is gone, asked where something of it broke: its connections end a moment before itself does."""
        end = time.monotonic() + ENDING_S
        while not self.gone and time.monotonic() < end:
            time.sleep(ENDING_S / 50)
        return self.gone

    def say_gone(self) -> None:
        """Say once, on stderr, that torchrun is gone."""
        if self._said.acquire(blocking=False):
            then = "all ranks save after the same step and end" if self.saves_s else "it ends, and nothing is saved"
            say(f"error on rank {os.environ['RANK']}: torchrun (process {self.pid}), which started it, is gone; {then}")

    def watch(self) -> None:
        """End this process when it is gone."""
        threading.Thread(target=self._watch, name="autopar launcher", daemon=True).start()

    def _watch(self) -> None:
        while not self.gone:
            time.sleep(POLL_S)
        self.is_gone = True
        self.say_gone()
        if self.saves_s:
            time.sleep(self.saves_s)
            say(f"error on rank {os.environ['RANK']}: it did not come to the end of its step in {self.saves_s:g} s")
        else:
            time.sleep(TOGETHER_S)
        os._exit(1)


@functools.cache
def launcher() -> Launcher | None:
    """torchrun, where it started this process. First asked as a process starts, as it may be gone later."""
    if not all(name in os.environ for name in STARTED):
        return None
    own = {f"{name}={os.environ[name]}".encode() for name in STARTED}
    pid = os.getppid()
    while pid > 1 and own <= _environment(pid):
        pid = _parent(pid)
    return Launcher(pid)


def _environment(pid: int) -> set[bytes]:
    """The environment that a process was started with; nothing where it cannot be read."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _fields(pid: int) -> list[str]:
    """The fields of a process in /proc, from its state on; nothing where there is none, or it says nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    return int((_fields(pid) or ["", "0"])[1])


def _born(pid: int) -> str:
    """The time at which a process started, which tells it from a later one of the same number; empty where it ended."""
    fields = _fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""
