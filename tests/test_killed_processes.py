"""kill -9 at random moments of every way to save: nothing is lost or mixed, and what goes on is as if nothing had happened."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cli.export import export
from autopar.codegen.owned_files import digest, written_before
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.weights import stored_tensors
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.data.whole_files import COMPLETE, current, problem_of, read_record
from autopar.runtime.errors import CheckpointError
from autopar.runtime.program.manifest import Manifest

from .runtime import stages
from .runtime.scenarios import session_of

STEPS = 8
tries = pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 17), marks=pytest.mark.slow)], ids=["two", "15"]
)


def forked(job: Callable[[], Any]) -> int:
    """A process that does the job and ends; its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    with contextlib.suppress(BaseException):
        job()
        status = 0
    os._exit(status)


def ended(*children: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def killed(job: Callable[[], Any], wait_s: float) -> None:
    child = forked(job)
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    ended(child)


def again_and_again(save: Callable[[int], Any]) -> None:
    for number in range(1, 1000):
        save(number)


# --- ranks that train and save -----------------------------------------------------------------------------------------


def train(folder: Path, store: Path, rank: int) -> None:
    """Go on from what is in the folder to the last step, saving after each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    program = stages.mlp(2, 1, zero=3)
    session = session_of(program, TorchComm(program.mesh))
    if (current(folder) / ".metadata").exists():
        checkpoint.load(folder, session)
    else:
        session.load_weights(stages.weights())
    for batch in stages.batches(STEPS)[session.rt.step :]:
        session.train_step(batch)
        checkpoint.save(folder, session)
    dist.destroy_process_group()


def job(folder: Path, scratch: Path) -> list[int]:
    store = scratch / f"store{time.monotonic_ns()}"
    return [forked(functools.partial(train, folder, store, rank)) for rank in range(2)]


def state(folder: Path) -> dict[str, torch.Tensor]:
    source = checkpoint.TensorSource(folder)
    return {name: source.read(name) for name, kind in source.signatures.items() if kind is not None}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(15)], ids=["15"])
def test_ranks_that_train_and_save_end_with_the_same_bits(seeds: range, tmp_path: Path) -> None:
    start = time.perf_counter()
    assert ended(*job(tmp_path / "wanted", tmp_path)) == [0, 0]
    took_s, wanted = time.perf_counter() - start, state(tmp_path / "wanted")
    for seed in seeds:
        pick, folder = random.Random(seed), tmp_path / f"saved{seed}"
        steps = [0]
        for _ in range(2):
            children = job(folder, tmp_path)
            time.sleep(pick.uniform(0.2, 0.9) * took_s)
            for child in pick.sample(children, 2):
                os.kill(child, signal.SIGKILL)
                time.sleep(pick.choice((0, 0.05)))
            ended(*children)
            if (current(folder) / ".metadata").exists():
                steps.append(int(state(folder)["step"]) if "step" in state(folder) else steps[-1])
        assert steps == sorted(steps)
        assert ended(*job(folder, tmp_path)) == [0, 0]
        have = state(folder)
        assert have.keys() == wanted.keys()
        assert all(torch.equal(have[name], value) for name, value in wanted.items())
        assert not (folder / ".next").exists()


@tries
def test_full_weights_are_of_one_save(seeds: range, tmp_path: Path) -> None:
    folder = tmp_path / "weights"

    def save(number: int) -> None:
        checkpoint.write_full(folder, {name: torch.full((500, n), float(number)) for n, name in enumerate("abc", 1)})

    save(0)
    for seed in seeds:
        killed(lambda: again_and_again(save), random.Random(seed).uniform(0.01, 0.5))
        assert len({float(n) for value in state(folder).values() for n in value.unique()}) == 1


# --- programs and exports ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> autopar.ParallelProgram:
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.randn(8, 8), torch.arange(8))
    return autopar.compile(model, autopar.ClusterSpec.local(1), batch, loss_fn=F.cross_entropy, optimizer=optimizer)


@tries
def test_a_program_is_of_one_save(program: autopar.ParallelProgram, seeds: range, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def save(number: int) -> None:
        with torch.no_grad():
            for parameter in program.model.parameters():
                parameter.fill_(number)
        program.save(out)

    save(0)
    for seed in seeds:
        killed(lambda: again_and_again(save), random.Random(seed).uniform(0.01, 1.5))
        manifest = Manifest.read(out)
        for name, sha256 in written_before(manifest.directory).items():
            if sha256 and name != "program.json":
                assert digest((manifest.directory / name).read_bytes()) == sha256, (seed, name)
        assert manifest.weights_folder is not None
        assert len({float(n) for value in state(manifest.weights_folder).values() for n in value.unique()}) == 1


@tries
def test_an_export_is_whole_or_not_there(program: autopar.ParallelProgram, seeds: range, tmp_path: Path) -> None:
    out, target, there = program.save(tmp_path / "out"), tmp_path / "hf", 0
    for seed in seeds:
        shutil.rmtree(target, ignore_errors=True)
        killed(lambda: export(out, out / "weights", target, 600), random.Random(seed).uniform(0.005, 0.15))
        if (current(target) / COMPLETE).exists():
            files = read_record(current(target))["files"]
            assert problem_of(current(target), files, files) == ""
            assert len(stored_tensors(current(target))) == 4
            there += 1
        else:
            with pytest.raises(CheckpointError, match="is no checkpoint directory"):
                stored_tensors(target)
    print(f"{there} of {len(seeds)} were whole")
