"""`program.save` and `autopar-export` that are killed at any moment leave what was there before, or all of what was to come."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cli.export import export
from autopar.codegen.owned_files import digest, written_before
from autopar.errors import EmitError
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.weights import stored_tensors
from autopar.runtime.data.whole_files import COMPLETE, current, problem_of, read_record
from autopar.runtime.program.manifest import Manifest
from tests.killed import killed_after
from tests.warm import torchrun

MOMENTS = (0, 1, 40, 199, 230, 260, 301, 350, 420, 500, 560, 700)
"""The moments at which a save is killed, in calls to the file system, of about 650."""
CALLS = 1000


def compiled(lr: float, mesh: dict[str, int]) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with torch.no_grad():
        model[0].bias.fill_(lr)
    optimizer = functools.partial(torch.optim.SGD, lr=lr)
    options = autopar.Options(mesh=mesh)
    batch = (torch.randn(8, 8), torch.arange(8))
    ranks = autopar.ClusterSpec.local(next(iter(mesh.values())))
    return autopar.compile(model, ranks, batch, loss_fn=F.cross_entropy, optimizer=optimizer, options=options)


@pytest.fixture(scope="module")
def programs() -> tuple[autopar.ParallelProgram, autopar.ParallelProgram]:
    """One for two ranks that learns by 0.1, and one for a single rank that learns by 0.2."""
    return compiled(0.1, {"dp": 2}), compiled(0.2, {"dp": 1})


def found(out: Path) -> float:
    """The learning rate of the program that a reader finds, which must be whole and of one save."""
    manifest = Manifest.read(out)
    rate = float(manifest.update.optimizer.kwargs["lr"])  # type: ignore[union-attr]
    listed = written_before(manifest.directory)
    assert len(listed) > 100
    for name, sha256 in listed.items():
        if sha256 and name != "program.json":
            assert digest((manifest.directory / name).read_bytes()) == sha256, name
    assert manifest.world_size == (2 if rate == 0.1 else 1)
    assert manifest.weights_folder is not None
    assert checkpoint.TensorSource(manifest.weights_folder).read("0.bias")[0].item() == pytest.approx(rate)
    return rate


@pytest.mark.parametrize(
    "moments", [MOMENTS, pytest.param(range(0, CALLS, 9), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_program_is_the_old_or_the_new_one(programs, moments, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out, one, other = tmp_path / "out", *programs
    one.save(out)
    (out / "mine.txt").write_text("mine")
    seen = set()
    for moment in moments:
        before = found(out)
        with killed_after(moment):
            (other if before == 0.1 else one).save(out)
        seen.add(found(out) == before)
        assert (out / "mine.txt").read_text() == "mine"
    assert seen == {True, False}
    one.save(out)
    assert found(out) == 0.1
    assert not (out / ".next").exists()
    assert not (out / ".partial").exists()
    assert set(written_before(out)) | {"mine.txt"} == {
        path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()
    }


def interrupted(programs: tuple[autopar.ParallelProgram, autopar.ParallelProgram], out: Path) -> None:
    """The program for two ranks, being replaced by the other one, of which some files lie in their place."""
    one, other = programs
    one.save(out)
    for moment in itertools.count(100, 20):
        with killed_after(moment):
            other.save(out)
        if (out / ".next").is_dir():
            break
    with killed_after(150):
        other.save(out)
    assert (out / ".next").is_dir()
    assert not (out / "manifest.json").exists()


@pytest.mark.slow
def test_an_interrupted_program_runs(programs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    interrupted(programs, tmp_path / "out")
    done = torchrun(1, tmp_path / "out" / "run.py", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "step 2" in done.stdout


def test_a_file_that_somebody_changed_meanwhile_is_not_overwritten(programs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "out"
    interrupted(programs, out)
    (out / "stages" / "stage_0.py").write_text("mine")
    with pytest.raises(EmitError, match=r"changed since: stages/stage_0\.py"):
        programs[0].save(out)
    assert (out / "stages" / "stage_0.py").read_text() == "mine"
    assert found(out) == 0.2


def test_an_export_is_whole_or_not_there(programs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    program = programs[0].save(tmp_path / "program")
    (tmp_path / "config.json").write_text("{}")
    target, moment, seen = tmp_path / "hf", 0, set()
    while True:
        with killed_after(moment) as made:
            export(program, program / "weights", target, 600, config=tmp_path / "config.json")
        folder = current(target)
        if (folder / COMPLETE).exists():
            files = read_record(folder)["files"]
            assert problem_of(folder, files, files) == ""
            assert set(stored_tensors(folder)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert set(index["weight_map"].values()) < files.keys()
            assert (folder / "config.json").exists()
        else:
            assert not list(folder.glob("*.safetensors*"))
        seen.add((folder / COMPLETE).exists())
        if made[0] <= moment:
            break
        moment += 1
        shutil.rmtree(target, ignore_errors=True)
    assert seen == {True, False}
    assert sorted(path.name for path in target.glob(".*")) == []
