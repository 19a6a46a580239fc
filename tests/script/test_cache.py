"""Programs kept on disk: whole or not there, the user's own, and not for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.codegen.owned_files import digest, facts_text
from autopar.errors import EmitError
from autopar.script import cache

DAY_S = 86400.0


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def write(folder: Path) -> None:
    """Write a directory with the list of its files that a program has."""
    (folder / "stages").mkdir()
    (folder / "stages" / "stage_0.py").write_text("x = 1")
    (folder / "program.json").write_text(facts_text({}, {"stages/stage_0.py": digest(b"x = 1")}))


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_what_is_kept_is_found_and_nothing_lies_beside_it(root: Path) -> None:
    assert cache.kept("a") is None
    directory = cache.keep("a", write)
    assert cache.kept("a") == directory == root / "a"
    assert names(root) == {"a"}
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_file_that_was_changed_is_not_run(root: Path) -> None:
    directory = cache.keep("a", write)
    stage = directory / "stages" / "stage_0.py"
    text = stage.read_text()
    for change in (lambda: stage.write_text(text + "\n"), stage.unlink, (directory / "program.json").unlink):
        change()
        assert cache.kept("a") is None
        assert cache.keep("a", write) == directory
        assert cache.kept("a") == directory
        assert stage.read_text() == text
    assert names(root) == {"a"}


def test_a_launch_that_fails_leaves_nothing(root: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyError

    with pytest.raises(KeyError):
        cache.keep("a", fails)
    assert names(root) == set()


def test_of_launches_at_once_the_first_one_counts(root: Path) -> None:
    def meanwhile(folder: Path) -> None:
        write(folder)
        cache.keep("a", write)
        (root / "a" / "first").touch()

    assert (cache.keep("a", meanwhile) / "first").exists()
    assert names(root) == {"a"}


def test_a_folder_of_somebody_else_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(mode=0o777)
    root.chmod(0o770)
    with pytest.raises(EmitError, match=r"is not yours alone .* mode 770.*AUTOPAR_CACHE"):
        cache.cache_folder()
    root.chmod(0o700)
    assert cache.cache_folder() == root
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(EmitError, match="is not yours alone"):
        cache.cache_folder()


def test_a_place_that_cannot_be_is_named(root: Path) -> None:
    root.touch()
    with pytest.raises(EmitError, match=r"programs cannot be kept in .*AUTOPAR_CACHE"):
        cache.cache_folder()


def test_old_programs_go_and_many_go_oldest_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1e9
    ages = {"new": 0.0, "recent": 0.5 * cache.LEAST_S, "week": 7 * DAY_S, "weeks": 14 * DAY_S, "old": 31 * DAY_S}
    ages |= {"once-new": 0.5 * DAY_S, "once-old": 2 * DAY_S, ".unfinished": 2 * DAY_S}
    for name, age_s in ages.items():
        (root / name).mkdir(parents=True)
        (root / name / "file").write_bytes(bytes(1000))
        os.utime(root / name, (now_s - age_s, now_s - age_s))
    cache.prune(root, root / "new", now_s)
    assert names(root) == {"new", "recent", "once-new", "week", "weeks"}
    monkeypatch.setattr(cache, "MOST_BYTES", 3500)
    cache.prune(root, root / "new", now_s)
    assert names(root) == {"new", "recent", "once-new"}
    monkeypatch.setattr(cache, "MOST_BYTES", 0)
    cache.prune(root, root / "new", now_s)
    assert names(root) == {"new", "recent"}


def test_loading_one_keeps_it(root: Path) -> None:
    directory = cache.keep("a", write)
    os.utime(directory, (0, 0))
    assert cache.kept("a") is not None
    cache.prune(root, root / "other")
    assert names(root) == {"a"}
