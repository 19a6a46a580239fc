"""Whatever ends a save, a reader finds all of the old files or all of the new ones, and the next save works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.data.schema import SchemaError
from autopar.runtime.data.whole_files import (
    begin,
    commit,
    current,
    file_facts,
    read_record,
    replace_file,
    share_of,
    write_record,
)
from autopar.runtime.errors import CheckpointError
from tests.killed import moments

OLD = {"a": "old", "inner/b": "old", "going": "old"}
NEW = {"a": "new", "inner/b": "new", "inner/more/c": "new", "lead": "new"}


def save(directory: Path, files: dict[str, str], gone: tuple[str, ...] = ()) -> None:
    folder = begin(directory)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    commit(directory, last=["lead"], gone=gone)


def content(directory: Path) -> dict[str, str]:
    """The texts that a reader finds, but for files of others and for hidden ones."""
    folder = current(directory)
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {
        path.as_posix(): (folder / path).read_text()
        for path in paths
        if not path.parts[0].startswith(".") and path.name != "mine"
    }


def test_a_save_that_is_killed_at_any_moment_leaves_the_old_files_or_the_new_ones(tmp_path: Path) -> None:
    found = []
    directory = tmp_path / "out"
    save(directory, OLD)
    (directory / "mine").write_text("mine")
    for moment in moments(lambda: save(directory, NEW, ("going",))):
        have = content(directory)
        assert have in (OLD, NEW), (moment, have)
        found.append(have == NEW)
        if len(found) % 2:  # every other time the next save comes at once, and is not killed
            save(directory, OLD, ("lead", "inner/more/c"))
            assert content(directory) == OLD
            assert sorted(path.name for path in directory.iterdir()) == ["a", "going", "inner", "mine"]
    assert True in found
    assert False in found
    assert len(found) > 30
    assert content(directory) == NEW
    assert sorted(path.name for path in directory.iterdir()) == ["a", "inner", "lead", "mine"]
    assert (directory / "mine").read_text() == "mine"


def test_a_file_system_without_links_takes_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    save(tmp_path, OLD)
    save(tmp_path, NEW, ("going",))
    assert content(tmp_path) == NEW


def test_a_checkpoint_that_is_killed_at_any_moment_of_its_save_is_one_of_two(tmp_path: Path) -> None:
    folder, found, number = tmp_path / "saved", set[float](), 0.0

    def values() -> dict[str, object]:
        return {"a": torch.full((3, 5), number), "b": torch.full((7,), number), "step": torch.tensor(int(number))}

    def write() -> None:
        checkpoint.write_full(folder, values())

    write()
    number = 1.0
    for _ in moments(write):
        source = checkpoint.TensorSource(folder)
        read = {name: source.read(name) for name in values()}
        (own,) = {float(value.unique()) for value in read.values()}
        assert number - own in (0, 1)
        found.add(number - own)
        number = own + 1
    assert found == {0, 1}
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "complete.json"]


def test_a_file_that_is_replaced_alone_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("old")
    for _ in moments(lambda: replace_file(path, b"new")):
        assert path.read_text() in ("old", "new")
    assert path.read_text() == "new"


def test_a_record_says_bytes_and_hashes_and_notices_its_own_damage(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    files = {"a": file_facts(tmp_path / "a")}
    write_record(tmp_path, {"files": files, "step": 4})
    assert read_record(tmp_path) == {"files": files}
    text = (tmp_path / "complete.json").read_text()
    for damaged in (text.replace("4", "5", 1), text[:-1], text.replace('"step": 4, ', ""), ""):
        (tmp_path / "complete.json").write_text(damaged)
        with pytest.raises(SchemaError):
            read_record(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_check_every_file_once_and_about_as_many_bytes_each(ranks: int) -> None:
    files = {f"f{i}": {"bytes": 1000 * (i % 7) + i, "sha256": ""} for i in range(60)}
    parts = [share_of(files, rank, ranks) for rank in range(ranks)]
    assert sorted(name for part in parts for name in part) == sorted(files)
    loads = [sum(int(files[name]["bytes"]) for name in part) for part in parts]
    assert max(loads) - min(loads) <= 6059


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="choose another directory"):
        checkpoint.write_full(tmp_path / "file", {"a": torch.zeros(1)})
