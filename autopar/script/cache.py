"""Programs kept on disk by fingerprint: each is whole or not there, and is never changed once it is there.

    ~/.cache/autopar/FINGERPRINT/     a program's directory, as `program.save` writes it, without the model's weights
    AUTOPAR_CACHE                     another place

What lies here is run. So the folder is the user's alone: its owner is who runs this, nobody else may read or write, or it is
refused; and a program is taken for one only if every file of it is what was written. One is written beside the others and takes
its name by one rename, so of several launches that do the same at once the first one's stays. When one is added, others that
nobody loaded for MOST_DAYS, and beyond MOST_BYTES those that were not loaded for longest, are deleted.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from autopar.codegen.owned_files import damaged_file
from autopar.errors import EmitError
from autopar.runtime.data.whole_files import sync

VARIABLE = "AUTOPAR_CACHE"
MOST_DAYS = 30.0
MOST_BYTES = 4 << 30
LEAST_S = 3600.0
"""Seconds since it was last loaded before a program is deleted, as one that starts may be reading it."""
ONCE = "once-"
"""The first letters of a program that nobody will find again, and that is deleted when the process that made it ends."""
ONCE_DAYS = 1.0
_UNFINISHED = "."


def cache_folder() -> Path:
    """The folder of kept programs, which is made where there is none. Raises EmitError where it is not the user's own."""
    given = os.environ.get(VARIABLE)
    folder = Path(given) if given else Path.home() / ".cache" / "autopar"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
    except OSError as error:
        raise EmitError(
            f"programs cannot be kept in {folder}: {error.strerror}; set {VARIABLE} to a folder of your own"
        ) from error
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise EmitError(
            f"{folder} holds programs that are run, and is not yours alone (owner {facts.st_uid}, mode "
            f"{stat.S_IMODE(facts.st_mode):o}); chmod 700 it if it is yours, or set {VARIABLE} to another folder"
        )
    return folder


def kept(key: str) -> Path | None:
    """The directory of the program with a fingerprint; None where there is none, or it is damaged. Raises EmitError."""
    directory = cache_folder() / key
    if not directory.is_dir() or damaged_file(directory):
        return None
    with suppress(OSError):
        os.utime(directory)
    return directory


def keep(key: str, write: Callable[[Path], object]) -> Path:
    """The directory of the program that `write` writes. What another launch kept meanwhile stays. Raises EmitError."""
    root = cache_folder()
    own, directory = root / f"{_UNFINISHED}{key}.{uuid.uuid4().hex}", root / key
    try:
        own.mkdir(mode=0o700)
        write(own)
        if directory.is_dir() and damaged_file(directory):
            _delete(directory)
        try:
            own.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
        sync(root)
    except OSError as error:
        raise EmitError(
            f"a program cannot be kept in {root}: {error.strerror or error}; set {VARIABLE} to a folder with room"
        ) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
    prune(root, directory)
    return directory


def prune(root: Path, added: Path, now_s: float | None = None) -> None:
    """Delete programs that are too old, or too many. added: the one that stays in any case."""
    now_s = time.time() if now_s is None else now_s
    rows = sorted(_ages(root, now_s))
    total = _bytes(added)
    for age_s, path in rows:
        total += _bytes(path) if path != added else 0
        most_days = ONCE_DAYS if path.name.startswith((ONCE, _UNFINISHED)) else MOST_DAYS
        if path != added and age_s > LEAST_S and (age_s > most_days * 86400 or total > MOST_BYTES):
            _delete(path)


def _ages(root: Path, now_s: float) -> Iterator[tuple[float, Path]]:
    for path in root.iterdir():
        with suppress(OSError):
            if path.is_dir():
                yield now_s - path.stat().st_mtime, path


def _bytes(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def _delete(directory: Path) -> None:
    """Delete a program, which nobody finds half of."""
    gone = directory.with_name(f"{_UNFINISHED}gone.{uuid.uuid4().hex}")
    with suppress(OSError):
        directory.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
