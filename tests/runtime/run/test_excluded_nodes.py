"""A machine whose ranks end a run again and again is left out of it, and so is a slow one where that is asked for."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.errors import RankError
from autopar.runtime.health.flight import Flight
from autopar.runtime.run import excluded_nodes
from autopar.runtime.run.excluded_nodes import (
    FAILED,
    SLOW,
    WITHIN_S,
    Failure,
    SlowMachines,
    begin_start,
    failures,
    leave_out,
    note,
    too_few,
    unwanted,
)
from autopar.runtime.run.spares import AGAIN
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.runtime.run.test_train_loop import final

MACHINES = ("a", "a", "b", "b")


def end(root: Path, *ranks: int, **errors: Exception) -> None:
    """Leave the files of these ranks of four: waiting for the others, or with an error."""
    for rank in ranks:
        flight = Flight(rank, 4)
        flight.machines, flight.step = MACHINES, 4
        entry = flight.start(0, "dp (0, 1, 2, 3)", (0, 1, 2, 3), ("all_reduce",), "all_reduce at loss".__str__)
        error = errors.get(f"rank_{rank}")
        if error is None:
            flight.wait(entry)
        flight.write(root / "flight", flight.beat() if error is None else flight.failed(error))


@pytest.mark.parametrize(
    ("ranks", "errors", "machines"),
    [
        ((0, 1, 3), {}, ["b"]),
        ((0, 1), {}, ["b"]),
        ((0, 3), {}, []),  # ranks of both left nothing
        ((0, 1, 2, 3), {"rank_1": ValueError("no memory")}, ["a"]),
        ((0, 1, 2, 3), {"rank_1": RankError("other values", [3]), "rank_0": RankError("other values", [3])}, ["b"]),
        ((0, 1, 2, 3), {f"rank_{rank}": ValueError("a loss is nan") for rank in range(4)}, []),
        ((), {}, []),
    ],
)
def test_what_the_ranks_of_one_machine_ended_is_its_failure(tmp_path, ranks, errors, machines):
    end(tmp_path, *ranks, **errors)
    begin_start(tmp_path)
    begin_start(tmp_path)
    assert [one.machine for one in failures(tmp_path)] == machines
    assert not (tmp_path / "flight").exists()


def failed(*machines: str, at: float = 1000.0, kind: str = FAILED) -> list[Failure]:
    return [Failure(at, machine, kind, f"{machine} went") for machine in machines]


def test_a_machine_is_unwanted_after_so_many_failures_in_a_day():
    found = failed("a", "b", "a", "c", "a")
    assert list(unwanted(found, 3, False, 2000.0)) == ["a"]
    assert unwanted(found, 3, False, 2000.0)["a"] == "ended this run 3 times in 24 hours, last so: a went"
    assert unwanted(found, 4, False, 2000.0) == {}
    assert unwanted(found, 0, False, 2000.0) == {}
    assert unwanted([*failed("a", at=-90000.0), *failed("a", "a")], 3, False, 2000.0) == {}
    assert list(unwanted(failed("b", kind=SLOW), 3, True, 2000.0)) == ["b"]
    assert unwanted(failed("b", kind=SLOW), 1, False, 2000.0) == {}


@pytest.mark.parametrize(
    ("tellings", "excluded"),
    [
        ("s f s f s", []),
        ("s s", ["bad"]),
        ("s f s s", ["bad"]),
        ("s o s o s", []),  # in between another one was
        ("f f f f", []),
        ("s s s s s s", ["bad"]),  # once is enough
    ],
)
def test_only_a_machine_that_is_slow_so_often_in_a_row_leaves(tellings, excluded, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert watched(tmp_path, tellings) == [AGAIN] * len(excluded)
    assert [(one.machine, one.kind) for one in failures(tmp_path)] == [(machine, SLOW) for machine in excluded]


@pytest.mark.parametrize("ago_s", [2 * WITHIN_S, -2 * WITHIN_S])
def test_a_machine_that_was_slow_long_ago_or_by_a_wrong_clock_leaves_again(ago_s, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    note(tmp_path, Failure(time.time() - ago_s, "bad", SLOW, "was slow"))
    assert watched(tmp_path, "s s") == [AGAIN]
    assert list(unwanted(failures(tmp_path), 0, True, time.time())) == ["bad"]


def watched(root: Path, tellings: str) -> list[str]:
    """Why a run of four ranks asks to end, as who is slow is found so often."""
    asked: list[str] = []
    comm = types.SimpleNamespace(world_size=4, rank=0, excused=lambda why: contextlib.nullcontext())
    stop = types.SimpleNamespace(ask=lambda step, why: asked.append(why))
    machines = SlowMachines(root, 2, ["good", "good", "bad", "other"], 2, comm, stop)
    for step, telling in enumerate(tellings.split()):
        machines.count(step, {"s": {"bad"}, "f": set(), "o": {"other"}}[telling], "slow: rank 2")
    return asked


def test_a_machine_is_only_left_out_where_a_program_is_left():
    assert too_few(MACHINES, ["a"], 2) == ""
    assert too_few(MACHINES, ["a"], 3).startswith("2 ranks would be left, and the smallest program is for 3")


def test_a_damaged_line_is_named_and_not_counted(tmp_path, capfd):
    note(tmp_path, failed("a")[0])
    with (tmp_path / "failures.jsonl").open("a") as file:
        file.write('{"at": 3, "machine": "b"\n{"at": 3, "machine": "b", "kind": "gone", "why": ""}\n')
    note(tmp_path, failed("c")[0])
    assert [one.machine for one in failures(tmp_path)] == ["a", "c"]
    assert capfd.readouterr().err.count("is damaged") == 2


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\x00", b"[" * 100000, b"9" * 5000, b'{"at": NaN}', b"\xe2\x80\xa8", b"null"]
)
def test_bytes_that_are_no_line_of_a_failure_are_named_and_stop_no_start(tmp_path, capfd, line):
    note(tmp_path, failed("a")[0])
    with (tmp_path / "failures.jsonl").open("ab") as file:
        file.write(line)  # and no end of the line
    note(tmp_path, failed("c")[0])
    assert [one.machine for one in failures(tmp_path)] == ["a", "c"]
    assert capfd.readouterr().err.startswith(f"{tmp_path / 'failures.jsonl'}:2 is damaged (")


def test_a_ledger_that_cannot_be_read_is_named_and_stops_no_start(tmp_path, capfd):
    (tmp_path / "failures.jsonl").mkdir()
    assert failures(tmp_path) == []
    assert "no failure of a machine is counted" in capfd.readouterr().err


def test_a_machines_name_is_one_word(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert excluded_nodes.machine_name() == "node7"
    monkeypatch.setenv("AUTOPAR_MACHINE", "x; rm -rf,\ny")
    assert excluded_nodes.machine_name() == "x__rm_-rf__y"


@pytest.mark.parametrize(("least", "leaves"), [(2, True), (3, False)])
def test_all_ranks_of_a_start_agree_on_who_leaves(tmp_path, monkeypatch, least, leaves):
    """Four ranks on two machines; the ranks of a start are threads here."""
    for failure in failed("b", "b", at=time.time()):
        note(tmp_path, failure)
    rank, gone, answers = threading.local(), [], [None] * 4
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(excluded_nodes, "machine_name", lambda: MACHINES[rank.own])
    monkeypatch.setattr(excluded_nodes, "_end_torchrun", lambda: gone.append(rank.own))
    store = dist.HashStore()
    arguments = argparse.Namespace(run=str(tmp_path), exclude_after=2, exclude_slow=0)

    def start(own: int) -> None:
        rank.own = own
        answers[own] = leave_out(store, own, arguments, least)

    threads = [threading.Thread(target=start, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == [leaves] * 4
    assert sorted(gone) == ([2, 3] if leaves else [])
    assert (tmp_path / "excluded").read_text() == "b\n"


# ---- real torchruns

DATA = """import os, signal, time
from programs import stages

