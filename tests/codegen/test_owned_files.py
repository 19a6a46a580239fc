"""`save` replaces what autopar wrote, and touches nothing else."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import EmitError
from autopar.runtime.checkpoint import checkpoint


@pytest.fixture(scope="module")
def program() -> autopar.ParallelProgram:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    options = autopar.Options(mesh={"dp": 2})
    batch = (torch.randn(8, 8), torch.arange(8))
    return autopar.compile(
        model, autopar.ClusterSpec.local(2), batch, loss_fn=F.cross_entropy, optimizer=optimizer, options=options
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_saving_again_replaces_what_was_written_and_keeps_the_users_files(
    program: autopar.ParallelProgram, tmp_path: Path
) -> None:
    out = program.save(tmp_path / "out")
    first = contents(out)
    (out / "data.py").write_text("mine")
    (out / "stages" / "notes.txt").write_text("mine")
    program.save(out)
    second = contents(out)
    assert second.keys() == {*first, "data.py", "stages/notes.txt"}
    assert second["data.py"] == second["stages/notes.txt"] == b"mine"
    of_the_save = ("program.json", "weights/.metadata", "weights/complete.json")
    assert all(second[name] == first[name] for name in first if name not in of_the_save)


@pytest.mark.parametrize(
    "name", ["run.py", "plan.json", "manifest.json", "program.json", "weights/mine.pt", "stages/stage_0.py", "stages"]
)
def test_a_file_of_somebody_else_is_in_the_way(program: autopar.ParallelProgram, name: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(EmitError, match="did not write"):
        program.save(tmp_path / "out")
    assert contents(tmp_path / "out") == {name: b"mine"}


def test_a_changed_file_is_the_users(program: autopar.ParallelProgram, tmp_path: Path) -> None:
    out = program.save(tmp_path / "out")
    (out / "run.py").write_text("mine")
    before = contents(out)
    with pytest.raises(EmitError, match=r"changed since: run\.py"):
        program.save(out)
    assert contents(out) == before


def test_weights_that_were_trained_there_are_kept(program: autopar.ParallelProgram, tmp_path: Path) -> None:
    out = program.save(tmp_path / "out")
    checkpoint.write_full(out / "weights", {"0.weight": torch.zeros(16, 8)})
    with pytest.raises(EmitError, match="weights/"):
        program.save(out)


def test_a_plan_edited_in_place_is_replaced_by_itself_alone(program: autopar.ParallelProgram, tmp_path: Path) -> None:
    out = program.save(tmp_path / "out")
    replace(program.plan, origin="a person").save(out / "plan.json")
    with pytest.raises(EmitError, match=r"plan\.json"):
        program.save(out)
    program.with_plan(autopar.Plan.load(out / "plan.json")).save(out)
    assert autopar.Plan.load(out / "plan.json").origin == "a person"


def test_links_are_not_followed(program: autopar.ParallelProgram, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.py").symlink_to(tmp_path / "mine")
    with pytest.raises(EmitError, match=r"run\.py"):
        program.save(tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_file_instead_of_a_directory(program: autopar.ParallelProgram, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(EmitError, match="cannot write to"):
        program.save(tmp_path / "out")
    for wrong in (3, None, "", "a\0b"):
        with pytest.raises(EmitError, match="takes the path of a directory"):
            program.save(wrong)  # type: ignore[arg-type]
