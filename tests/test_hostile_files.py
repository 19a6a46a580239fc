"""Whatever a file holds that anybody may have written, reading it takes at most 200 MB and 5 s, and what is wrong is named."""

from __future__ import annotations

import base64
import functools
import io
import json
import pickle
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from autopar import ClusterSpec, Plan
from autopar.errors import AutoparError
from autopar.runtime import RuntimeProgramError
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.checkpoint_reader import DataReader
from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.checkpoint.weights import stored_tensors
from autopar.runtime.data.safetensors import read_part
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run.excluded_nodes import FAILED, Failure, failures
from autopar.runtime.run.ownership import Owner, _read
from autopar.runtime.run.program_files import _changes
from autopar.runtime.update.update_state import plain_text, read_schedulers

from . import hostile
from .bounds import readings
from .mutations import mutated_bytes
from .runtime import safetensors_files

NAMED = (AutoparError, RuntimeProgramError)
SIZE = torch.Size([16])


def metadata(length: int) -> bytes:
    """The metadata of a checkpoint of one tensor of 16 floats and one value, both of which take all of a file."""
    chunk = ChunkStorageMetadata(torch.Size([0]), SIZE)
    kinds = {"a": TensorStorageMetadata(TensorProperties(torch.float32), SIZE, [chunk]), "v": BytesStorageMetadata()}
    places = {
        MetadataIndex("a", torch.Size([0])): _StorageInfo("a.distcp", 0, length),
        MetadataIndex("v"): _StorageInfo("v.distcp", 0, length),
    }
    return pickle.dumps(Metadata(kinds, storage_data=places))


def read_metadata(folder: Path, data: bytes) -> Any:
    (folder / ".metadata").write_bytes(data)
    return lambda: DataReader(folder)


def read_tensor(folder: Path, data: bytes) -> Any:
    (folder / ".metadata").write_bytes(metadata(len(data)))
    (folder / "a.distcp").write_bytes(data)
    return lambda: checkpoint.TensorSource(folder).read("a")


def read_value(folder: Path, data: bytes) -> Any:
    (folder / ".metadata").write_bytes(metadata(len(data)))
    (folder / "v.distcp").write_bytes(data)

    def attempt() -> None:
        reader = DataReader(folder)
        with checkpoint.named(folder):
            checkpoint._read_alone(reader, "v", None, None)

    return attempt


def read_safetensors(folder: Path, data: bytes) -> Any:
    (folder / "model.safetensors").write_bytes(data)

    def attempt() -> None:
        for stored in stored_tensors(folder).values():
            read_part(stored, [slice(0, n) for n in stored.shape])

    return attempt


def read_data(name: str, read: Callable[[Path], Any]) -> Callable[[Path, bytes], Any]:
    def attempt(folder: Path, data: bytes) -> Any:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return lambda: read(path)

    return attempt


