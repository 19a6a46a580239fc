"""Files of a directory that are replaced as one: whoever reads finds all of the old ones, or all of the new ones.

    DIR/.partial/    files being written; a save that was killed leaves them, the next one deletes them
    DIR/.next/       the same once every one of them is durable: one rename, and with it they are what DIR holds
    DIR/             where they are put, one after another; then .next goes

`current` says where to read, DIR or DIR/.next, so at no moment is there nothing to read, nor a mixture; other files in DIR
stay as they are. `.placing.json` in .next says which files come and which go, and whoever saves next finishes what was
interrupted. Files are put in place as links to those in .next (as copies, where a file system has no links).

`complete.json` beside files is their record: bytes and SHA-256 of each, and of itself. `problem_of` holds files against it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from .datafile import parse_json, path_inside, read_json, read_text
from .schema import MOST_SIZE, Schema, SchemaError, integer, listed, record, table, text

COMPLETE = "complete.json"
_PARTIAL, _NEXT, _PLACING = ".partial", ".next", ".placing.json"
_PIECE = 1 << 22
_SYNCS = 16
"""Files that are made durable at once: a disk takes hardly longer for several than for one."""
_PLACES = record({"gone": listed(path_inside), "files": listed(path_inside)})
FILES = table(path_inside, record({"bytes": integer(0, MOST_SIZE), "sha256": text(64)}))
"""A schema: bytes and SHA-256 of files, by name."""


# --- a record of files -------------------------------------------------------------------------------------------------


def file_facts(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of a file. Raises OSError."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            nbytes += len(piece)
    return {"bytes": nbytes, "sha256": digest.hexdigest()}


def write_record(folder: Path, data: Mapping[str, Any]) -> None:
    """Write the record of a folder whose files are durable, and make their names durable. data: what it says, with `files`.
    Raises OSError."""
    write_durable(folder / COMPLETE, json.dumps({**data, "sha256": own_hash(data)}).encode())
    sync(folder)


def read_record(folder: Path, schema: Schema[Any] | None = None) -> Any:
    """The record of a folder; without a schema its files alone. Raises OSError, and SchemaError where it is damaged."""
    content = read_text(folder / COMPLETE)
    data = parse_json(content)
    if json.dumps(data) != content:
        raise SchemaError("it is not written as records are")
    if not isinstance(data, dict) or data.pop("sha256", None) != own_hash(data):
        raise SchemaError("its own hash is another")
    return (schema or record({"files": FILES}, others=True))(data, "")


def problem_of(folder: Path, files: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> str:
    """A text of what is wrong with some of the files that a record names; empty where nothing is."""
    for name in names:
        try:
            same = file_facts(folder / name) == dict(files[name])
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
        if not same:
            return f"{folder / name} is not what was written"
    return ""


def share_of(files: Mapping[str, Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
    """The files that one of some ranks checks, so that each has about as many bytes: the largest first, to whoever has least."""
    loads, own = [(0, one) for one in range(ranks)], []
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        nbytes, least = loads[0]
        heapq.heapreplace(loads, (nbytes + files[name]["bytes"] + 1, least))
        if least == rank:
            own.append(name)
    return own


def own_hash(data: Mapping[str, Any]) -> str:
    """SHA-256 of a record without its own."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# --- files that are durable --------------------------------------------------------------------------------------------


def write_durable(path: Path, content: bytes) -> None:
    """Write a file and wait until it would survive a loss of power; its name is not, before `sync`. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Give one file another content: a reader finds the old or the new one, whole. A link stays one, and what is no file, such as
    a terminal, is written to. Raises OSError."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write_durable(beside, content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- files that are replaced as one ------------------------------------------------------------------------------------


def current(directory: Path) -> Path:
    """Where what a directory holds is to be read."""
    pending = directory / _NEXT
    return pending if pending.is_dir() else directory


def partial(directory: Path) -> Path:
    """Where files are written between `begin` and `commit`."""
    return directory / _PARTIAL


def begin(directory: Path) -> Path:
    """An empty folder to write files into, `partial`, so that `commit` makes them those of the directory, which is made where
    there is none. A save that was interrupted is finished, or forgotten where it was not yet whole. Raises OSError, SchemaError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    finish(directory)
    give_up(directory)
    partial(directory).mkdir()
    return partial(directory)


def give_up(directory: Path) -> None:
    """Forget what was written since `begin`. Raises OSError."""
    with suppress(FileNotFoundError):
        shutil.rmtree(partial(directory))


def commit(directory: Path, last: Sequence[str] = (), gone: Iterable[str] = ()) -> None:
    """Make the files that were written since `begin` durable, and then those of the directory. gone: files of it that are
    deleted first, also such as come again; last: those that are put in place after all others, in this order. Raises OSError."""
    written = partial(directory)
    names = sorted(path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file())
    files = [*(name for name in names if name not in last), *(name for name in last if name in names)]
    write_durable(written / _PLACING, json.dumps({"gone": list(gone), "files": files}).encode())
    with ThreadPoolExecutor(_SYNCS) as pool:
        list(pool.map(sync, written.rglob("*")))
    sync(written)
    written.rename(directory / _NEXT)
    sync(directory)
    finish(directory)


def finish(directory: Path) -> None:
    """Put files in place that a save left in `.next`, if it did. Raises OSError, SchemaError."""
    pending = directory / _NEXT
    if not pending.is_dir():
        return
    places = _PLACES(read_json(pending / _PLACING), str(pending / _PLACING))
    for name in places["gone"]:
        (directory / name).unlink(missing_ok=True)
        _forget_bytecode(directory / name)
    folders = {directory}
    for name in places["files"]:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        folders |= {directory / parent for parent in Path(name).parents}
        _place(pending / name, path)
    with ThreadPoolExecutor(_SYNCS) as pool:
        list(pool.map(sync, folders))
    give_up(directory)
    pending.rename(partial(directory))
    sync(directory)
    give_up(directory)


def _forget_bytecode(path: Path) -> None:
    """Delete what Python keeps of a source file: it may look newer than the next file of this name."""
    if path.suffix == ".py":
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _place(source: Path, path: Path) -> None:
    if path.exists() and path.samefile(source):
        return
    beside = path.with_name(f".{path.name}.partial")
    beside.unlink(missing_ok=True)
    try:
        beside.hardlink_to(source)
    except OSError:  # a file system without links
        shutil.copy(source, beside)
        sync(beside)
    beside.replace(path)
    _forget_bytecode(path)
