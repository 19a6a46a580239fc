"""The files of a program: compared between ranks before any of them computes, and recorded in a run's folder.

Ranks that run other lines compute something else, and mostly nothing says so: a stage file that was edited on one machine, an
older runtime on another, another torch. So every rank takes the versions of torch and Python and the
hash of each file that it runs, and ranks compare these through the job's store
before the first of them is imported. A run's directory keeps them with plan and precision: a later start says what is no longer
the same.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm.environment import machine_name
from ..data.datafile import read_json
from ..data.schema import SchemaError, record, table, text
from ..data.whole_files import replace_file
from ..errors import CheckpointError, RankError
from ..program.manifest import Manifest
from ..step.same_data import odd_ranks
from .meeting import told

RECORD = "program.json"
SEED = "--seed"
TORCH, PYTHON = "version of torch", "version of Python"
OF_A_PROGRAM = (
    "manifest.json",
    "plan.json",
    "run.py",
    "user_ops.py",
    "user_factories.py",
    "pipeline.py",
    "stages/*.py",
    "ranks/*.py",
    "buckets/*/*.py",
    "buckets/*/plan.json",
    "buckets/*/stages/*.py",
    "entries/**/*.py",
    "entries/**/plan.json",
)
MOST_SHOWN = 8
_RECORD = record({"plan": text(), "precision": text(), "files": table(text(), text(64))})


def hashes(manifest: Manifest, seed: int) -> dict[str, str]:
    """SHA-256 of every file that a rank runs, by name: of the program, of the runtime, and of modules of the user's that make its
    optimizer; the seed and the versions of torch and Python are told as some of them. Raises OSError."""
    own = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(_paths(manifest))}
    versions = {TORCH: torch.__version__.partition("+")[0], PYTHON: ".".join(platform.python_version_tuple()[:2])}
    return {**versions, **own, SEED: str(seed)}


def _paths(manifest: Manifest) -> Iterator[tuple[str, Path]]:
    home, runtime = manifest.home or manifest.directory, Path(__file__).parents[1]
    for folder in dict.fromkeys((home, manifest.directory)):
        for pattern in (*OF_A_PROGRAM, manifest.pipeline):
            yield from ((path.relative_to(home).as_posix(), path) for path in folder.glob(pattern))
    yield from ((f"autopar_runtime/{path.relative_to(runtime).as_posix()}", path) for path in runtime.rglob("*.py"))
    for module in (factory.module for factory in manifest.factories):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and module.partition(".")[0] != "torch":
            yield f"module {module}", Path(file)


@dataclass(frozen=True)
class Compared:
    """The words for what ranks compare. question: that they answer; problem: where answers are not alike; remedy: what to do."""

    what: str
    question: str
    problem: str
    remedy: str


FILES = Compared(
    "files",
    "which files they run",
    "ranks do not run the same program",
    "Copy the directory of the program to every machine whole, with one version of torch and Python, and start all ranks alike",
)


def compare(
    store: dist.Store, rank: int, ranks: int, own: Mapping[str, str], timeout_s: float, words: Compared = FILES
) -> None:
    """See that all ranks have the same hashes by name, as those of the files they run. store: of this start. Raises RankError,
    which names ranks and what is not alike, on every rank; CollectiveTimeout where not all ranks come."""
    whole = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    what = f"{words.what}/whole"
    everyone = told(store, what, rank, ranks, {"hash": whole, "machine": machine_name()}, timeout_s, words.question)
    odd = odd_ranks([one["hash"] for one in everyone])
    if not odd:
        return
    files: list[dict[str, str]] = told(store, f"{words.what}/each", rank, ranks, dict(own), timeout_s, words.question)
    usual = next(files[other] for other in range(ranks) if other not in odd)
    said = "; ".join(
        f"rank {one} ({everyone[one]['machine']}) has another {_listed(_shown(files[one], usual))}"
        for one in odd[:MOST_SHOWN]
    )
    raise RankError(f"{words.problem}: {said}. {words.remedy}", odd)


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of files that are not alike; the program's before the runtime's."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return sorted(names, key=lambda name: (name.startswith("autopar_runtime/"), name))


def _shown(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of what is not alike: versions first, with both of them."""
    names = differing(one, other)
    versions = [name for name in (TORCH, PYTHON) if name in names]
    said = [f"{name} ({one.get(name, 'unknown')}, not {other.get(name, 'unknown')})" for name in versions]
    return [*said, *(name for name in names if name not in versions)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_SHOWN]) + (f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else "")


def precision_of(manifest: Manifest) -> str:
    """The precision that the plan says the program computes in ("": as the model is, or there is no plan)."""
    try:
        plan = read_json(manifest.directory / "plan.json")
    except (OSError, SchemaError):
        return ""
    said = plan.get("precision", "") if isinstance(plan, dict) else ""
    return said if isinstance(said, str) else ""


def recorded(root: Path, manifest: Manifest, seed: int) -> str:
    """A text of what changed since the run of a directory was last started; empty where nothing did, or at the first
    start. Writes down how it is now. One rank calls this. Raises CheckpointError."""
    path = root / RECORD
    own = {"plan": f"{manifest.show()}, {manifest.plan_hash}", "precision": precision_of(manifest)}
    try:
        now = {**own, "files": hashes(manifest, seed)}
        changes = _changes(path, now)
        replace_file(path, json.dumps(now, indent=1).encode())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
    return changes


def _changes(path: Path, now: Mapping[str, Any]) -> str:
    """A text of what changed since the record was written. Raises OSError."""
    try:
        before = _RECORD(read_json(path), "")
    except FileNotFoundError:
        return ""
    except SchemaError as error:
        return f"{path} is damaged ({error}), so nobody knows what is no longer as it was"
    said = [
        f"{what} is {now[what] or 'that of the model'}, was {before[what] or 'that of the model'}"
        for what in ("plan", "precision")
        if now[what] != before[what]
    ]
    both = now["files"].keys() & before["files"].keys()  # another number of ranks has other files
    names = [name for name in differing(now["files"], before["files"]) if name in both]
    return "; ".join([*said, *([f"other files: {_listed(names)}"] if names else [])])
