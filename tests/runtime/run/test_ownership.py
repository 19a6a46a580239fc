"""A directory of a run has one owner, whoever starts when, and whoever dies when."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from autopar.runtime.errors import CheckpointError
from autopar.runtime.run import ownership
from autopar.runtime.run.ownership import Owner, Ownership, own
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.runtime.run.test_train_loop import command, start
from tests.runtime.run.test_train_loop import out as out

TRIES = 10
REFUSED = 3
FORK = multiprocessing.get_context("fork")


def owned(root: Path, job: str = "a", stale_s: float = 0.6, said: list[str] | None = None) -> Ownership:
    return own(root, job, (said if said is not None else []).append, stale_s)


def write(root: Path, seed: int) -> None:
    """A start at a random offset, in a process of its own: writes for a while, and is released or just gone."""
    draw, said = random.Random(seed), root / "writers"

    def say(what: str) -> None:
        with said.open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    time.sleep(draw.uniform(0.0, 0.2))
    try:
        mine = own(root, f"job {seed}", print)
    except CheckpointError as error:
        os._exit(REFUSED if "in use by process" in str(error) else 1)
    say("begins")
    time.sleep(draw.uniform(0.0, 0.2))
    say("ends")
    if draw.random() < 0.5:
        mine.release()
    os._exit(0)


def elsewhere(root: Path, number: int = 1, **fields: object) -> Owner:
    """An owner on another machine wrote itself down."""
    other = dataclasses.replace(Owner.this_process("other"), host="far", space="elsewhere", pid=77, **fields)
    (root / "owner").mkdir(exist_ok=True, parents=True)
    (root / "owner" / f"{number:010}").write_text(json.dumps(dataclasses.asdict(other)))
    return other


def test_a_second_start_is_refused_by_name(tmp_path):
    first = owned(tmp_path)
    with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on \S+: two runs would spoil it"):
        owned(tmp_path, "b")
    first.release()
    owned(tmp_path, "b").release()


def test_the_same_job_goes_on_at_once_and_the_start_before_it_writes_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_S", 0.05)
    said: list[str] = []
    first = owned(tmp_path, said=said)
    second = owned(tmp_path)
    assert "taken over by process" in first.problem()
    assert second.problem() == ""
    first._thread.join(10)
    assert len(said) == 1
    first.release()
    assert second.problem() == ""
    second.release()


def test_a_beat_of_an_owner_on_another_machine_refuses(tmp_path):
    elsewhere(tmp_path)
    path = tmp_path / "owner" / f"{1:010}"
    beat = threading.Timer(0.3, os.utime, (path,))
    beat.start()
    with pytest.raises(CheckpointError, match="in use by process 77 on far"):
        owned(tmp_path, stale_s=30.0)
    beat.join()


@pytest.mark.parametrize("content", [None, "", "{", '{"host": 3}', "\0" * 100])
def test_an_owner_that_is_silent_is_taken_over_whatever_it_wrote(tmp_path, content):
    elsewhere(tmp_path)
    if content is not None:
        (tmp_path / "owner" / f"{1:010}").write_text(content)
    began = time.monotonic()
    owned(tmp_path, stale_s=0.3).release()
    assert time.monotonic() - began >= 0.3


def test_a_number_of_an_owner_long_gone_is_no_ownership(tmp_path):
    """Whoever was slow to make the file of a number that others have passed meanwhile is not the owner for that."""
    elsewhere(tmp_path, 7, ended=True)
    mine = owned(tmp_path)
    elsewhere(tmp_path, 2)
    assert mine.problem() == ""
    with pytest.raises(CheckpointError, match="in use"):
        owned(tmp_path, "b")
    mine.release()


def test_a_directory_that_somebody_deletes_stays_the_owners(tmp_path):
    first = owned(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert first.problem() == ""
    with pytest.raises(CheckpointError, match="in use by process"):
        owned(tmp_path / "run", "b")
    first.release()
    second = owned(tmp_path / "run", "b")
    assert first.problem()
    assert second.problem() == ""
    second.release()


def test_a_step_is_not_completed_by_who_is_no_longer_the_owner(tmp_path):
    from autopar.runtime.checkpoint.run_directory import RunDirectory, StepRecord

    directory, mine = RunDirectory(tmp_path), owned(tmp_path)
    directory.taken_over = mine.problem
    directory.prepare(0)
    found = StepRecord(4, 4, 0, 1, "", {})
    directory.partial(4).mkdir()
    directory.complete(found)
    other = owned(tmp_path)
    directory.partial(8).mkdir()
    with pytest.raises(OSError, match="taken over"):
        directory.complete(dataclasses.replace(found, step=8))
    assert directory.steps() == [4]
    other.release()


@pytest.mark.timeout(100)
def test_two_starts_at_random_offsets_never_both_write(tmp_path):
    pairs = {
        tmp_path / str(n): [FORK.Process(target=write, args=(tmp_path / str(n), 2 * n + k)) for k in (0, 1)]
        for n in range(TRIES)
    }
    for root, starts in pairs.items():
        root.mkdir()
        for process in starts:
            process.start()
        time.sleep(0.05)  # some pairs at a time
    for root, starts in pairs.items():
        for process in starts:
            process.join(60)
        lines = (root / "writers").read_text().split()
        writers = list(zip(lines[::2], lines[1::2], strict=True))
        assert [what for what, _ in writers] == ["begins", "ends"] * (len(writers) // 2)
        assert all(writers[i][1] == writers[i + 1][1] for i in range(0, len(writers), 2))
        assert len(writers) // 2 + sum(process.exitcode == REFUSED for process in starts) == 2


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_second_torchrun_is_refused_and_the_first_goes_on(out, tmp_path):
    run, draw = tmp_path / "run", random.Random(0)
    first = start(out, command(out, run, "slow_until_told", "--steps", "240"))
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    time.sleep(draw.uniform(0.0, 0.5))
    second = start(out, command(out, run, "slow"))
    said = second.communicate(timeout=100)[0]
    assert second.returncode == 1
    assert "is in use by process" in said, said
    assert "step 1 " not in said
    (out / "told").touch()
    said = first.communicate(timeout=100)[0]
    assert first.returncode == 0, said
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 241))


@pytest.mark.timeout(200)
def test_a_run_whose_every_process_was_killed_is_taken_over_at_once(out, tmp_path):
    run = tmp_path / "run"
    first = start(out, command(out, run, "slow"))
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    for path in (run / "owner").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
    second = start(out, command(out, run))
    said = second.communicate(timeout=100)[0]
    assert second.returncode == 0, said
    assert "gives no sign of life" not in said
