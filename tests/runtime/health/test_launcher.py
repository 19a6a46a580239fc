"""Where torchrun is killed its ranks say so and end: saved after the same step, where the run is saved."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.health.launcher import Launcher, launcher
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.runtime.run.test_train_loop import DATA, final, out, same, wanted, whole_run, workers  # noqa: F401
from tests.warm import TORCHRUN, torchrun

ENDED_S = 20.0
WRAPPED = ["--no-python", "sh", "-c", '"$0" "$@"; true', sys.executable]


def start(arguments: list[str], ranks: int = 2, wrapped: bool = False) -> subprocess.Popen[str]:
    """torchrun itself, whose ranks are a family of processes. wrapped: with a shell between."""
    return subprocess.Popen(
        [sys.executable, *TORCHRUN, f"--nproc-per-node={ranks}", *(WRAPPED if wrapped else []), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def killed_at(process: subprocess.Popen[str], step: int, wait_s: float = 0.0) -> str:
    """The output of the ranks of a torchrun that is killed after this step, until the last of them has ended."""
    lines, ranks = [], workers(process.pid)
    for line in process.stdout or ():
        lines.append(line)
        if line.startswith(f"step {step} "):
            ranks = workers(process.pid)
            time.sleep(wait_s)
            process.kill()
            break
    try:
        rest, _ = process.communicate(timeout=ENDED_S)  # ranks have the other end of the pipe
    finally:
        for pid in ranks:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
    return "".join(lines) + rest


def command(out: Path, *more: object) -> list[str]:  # noqa: F811
    return [str(out / "run.py"), "--steps", "24", "--data", f"{out / 'data.py'}:slow", *map(str, more)]


@pytest.mark.timeout(100)
def test_ranks_whose_torchrun_is_killed_save_after_the_same_step_and_lose_nothing(out, wanted, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    own = ["--run-dir", run, "--save-every", 4, "--timeout", 60]
    said = killed_at(start(command(out, *own)), 6)
    assert (
        len(re.findall(r"error on rank \d: torchrun \(process \d+\), which started it, is gone; all ranks save", said))
        == 2
    )
    (last, *_) = RunDirectory(run).steps()
    assert 7 <= last <= 9, said
    assert f"stopped as torchrun, or the job's store, is gone after step {last}" in said
    assert "Traceback" not in said
    assert not [line for line in said.splitlines() if "DistNetworkError" in line and not line.startswith("frame #")]
    done = torchrun(2, *command(out, *own))
    assert done.returncode == 0
    assert f"steps {last + 1} to 24" in done.stdout
    assert not (run / "failures.jsonl").exists()
    assert same(run, wanted)


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("wrapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_whose_torchrun_is_killed_and_that_save_nothing_end(out, wrapped):  # noqa: F811
    said = killed_at(start(command(out, "--steps", 4000), wrapped=wrapped), 6)
    assert len(re.findall(r"error on rank \d: torchrun .*, is gone; it ends, and nothing is saved", said)) == 2
    assert said.count("error") == 2, said
    assert "step 200 " not in said


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(10))
def test_a_torchrun_killed_at_a_random_moment_loses_no_step(out, wanted, tmp_path, seed):  # noqa: F811
    draw, run = random.Random(seed), tmp_path / "run"
    own = ["--run-dir", run, "--save-every", 4, "--timeout", 60]
    step = draw.randrange(1, 20)
    said = killed_at(start(command(out, *own)), step, draw.uniform(0.0, 0.1))
    (last, *_) = RunDirectory(run).steps()
    assert step < last <= step + 6, said
    assert torchrun(2, *command(out, *own)).returncode == 0
    assert same(run, wanted)


def test_a_process_that_torchrun_did_not_start_has_none(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    launcher.cache_clear()
    assert launcher() is None


def test_a_parent_that_ends_is_gone_and_one_that_is_stopped_is_not():
    """A process that is not the parent too is watched for its end: a shell may stand between."""
    process = subprocess.Popen(["sleep", "100"])
    one = Launcher(process.pid)
    try:
        process.send_signal(signal.SIGSTOP)
        assert not one.gone
        process.kill()
        end = time.monotonic() + 60
        while not one.gone and time.monotonic() < end:
            time.sleep(0.01)
        assert one.gone  # although nobody has asked for its status
    finally:
        process.kill()
        process.wait()
