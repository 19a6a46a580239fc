"""Every damage of every file of a checkpoint is named by whoever reads it: resume, weights, export, load."""

from __future__ import annotations

import functools
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cli import export as cli
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.weights import load_weights
from autopar.runtime.comm.threads import run_threads
from autopar.runtime.errors import CheckpointError
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run import launch

from .runtime import stages
from .runtime.scenarios import session_of

FEW, ALL = range(24), range(300)
counts = pytest.mark.parametrize("seeds", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])


def damaged(folder: Path, other: Path, pick: random.Random, stays: str = "") -> str:
    """Change one file of a checkpoint; which, and how. other: a checkpoint of another step, with the same files."""
    path = pick.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    data, at = path.read_bytes(), pick.randrange(path.stat().st_size)
    some = bytes(pick.randrange(256) for _ in range(8))
    changes: dict[str, Callable[[], bytes]] = {
        "a bit": lambda: data[:at] + bytes([data[at] ^ 1 << pick.randrange(8)]) + data[at + 1 :],
        "a byte": lambda: data[:at] + bytes([data[at] ^ pick.randrange(1, 256)]) + data[at + 1 :],
        "cut": lambda: data[:at],
        "longer": lambda: data + b"\0",
        "a space": lambda: data + b" ",
        "zeros": lambda: data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :],
        "eight bytes": lambda: data[:at] + some + data[at + 8 :],
        "of another step": (other / path.name).read_bytes,
    }
    how = pick.choice([*changes, "gone"] if path.name != stays else [*changes])
    if how == "gone":
        path.unlink()
        return f"{path.name}: gone"
    changed = changes[how]()
    path.write_bytes(changed if changed != data else data + b" ")
    return f"{path.name}: {how} at {at}"


def every(whole: Path, other: Path, seeds: range, folder: Path, read: Callable[[], Any], stays: str = "") -> None:
    """stays: a file that is changed, but never deleted. Raises AssertionError for a damage that is accepted, or not named."""
    shutil.copytree(whole, folder)
    read()
    for seed in seeds:
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        how = damaged(folder, other, random.Random(seed), stays)
        print(how)  # shown where it is accepted
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            read()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of two steps of one run."""
    program, root = stages.mlp(1, 1), tmp_path_factory.mktemp("steps")
    folders = [root / "one", root / "two"]

    def body(comm: Any) -> None:
        session = session_of(program, comm)
        session.load_weights(stages.weights())
        for batch, folder in zip(stages.batches(2), folders, strict=True):
            session.train_step(batch)
            checkpoint.save(folder, session)

    run_threads(1, program.mesh, body, timeout_s=60)
    return folders


@pytest.mark.parametrize("ranks", [1, 2])
@counts
def test_resuming(steps: list[Path], seeds: range, ranks: int, tmp_path: Path) -> None:
    """Damage is found on every rank alike: of two ranks, each checks a part of the files."""
    program = stages.mlp(ranks, 1)

    def body(comm: Any) -> str:
        try:
            checkpoint.load(tmp_path / "saved", session_of(program, comm))
        except CheckpointError as error:
            return str(error)
        return ""

    def read() -> None:
        said = run_threads(ranks, program.mesh, body, timeout_s=60)
        assert len(set(said)) == 1
        if said[0]:
            raise CheckpointError(said[0])

    every(steps[0], steps[1], seeds, tmp_path / "saved", read)


@counts
def test_weights(steps: list[Path], seeds: range, tmp_path: Path) -> None:
    program = stages.mlp(1, 1)
    manifest = Manifest(tmp_path, 1, "pipeline.py", True)

    def read() -> None:
        run_threads(1, program.mesh, lambda c: load_weights(tmp_path / "saved", session_of(program, c), manifest))

    every(steps[0], steps[1], seeds, tmp_path / "saved", read)


@pytest.fixture(scope="module")
def compiled() -> autopar.ParallelProgram:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    batch = (torch.randn(8, 8), torch.arange(8))
    return autopar.compile(model, autopar.ClusterSpec.local(1), batch, loss_fn=F.cross_entropy, optimizer=optimizer)


@pytest.fixture(scope="module")
def programs(compiled: autopar.ParallelProgram, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A program for one rank, and the same with other weights."""
    root = tmp_path_factory.mktemp("programs")
    one = compiled.save(root / "one")
    with torch.no_grad():
        for parameter in compiled.model.parameters():
            parameter.add_(1)
    return [one, compiled.save(root / "two")]


@counts
def test_exporting(programs: list[Path], seeds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = 0

    def read() -> None:
        nonlocal number
        number += 1
        target = tmp_path / f"hf{number}"
        if cli.main([str(programs[0]), str(tmp_path / "saved"), str(target)]):
            assert not target.exists()
            raise CheckpointError(capsys.readouterr().err)

    every(programs[0] / "weights", programs[1] / "weights", seeds, tmp_path / "saved", read)


@counts
def test_weights_that_were_exported(
    compiled: autopar.ParallelProgram, programs: list[Path], seeds: range, tmp_path: Path
) -> None:
    """Weights whose record is gone are as files of other libraries, which have none."""
    exported = [tmp_path / "one", tmp_path / "two"]
    for program, target in zip(programs, exported, strict=True):
        assert cli.main([str(program), str(program / "weights"), str(target), "--max-shard-size", "600"]) == 0
    manifest = Manifest.read(programs[0])

    def read() -> None:
        compiled.on_ranks(lambda session: load_weights(tmp_path / "hf", session, manifest))

    every(*exported, seeds, tmp_path / "hf", read, stays="complete.json")


@counts
def test_loading_a_program(programs: list[Path], seeds: range, tmp_path: Path) -> None:
    """The program is loaded with the weights that came with it."""
    out = tmp_path / "out"
    shutil.copytree(programs[0], out, ignore=shutil.ignore_patterns("weights"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        every(programs[0] / "weights", programs[1] / "weights", seeds, out / "weights", lambda: launch.load(out))
    finally:
        dist.destroy_process_group()


def test_files_that_torch_alone_wrote_have_no_record_and_are_held_against_their_sums(tmp_path: Path) -> None:
    """Every byte of a tensor's numbers that is changed is named; what is not is read as ever."""
    want = {"a": torch.arange(12.0).reshape(3, 4).t(), "b": torch.arange(7)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(dict(want), checkpoint_id=tmp_path, no_dist=True)
    source = checkpoint.TensorSource(tmp_path)
    assert all(torch.equal(source.read(name), value) for name, value in want.items())
    path = tmp_path / "__0_0.distcp"
    whole = path.read_bytes()
    first = whole.index(torch.arange(7).numpy().tobytes())
    for at in range(first, first + 56):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="CRC-32"):
            checkpoint.TensorSource(tmp_path).read("b")


def test_ranks_that_find_different_checkpoints_agree_not_to_go_on(steps: list[Path]) -> None:
    """The checkpoints differ as where a directory is of each machine's own."""
    program = stages.mlp(2, 1)

    def body(comm: Any) -> None:
        checkpoint.load(steps[comm.rank], session_of(program, comm))

    with pytest.raises(CheckpointError, match="ranks find different checkpoints"):
        run_threads(2, program.mesh, body, timeout_s=60)
