"""A run's directory has one owner: a second start is refused by name, and one whose owner is dead is taken over.

    RUN/owner/0000000003    host, process and job of an owner; its time of change is the owner's beat

Owners are numbered, and the highest number owns the directory. Who wants it makes the file of the next number, which the file
system grants once (O_EXCL), and only after the owner before has ended: it wrote so, or its process is gone (looked up on the same
host), or it is of the same job, which has ended its ranks and starts them again, or its beat stood still for STALE_S of this
process's own clock, since clocks of machines differ. So no start ever deletes what another one could take for its own. An owner
that finds a higher number was taken for dead, as where its machine slept; it ends, and completes no step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch.distributed as dist

from ..data.datafile import read_json
from ..data.fields import from_data
from ..data.schema import SchemaError, integer
from ..data.whole_files import replace_file, sync
from ..errors import CheckpointError, RuntimeProgramError

FOLDER = "owner"
BEAT_S = 2.0
STALE_S = 60.0
"""Seconds without a beat after which an owner on another machine is taken for dead."""
POLL_S = 0.1
_DIGITS = 10


@dataclass(frozen=True)
class Owner:
    """Who owns a directory. space: names of processes on this host mean the same in it; started: when the process was, in the
    kernel's count; job: of all starts of the same torchrun; token: no other owner's; ended: it is no longer in need of it."""

    host: str
    space: str
    pid: Annotated[int, integer(0, 1 << 31)]
    started: str
    job: str
    token: str
    ended: bool = False

    @classmethod
    def this_process(cls, job: str) -> Owner:
        """The owner that this process is."""
        return cls(socket.gethostname(), _space(), os.getpid(), _started(os.getpid()), job, uuid.uuid4().hex)

    @property
    def lives(self) -> bool | None:
        """Whether its process does, as far as this one can know."""
        if not self.space or (self.space, self.host) != (_space(), socket.gethostname()):
            return None
        return _started(self.pid) == self.started


def _space() -> str:
    """The namespace in which the numbers of processes are those that this process sees; empty where nothing says so."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """The time at which a process was started, in the kernel's count; empty where there is none, or one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class Ownership:
    """A directory that this process owns, until `release`. lost: called, once, with why it does not any more."""

    def __init__(self, root: Path, number: int, own: Owner, lost: Callable[[str], None]) -> None:
        self._root, self._number, self._own, self._lost = root, number, own, lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="autopar owner", daemon=True)
        self._thread.start()

    def problem(self) -> str:
        """Why the directory is no longer this process's; empty where it is. Raises OSError."""
        if not (self._root / FOLDER).is_dir():  # somebody deleted it, and did not take it over
            (self._root / FOLDER).mkdir(parents=True, exist_ok=True)
            _made(self._root, self._number, self._own)
        last = max(_numbers(self._root), default=0)
        if last == self._number:
            return ""
        other = _read(self._root, last) if last > self._number else None
        by = f" by process {other.pid} on {other.host}" if other else ""
        return (
            f"--run-dir {self._root}: this process ({self._own.pid} on {self._own.host}) gave no sign of life for a while, and "
            f"the directory was taken over{by}; nothing more is written"
        )

    def release(self) -> None:
        """Others may have it. Raises OSError."""
        self._over.set()
        self._thread.join()
        if not self.problem():
            said = json.dumps({**asdict(self._own), "ended": True})
            replace_file(_path(self._root, self._number), said.encode())

    def _beat(self) -> None:
        """Beat, in a thread of its own."""
        while not self._over.wait(BEAT_S):
            try:
                problem = self.problem()
                if not problem:
                    os.utime(_path(self._root, self._number))
            except OSError:  # a file system that does not answer now; others see no beat either
                continue
            if problem:
                self._lost(problem)
                return


def own(root: Path, job: str, lost: Callable[[str], None], stale_s: float = STALE_S) -> Ownership:
    """Become the owner of a run's directory. job: of this start; lost: called with why, should the directory be taken over. Waits
    for a sign of life of an owner that may be dead, so many seconds. Raises CheckpointError where the directory is another's, or
    cannot be written."""
    asking, folder = Owner.this_process(job), root / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            last = max(_numbers(root), default=0)
            try:
                ended = not last or _wait_for_end(root, last, asking, stale_s)
            except FileNotFoundError:  # two others came since
                continue
            if not ended:
                continue
            if _made(root, last + 1, asking) and max(_numbers(root)) == last + 1:
                break
        for number in _numbers(root):
            if number < last:
                _path(root, number).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"--run-dir {root}: {error.strerror or error}; give a directory that every rank can write to"
        ) from error
    return Ownership(root, last + 1, asking, lost)


def _made(root: Path, number: int, asking: Owner) -> bool:
    """Whether the file of this number is this process's: nobody else made it. Raises OSError."""
    try:
        handle = os.open(_path(root, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(asking)))
        file.flush()
        os.fsync(file.fileno())
    sync(root / FOLDER)
    return True


def _wait_for_end(root: Path, number: int, asking: Owner, stale_s: float) -> bool:
    """Wait until the owner of this number has ended; False where another one came. Raises CheckpointError where it lives."""
    path, since, said = _path(root, number), time.monotonic(), False
    first_beat = path.stat().st_mtime_ns
    while max(_numbers(root), default=0) == number:
        beats = path.stat().st_mtime_ns != first_beat
        other = _read(root, number)
        silent_s = time.monotonic() - since
        if other is not None and (other.ended or other.lives is False or other.job == asking.job):
            return True
        if other is not None and (other.lives or beats):
            raise CheckpointError(
                f"--run-dir {root} is in use by process {other.pid} on {other.host}: two runs would spoil it. End that one "
                "first, or give another directory"
            )
        if silent_s > stale_s:
            return True
        if silent_s > 2 * BEAT_S and not said:
            who = f"process {other.pid} on {other.host}" if other else "an unknown process"
            print(
                f"--run-dir {root} was in use by {who}, which gives no sign of life; it is taken over in "
                f"{stale_s - silent_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            said = True
        time.sleep(POLL_S)
    return False


def _read(root: Path, number: int) -> Owner | None:
    """The record that an owner wrote; None where it has not yet, or something else stands there. Raises OSError."""
    try:
        return from_data(Owner, read_json(_path(root, number), 1 << 16))
    except SchemaError:
        return None


def _path(root: Path, number: int) -> Path:
    return root / FOLDER / f"{number:0{_DIGITS}}"


def _numbers(root: Path) -> list[int]:
    """Numbers of the owners so far whose files were not deleted."""
    names = (path.name for path in (root / FOLDER).iterdir())
    return sorted(int(name) for name in names if len(name) == _DIGITS and name.isdigit())


def job_of(store: dist.Store) -> str:
    """A name that all starts of the ranks of a torchrun have, and no other: its store outlives its ranks."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.compare_set(f"autopar/job/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", "", uuid.uuid4().hex).decode()


def own_together(
    root: Path, store: dist.Store, owns: bool, lost: Callable[[str], None], timeout_s: float
) -> Ownership | None:
    """Become the owner on the rank that completes steps, while all others wait for that. store: of this round; owns: this is that
    rank. Raises CheckpointError, on every rank, where it cannot."""
    if not owns:
        store.wait(["owner"], timedelta(seconds=timeout_s + 2 * STALE_S))
        if problem := store.get("owner").decode():
            raise CheckpointError(problem)
        return None
    try:
        made = own(root, job_of(store), lost)
    except RuntimeProgramError as error:
        store.set("owner", str(error))
        raise
    store.set("owner", "")
    return made