def torch_file(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def safetensors_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        return safetensors_files.write(path, {"a": torch.arange(16.0), "b": torch.ones(3, 2)}).read_bytes()


def cluster() -> bytes:
    return json.dumps(ClusterSpec.preset("dgx-h100", nodes=2).to_dict()).encode()


Reader = Callable[[Path, bytes], Any]
READERS: dict[str, tuple[Reader, Callable[[], dict[str, bytes]], Callable[[], bytes]]] = {
    "metadata": (read_metadata, hostile.bombs, lambda: metadata(1577)),
    "tensor": (read_tensor, hostile.archives, lambda: torch_file(torch.arange(16.0))),
    "value": (read_value, hostile.archives, lambda: torch_file({"a": [1, 2.5, "x", None], "b": (True, 1 << 40)})),
    "safetensors": (read_safetensors, hostile.safetensors, safetensors_file),
    "JSON cluster": (read_data("c.json", ClusterSpec.from_file), hostile.texts, cluster),
    "YAML cluster": (read_data("c.yaml", ClusterSpec.from_file), hostile.texts, cluster),
    "plan": (read_data("plan.json", Plan.load), hostile.texts, lambda: b"{}"),
    "manifest": (read_data("manifest.json", lambda path: Manifest.read(path.parent)), hostile.texts, lambda: b"{}"),
    "record": (
        read_data("steps/0000000004/complete.json", lambda path: RunDirectory(path.parents[2]).read(4)),
        hostile.texts,
        lambda: b"{}",
    ),
}
"""How a kind of file is read, what is crafted in its place, and a right one."""


def read_all(read: Reader, files: dict[str, bytes], folder: Path, accepted: bool = False) -> None:
    """Raises AssertionError for a file that is not refused by name, or takes more than it may. accepted: files may be right."""
    attempts = {}
    for number, (name, data) in enumerate(files.items()):
        (folder / f"{number}").mkdir()
        attempts[name] = read(folder / f"{number}", data)
    refuse_all(attempts, accepted)


def refuse_all(attempts: dict[str, Callable[[], Any]], accepted: bool = False) -> None:
    done = readings(attempts, NAMED).items()
    wrong = [
        f"{name}: {one.said} ({one.megabytes:.0f} MB, {one.seconds:.1f} s)"
        for name, one in done
        if not one.within or not one.named or (one.said == "accepted" and not accepted)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", READERS)
def test_crafted_files_are_refused_by_name_within_bounds(kind: str, tmp_path: Path) -> None:
    files = dict(READERS[kind][1]())
    if kind == "value":
        for right in ("a list of it", "a value that is none", "another dtype"):
            files.pop(right, None)
    assert len(files) >= 30
    read_all(READERS[kind][0], files, tmp_path)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("metadata", 20), ("tensor", 20), *(pytest.param(kind, 1000, marks=pytest.mark.slow) for kind in READERS)],
)
def test_mutated_files_are_read_or_refused_by_name_within_bounds(kind: str, count: int, tmp_path: Path) -> None:
    whole = READERS[kind][2]()
    files = {f"mutant {seed}": mutated_bytes(whole, random.Random(seed)) for seed in range(count)}
    read_all(READERS[kind][0], files, tmp_path, accepted=True)


def owner() -> bytes:
    return json.dumps(asdict(Owner.this_process("job"))).encode()


def ledger() -> bytes:
    return b"".join(json.dumps(asdict(Failure(1e9, "a", FAILED, f"ended {n}"))).encode() + b"\n" for n in range(3))


def record_of_program() -> bytes:
    return json.dumps({"plan": "dp=2, 1f", "precision": "", "files": {"run.py": "0" * 64}}).encode()


def changes_since(path: Path) -> str:
    now = {"plan": "dp=4, 2f", "precision": "", "files": {"run.py": "1" * 64}}
    return _changes(path, now)


NOTES: dict[str, tuple[Reader, Callable[[], bytes]]] = {
    "owner": (read_data("owner/0000000001", lambda path: _read(path.parents[1], 1)), owner),
    "failures": (read_data("failures.jsonl", lambda path: failures(path.parent)), ledger),
    "program": (read_data("program.json", changes_since), record_of_program),
    "learned cluster": (read_data("learned.json", ClusterSpec.from_file), cluster),
}
"""The notes that a run or a tuning leaves beside checkpoints: how each is read, and a right one. Damaged ones are said
and left out."""


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", NOTES)
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_notes_of_a_run_that_are_damaged_end_nothing_and_take_little(kind: str, count: int, tmp_path: Path) -> None:
    read, whole = NOTES[kind]
    files = dict(hostile.texts()) | {f"mutant {n}": mutated_bytes(whole(), random.Random(n)) for n in range(count)}
    read_all(read, files, tmp_path, accepted=True)


@pytest.mark.parametrize("kind", NOTES)
def test_notes_of_a_run_are_read(kind: str, tmp_path: Path) -> None:
    read, whole = NOTES[kind]
    assert read(tmp_path, whole())()


@pytest.mark.parametrize("kind", ["metadata", "tensor", "value", "safetensors", "JSON cluster", "YAML cluster"])
def test_a_right_file_is_read(kind: str, tmp_path: Path) -> None:
    read, _, whole = READERS[kind]
    read(tmp_path, whole())()


def test_schedulers_are_read_within_the_same_bounds() -> None:
    files = list(hostile.archives().items())[::6]
    refuse_all({name: functools.partial(read_schedulers, base64.b64encode(data).decode(), []) for name, data in files})
    with pytest.raises(RuntimeProgramError, match="not the state of 0 schedulers"):
        read_schedulers(plain_text([1]), [])
