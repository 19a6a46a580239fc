"""Ranks that run other files are named before any of them is imported, and a later start says which files are others."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.errors import CollectiveTimeout, RankError
from autopar.runtime.program.factories import NamedFactory, NamedRule
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run import program_files
from autopar.runtime.run.program_files import compare, hashes, recorded
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.warm import torchrun

OWN_ROOT = """import os, sys
rank = os.environ["RANK"]
root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank" + rank)
sys.path.insert(0, root)
from autopar_runtime.run import launch
if sys.argv[1] == "load":
    program = launch.load(root, timeout_s=30.0)
    from programs import stages
    for batch in stages.batches(3):
        print("loss", program(*batch).item(), flush=True)
else:
    sys.exit(launch.main(root, sys.argv[2:]))
"""
EDITED = ["stages/stage_0.py", "pipeline.py", "manifest.json", "run.py", "autopar_runtime/gradients/grads.py"]


@pytest.fixture(scope="module")
def folders(emitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The directory of the program, copied for each rank."""
    both = tmp_path_factory.mktemp("files")
    for rank in range(2):
        shutil.copytree(emitted, both / f"rank{rank}", ignore=shutil.ignore_patterns("saved", "__pycache__"))
    (both / "run.py").write_text(OWN_ROOT)
    return both


@pytest.mark.few(1)
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("how", "name"), [("load", EDITED[0]), ("main", EDITED[4]), ("main --run-dir", EDITED[0]), ("main", EDITED[2])]
)
def test_a_file_that_was_edited_on_one_machine_ends_the_run_by_name(folders, tmp_path, how, name):
    path = folders / "rank1" / name
    before = path.read_text()
    path.write_text(before + "\n")
    more = [how.split()[1], tmp_path / "run"] if " " in how else []
    done = torchrun(2, folders / "run.py", how.split()[0], "--timeout", 30, *more)
    path.write_text(before)
    assert done.returncode == 1
    said = done.stderr
    assert "ranks do not run the same program: rank" in said
    assert f"has another {name}. Copy the directory" in said
    assert "loss" not in done.stdout
    assert not (tmp_path / "run" / "steps").exists()


def manifest(folder: Path) -> Manifest:
    return Manifest.read(folder / "rank0")


def told(ranks: list[dict[str, str]], missing: int | None = None) -> list[Exception | None]:
    """The error that comparing raises on every rank, or None."""
    store, got = dist.HashStore(), dict.fromkeys(range(len(ranks)), None)

    def rank(number: int) -> None:
        try:
            compare(store, number, len(ranks), ranks[number], 0.5 if missing is not None else 20.0)
        except (RankError, CollectiveTimeout) as error:
            got[number] = error

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(ranks)) if n != missing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [got[n] for n in range(len(ranks)) if n != missing]


@pytest.mark.parametrize("name", EDITED)
def test_every_file_that_runs_is_compared(folders, name):
    own = hashes(manifest(folders), 3)
    assert name in own
    assert told([own, own, own]) == [None] * 3
    for other in ({**own, name: "0"}, {k: v for k, v in own.items() if k != name}, {**own, "stages/more.py": "0"}):
        errors = told([own, other, own])
        assert all(isinstance(error, RankError) and error.ranks == (1,) for error in errors)
        assert all(("stages/more.py" if len(other) > len(own) else name) in str(error) for error in errors)


def test_other_seeds_are_named(folders):
    errors = told([hashes(manifest(folders), seed) for seed in (3, 3, 4)])
    assert [error.ranks for error in errors] == [(2,)] * 3
    assert "has another --seed" in str(errors[0])


def test_a_module_of_ones_own_that_makes_the_optimizer_is_compared(folders):
    update = NamedRule(NamedFactory("tests.runtime.updates", "any"))
    import tests.runtime.updates  # noqa: F401

    assert "module tests.runtime.updates" in hashes(dataclasses.replace(manifest(folders), update=update), 0)


def test_a_rank_that_does_not_come_is_no_wait_for_ever():
    errors = told([{"a": "1"}] * 3, missing=2)
    assert all("not all of 3 ranks said in 0.5 s which files they run" in str(error) for error in errors)


def test_a_later_start_says_what_is_no_longer_as_it_was(folders, tmp_path, monkeypatch):
    one, stage = manifest(folders), folders / "rank0" / "stages" / "stage_0.py"
    before = stage.read_text()
    monkeypatch.setattr(Manifest, "show", lambda _: "dp=2")
    assert recorded(tmp_path, one, 3) == ""
    assert recorded(tmp_path, one, 3) == ""
    stage.write_text(before + "\n")
    assert recorded(tmp_path, one, 3) == "other files: stages/stage_0.py"
    stage.write_text(before)
    monkeypatch.setattr(program_files, "precision_of", lambda _: "bf16")
    said = recorded(tmp_path, one, 4)
    assert said == "precision is bf16, was that of the model; other files: --seed, stages/stage_0.py"
    plan = json.loads((tmp_path / program_files.RECORD).read_text())["plan"]
    monkeypatch.setattr(Manifest, "plan_hash", "other")
    assert recorded(tmp_path, one, 4) == f"plan is dp=2, other, was {plan}"
    (tmp_path / program_files.RECORD).write_text("{")
    assert "is damaged" in recorded(tmp_path, one, 4)
    assert recorded(tmp_path, one, 4) == ""


def test_another_torch_on_one_rank_is_named_with_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = object.__new__(Manifest)
    monkeypatch.setattr(program_files, "_paths", lambda manifest: iter(()))
    usual = program_files.hashes(program, 0)
    monkeypatch.setattr("torch.__version__", "2.1.0")
    odd = program_files.hashes(program, 0)
    monkeypatch.undo()
    store, errors = dist.HashStore(), []

    def start(rank: int) -> None:
        try:
            program_files.compare(store, rank, 3, odd if rank == 1 else usual, 20.0)
        except RankError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    for said in errors:
        assert "rank 1 " in said
        assert f"version of torch (2.1.0, not {torch.__version__.partition('+')[0]})" in said