def batches(harm):
    for n, batch in enumerate(stages.batches(400)):
        if os.environ["AUTOPAR_MACHINE"] == "bad":
            harm(n)
        yield batch

def dying():
    return batches(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n % 7 == 6 else time.sleep(0.01))

def killed():
    "The rank, and the torchrun of its machine."
    return batches(lambda n: [os.kill(pid, signal.SIGKILL) for pid in (os.getppid(), os.getpid())] if n == 6 else None)

def unlaunched():
    "The torchrun of its machine is killed, and the rank is not."
    return paced(lambda n: os.kill(os.getppid(), signal.SIGKILL) if n == 6 else None)

def paced(harm):
    for batch in batches(harm):
        time.sleep(0.2)
        yield batch

def slow():
    return batches(lambda n: time.sleep(0.05))
"""


def torchruns(out: Path, folder: Path, port: int, *arguments: str) -> tuple[dict[str, int], dict[str, str]]:
    """Statuses and words of three machines, of which the second is bad and the third's rank is a spare."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=9"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={folder.name}"]
    launcher += ["--rdzv-conf=last_call_timeout=5", "--monitor-interval=0.1", str(out / "run.py")]
    own = ["--run-dir", str(folder / "run"), "--timeout", "100", "--save-every", "4", *arguments]
    started: dict[str, subprocess.Popen[bytes]] = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    try:
        for name in ("good", "bad", "spare"):  # ranks are given by the launchers' process ids
            with (folder / f"{name}.log").open("w") as log:
                started[name] = subprocess.Popen(
                    [*launcher, *own], stdout=log, stderr=log, env=environment | {"AUTOPAR_MACHINE": name}
                )
            _wait_for(port)  # the first one has the store, which ends with it
        codes = {name: process.wait(240) for name, process in started.items()}
    finally:
        for process in started.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
    return codes, {name: (folder / f"{name}.log").read_text() for name in started}


