"""A step of a run directory is whole or not there, and what was damaged since is found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex

from autopar.runtime.checkpoint.checkpoint_files import Block, RankFile
from autopar.runtime.checkpoint.checkpoint_reader import DataReader
from autopar.runtime.checkpoint.run_directory import RunDirectory, StepRecord
from autopar.runtime.checkpoint.weights import stored_tensors
from autopar.runtime.data.whole_files import COMPLETE, file_facts
from autopar.runtime.errors import CheckpointError

CONTENT = {"__0_0.distcp": b"one" * 100, "__1_0.distcp": b"two" * 50, ".metadata": b"where"}


def written(directory: RunDirectory, step: int, salt: bytes = b"") -> StepRecord:
    folder = directory.partial(step)
    folder.mkdir(parents=True)
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content + salt + str(step).encode())
    files = {name: file_facts(folder / name) for name in CONTENT}
    found = StepRecord(step, step * 2, 7, 2, "a plan", files)
    directory.complete(found)
    return found


def test_a_step_comes_back_as_it_was_written(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    directory.prepare(1000)
    found = written(directory, 5)
    assert directory.steps() == [5]
    assert directory.read(5) == found
    assert directory.check(found, found.files) == ""


def test_the_last_steps_and_every_nth_stay(tmp_path: Path):
    directory = RunDirectory(tmp_path, keep=2, keep_every=20)
    directory.prepare(1000)
    for step in range(10, 80, 10):
        written(directory, step)
    assert directory.steps() == [70, 60, 40, 20]


def test_what_was_not_finished_has_no_name_and_goes_at_the_next_start(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    directory.prepare(1000)
    written(directory, 5)
    directory.partial(10).mkdir()
    (directory.partial(10) / "__0_0.distcp").write_bytes(b"half")
    assert directory.steps() == [5]
    directory.prepare(1000)
    assert not directory.partial(10).exists()
    assert directory.steps() == [5]


@pytest.mark.parametrize("name", [*CONTENT, COMPLETE])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "of another step", "longer"])
def test_every_damage_of_every_file_is_found(tmp_path: Path, name: str, damage: str):
    directory = RunDirectory(tmp_path)
    directory.prepare(1000)
    written(directory, 5)
    written(directory, 10)
    path = directory.folder(10) / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "of another step":
        shutil.copy(directory.folder(5) / name, path)
    else:
        flipped = content[:20] + bytes([content[20] ^ 1]) + content[21:] if len(content) > 20 else b"x" + content[1:]
        path.write_bytes({"truncated": content[:-1], "flipped": flipped, "longer": content + b" {"}[damage])

    def problem() -> str:
        try:
            found = directory.read(10)
        except CheckpointError as error:
            return str(error)
        return directory.check(found, found.files)

    assert problem().startswith("step 10: ")
    assert name in problem()
    good = directory.read(5)
    assert directory.check(good, good.files) == ""


def test_a_number_that_was_changed_in_the_record_of_a_step_is_found(tmp_path: Path):
    """The record stays JSON of the right form, with another place in the data, another seed, another size or hash of a file."""
    directory = RunDirectory(tmp_path)
    directory.prepare(1000)
    found = written(directory, 5)
    path = directory.folder(5) / COMPLETE
    content = path.read_text()
    (sha, *_) = (facts["sha256"] for facts in found.files.values())
    for before, after in (
        ('"position": 10', '"position": 11'),
        ('"seed": 7', '"seed": 8'),
        ('"ranks": 2', '"ranks": 1'),
        ('"a plan"', '"b plan"'),
        ('"bytes": 301', '"bytes": 302'),
        (sha, sha[1:] + sha[0]),
    ):
        changed = content.replace(before, after, 1)
        assert json.loads(changed) != json.loads(content)
        path.write_text(changed)
        with pytest.raises(CheckpointError, match=r"step 5: .* is damaged"):
            directory.read(5)
    path.write_text(content)
    assert directory.read(5) == found


def test_a_step_gets_its_name_when_all_of_it_is_durable_and_older_ones_go_after_that(tmp_path: Path, monkeypatch):
    directory = RunDirectory(tmp_path, keep=1)
    directory.prepare(1000)
    written(directory, 5)
    partial, named, steps = directory.partial(6), directory.folder(6), directory.folder(6).parent
    said: list[tuple[str, Path]] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def synced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == COMPLETE:
            json.loads(path.read_text())  # all of it is written
        said.append(("durable", path))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda own, to: said.append(("named", to)) or rename(own, to))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: said.append(("gone", path)) or rmtree(path))
    written(directory, 6)
    assert said == [
        ("durable", partial / COMPLETE),
        ("durable", partial),
        ("named", named),
        ("durable", steps),
        ("gone", directory.folder(5)),
    ]


def test_the_file_of_a_rank_is_durable_with_all_that_belongs_to_it(tmp_path: Path, monkeypatch):
    index = MetadataIndex("w")
    file = RankFile("__0_0.distcp", (Block(index, b"<", 3, b">"),), (MetadataIndex("text"),))
    durable: list[tuple[str, int]] = []
    fsync = os.fsync

    def synced(handle: int) -> None:
        durable.append((os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle).st_size))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    file.write(tmp_path, {"w": memoryview(b"abc")}, {"text": "some text"})
    path = tmp_path / file.name
    assert path.read_bytes().startswith(b"<abc>")
    assert durable == [(str(path), path.stat().st_size)]
    with pytest.raises(CheckpointError, match="w: 4 bytes on this rank, 3 were planned"):
        file.write(tmp_path, {"w": memoryview(b"abcd")}, {"text": ""})


def test_damaged_steps_are_set_aside_and_not_counted(tmp_path: Path):
    directory = RunDirectory(tmp_path, keep=1)
    directory.prepare(1000)
    written(directory, 5)
    directory.set_aside([5])
    written(directory, 4)
    assert directory.steps() == [4]
    assert len(list((tmp_path / "steps").glob("damaged-*"))) == 1


def test_a_directory_that_will_not_do_is_refused_before_training(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="give a directory that every rank can write to"):
        RunDirectory(tmp_path / "file").prepare(1000)
    with pytest.raises(CheckpointError, match="two must have room"):
        RunDirectory(tmp_path / "run").prepare(1 << 60)


def test_a_run_that_is_given_for_a_checkpoint_is_told_from_other_folders(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    directory.prepare(1000)
    for read in (DataReader, stored_tensors):
        with pytest.raises(CheckpointError, match="is no checkpoint directory") as empty:
            read(tmp_path)
        assert "newest" not in str(empty.value)
    for step in (4, 5):
        written(directory, step)
    for read in (DataReader, stored_tensors):
        with pytest.raises(CheckpointError, match=f"a run, whose newest step is {directory.folder(5)}: give that one"):
            read(tmp_path)
