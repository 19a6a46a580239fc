"""The files of an output directory that autopar wrote: what may be replaced there, and what belongs to somebody else.

program.json lists every file with a hash of its content. A file that is not on the list, or whose content has changed
since, is the user's: it is neither overwritten nor deleted. Of a folder of weights the hash of `.metadata`, which has
an id of its own in every checkpoint, stands for all of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import EmitError, PlanError
from autopar.plan import Plan
from autopar.runtime.data.datafile import path_inside, read_bytes, read_json
from autopar.runtime.data.schema import SchemaError, table, text
from autopar.runtime.data.whole_files import current, finish

FACTS, WEIGHTS = "program.json", "weights"
_METADATA = f"{WEIGHTS}/.metadata"
_FILES = table(path_inside, text())


def digest(content: bytes) -> str:
    """The hash of a file's content that the list of files holds."""
    return hashlib.sha256(content).hexdigest()


def facts_text(facts: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """program.json with the list of files, itself included."""
    finite = _finite(facts)
    own = {**files, FACTS: _facts_digest(finite)}
    return json.dumps({**finite, "files": dict(sorted(own.items()))}, indent=1, allow_nan=False) + "\n"


def _finite(data: Any) -> Any:
    """JSON has no infinities and no NaN: nothing stands in their place."""
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _facts_digest(facts: Mapping[str, Any]) -> str:
    return digest(json.dumps({k: v for k, v in facts.items() if k != "files"}, sort_keys=True).encode())


def written_before(directory: Path) -> dict[str, str]:
    """The list of files that the directory's program.json holds; empty where there is none of autopar."""
    try:
        facts = read_json(directory / FACTS)
        files = _FILES(facts.get("files") if isinstance(facts, dict) else None, "files")
    except (OSError, SchemaError):
        return {}
    return files if isinstance(facts, dict) and files.get(FACTS) == _facts_digest(facts) else {}


def damaged_file(directory: Path) -> str:
    """The name of a file of a program that is not what autopar wrote, or is not there; empty where all are, a folder of weights
    aside, which has a record of its own."""
    before = written_before(directory)
    for name, said in before.items():
        try:
            if said and name != FACTS and digest(read_bytes(directory / name)) != said:
                return name
        except (OSError, SchemaError):
            return name
    return "" if before else FACTS


def to_replace(directory: Path, names: Iterable[str], plan: Plan) -> list[str]:
    """Names that autopar wrote into the directory before, which go when these files and a folder of weights come.

    Raises EmitError where one of them is there already and not autopar's, and where a folder leads out of the directory. plan:
    what is about to be written; a plan.json that was edited to it may be replaced.
    """
    before = written_before(directory)
    weights = directory / WEIGHTS
    if weights.is_dir():
        names = [*names, *(f"{WEIGHTS}/{path.name}" for path in weights.iterdir())]
    return _own(directory, names, [before], plan)


def settle(directory: Path, plan: Plan) -> None:
    """Put the files of a save in place that was interrupted while it did so. Raises EmitError where somebody else has changed one
    of them since, OSError, SchemaError."""
    pending = current(directory)
    if pending == directory:
        return
    for facts in pending.rglob(FACTS):
        folder = directory / facts.parent.relative_to(pending)
        coming = written_before(facts.parent)
        _own(folder, coming, [written_before(folder), coming], plan)
    finish(directory)


def _own(directory: Path, names: Iterable[str], lists: Sequence[Mapping[str, str]], plan: Plan) -> list[str]:
    """Names of some files, and of the files on the first list, that are there. lists: of what may be there. Raises EmitError
    where another file is in the way."""
    present = [name for name in dict.fromkeys((*lists[0], *names)) if _there(directory / name)]
    foreign = [name for name in present if not any(_ours(directory, name, before, plan) for before in lists)]
    folders = {parent for name in (*names, _METADATA) for parent in Path(name).parents if parent.name}
    foreign += [str(folder) for folder in sorted(folders) if _no_folder(directory / folder)]
    if foreign:
        shown = ", ".join(sorted(set(foreign))[:5]) + (", …" if len(set(foreign)) > 5 else "")
        raise EmitError(
            f"{directory} holds files that autopar did not write, or that were changed since: {shown}; move them away, or "
            "save to another directory"
        )
    return present


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _no_folder(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_dir())


def _ours(directory: Path, name: str, before: Mapping[str, str], plan: Plan) -> bool:
    """Whether a file is as autopar wrote it."""
    path = directory / name
    if name not in before or not path.is_file() or path.is_symlink():
        return False
    if name == FACTS:
        return True  # the list was taken from it
    if name.startswith(f"{WEIGHTS}/"):
        path, name = directory / _METADATA, _METADATA
    try:
        if digest(read_bytes(path)) == before.get(name):
            return True
        return name == "plan.json" and Plan.load(path) == plan
    except (OSError, SchemaError, PlanError):
        return False