def _wait_for(port: int) -> None:
    """Wait until somebody listens at a port, and so much longer that who starts now is not the first in anything."""
    for _ in range(600):
        time.sleep(0.2)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return


@pytest.fixture
def program(emitted: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A program for two ranks, in the order that torchrun gives them."""
    out = tmp_path / "out"
    shutil.copytree(emitted, out, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    (out / "data.py").write_text(DATA)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"placement": None}))
    return out


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_machine_that_fails_twice_leaves_and_a_spare_takes_its_place(program, tmp_path):
    """The run computes what one computes that nobody left."""
    data = ["--data", f"{program / 'data.py'}:dying", "--steps", "24"]
    codes, said = torchruns(program, tmp_path, 29900 + os.getpid() % 90, *data, "--exclude-after", "2")
    assert codes["good"] == codes["spare"] == 0, said
    assert codes["bad"] != 0
    assert [one.machine for one in failures(tmp_path / "run")] == ["bad", "bad"]
    everything = "".join(said.values())
    assert "machine bad ended this run 2 times in 24 hours, last so: rank 1 left nothing" in everything
    assert "; it is left out" in everything
    assert same_as_alone(program, tmp_path, data)


def same_as_alone(program: Path, folder: Path, data: list[str]) -> bool:
    """Whether a run that nobody left or joined ends with the same numbers, to the last bit."""
    alone = ["--standalone", "--nproc-per-node=2", str(program / "run.py"), "--run-dir", str(folder / "alone")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *alone, *data],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "AUTOPAR_MACHINE": "good"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted, have = final(folder / "alone"), final(folder / "run")
    return have.keys() == wanted.keys() and all(torch.equal(have[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_machine_that_is_killed_is_replaced_by_a_spare_and_changes_nothing(program, tmp_path):
    data = ["--data", f"{program / 'data.py'}:killed", "--steps", "24"]
    codes, said = torchruns(program, tmp_path, 29700 + os.getpid() % 90, *data)
    assert codes == {"good": 0, "bad": -signal.SIGKILL, "spare": 0}, said
    assert "rank 2 is a spare" in said["spare"]
    assert [one.machine for one in failures(tmp_path / "run")] == ["bad"]
    assert same_as_alone(program, tmp_path, data)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_machine_whose_torchrun_alone_is_killed_saves_with_the_others_and_is_replaced(program, tmp_path):
    """The machine has not failed: no step is lost."""
    data = ["--data", f"{program / 'data.py'}:unlaunched", "--steps", "24"]
    codes, said = torchruns(program, tmp_path, 29600 + os.getpid() % 90, *data)
    assert codes == {"good": 0, "bad": -signal.SIGKILL, "spare": 0}, said
    assert "which started it, is gone; all ranks save after the same step and end" in said["bad"]
    assert "stopped as torchrun, or the job's store, is gone after step" in said["good"]
    assert failures(tmp_path / "run") == []
    assert same_as_alone(program, tmp_path, [*data[:1], f"{program / 'data.py'}:slow", *data[2:]])


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_slow_machine_leaves_where_that_is_asked_for_and_no_step_is_lost(program, tmp_path):
    steps = ["--data", f"{program / 'data.py'}:slow", "--steps", "300", "--exclude-slow", "2"]
    codes, said = torchruns(program, tmp_path, 29800 + os.getpid() % 90, *steps)
    assert codes["good"] == codes["spare"] == 0, said
    everything = "".join(said.values())
    assert "machine bad was slow 2 times in a row, last at step 101: slow: rank 1 (bad)" in everything
    assert "stopped to leave out a machine after step 103" in everything
    assert "steps 104 to 300" in everything
    assert RunDirectory(tmp_path / "run").read(300).position == 300


def test_a_failure_that_a_wrong_clock_wrote_years_ahead_is_not_counted_for_ever():
    now = 1e9
    ahead = [Failure(now + 365 * 86400, "a", FAILED, "it ended"), Failure(now + 60, "a", FAILED, "it ended")]
    assert unwanted(ahead, 1, False, now) != {}
    assert unwanted(ahead, 2, False, now) == {}
