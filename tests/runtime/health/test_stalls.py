"""Ranks that are stopped, or sleep, in real processes: a stall that is over ends no run and is nobody's failure, one that lasts
is named. Made-up ranks and their time: test_watch.py."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from autopar.runtime.run.excluded_nodes import begin_start, failures
from tests.runtime.run.test_faults import out  # noqa: F401
from tests.runtime.staged import run as run_ranks

RANKS = 4
STALLS = """import os, signal, subprocess, time
from programs import stages

RANK = int(os.environ["RANK"])

def stop(seconds):
    "All of this process, for so long."
    if not seconds:
        return os.kill(os.getpid(), signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)

def batches():
    for n, batch in enumerate(stages.batches(200)):
        for how, rank, seconds in STALLS.get(n, ()):
            if rank == RANK:
                print(f"{time.time():.2f} rank {rank} {how} for {seconds}", flush=True)
                {"stopped": stop, "asleep": time.sleep}[how](seconds)
        yield batch
"""


def staged(out: Path, folder: Path, hang_s: float, stalls: dict[int, list[tuple[str, int, float]]]):  # noqa: F811
    """Statuses and words of ranks that stall before these batches: how, which rank, for how many seconds (0: for ever)."""
    folder.mkdir(exist_ok=True)
    data, run = folder / "data.py", folder / "run"
    data.write_text(STALLS + f"\nSTALLS = {stalls}\n")
    own = ["--run-dir", run, "--steps", 40, "--timeout", 300, "--data", f"{data}:batches"]
    return run_ranks(out, [*own, *([] if hang_s == 60 else ["--hang", hang_s])], RANKS, folder / "log")


def booked(run: Path) -> list[str]:
    """Machines to which the next start counts a failure."""
    begin_start(run)
    return [one.machine for one in failures(run)]


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_stalls_that_are_over_end_no_run_and_are_nobodys_failure(out, tmp_path):  # noqa: F811
    stalls = {5: [("stopped", 0, 1.9)], 9: [("stopped", 3, 1.9)], 20: [("asleep", 1, 1.9)]}
    codes, said = staged(out, tmp_path, 4.0, stalls)
    assert codes == [0] * RANKS, said
    assert "hang" not in said
    assert booked(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hang_s", [4.0, 8.0, 60.0])
def test_stalls_of_half_to_nearly_the_limit_end_no_run(out, tmp_path, hang_s, rank):  # noqa: F811
    shares = [0.5, 0.7, 0.9, 0.95, 0.98]
    stalls = {
        3 + 4 * n: [(how, rank, share * hang_s)]
        for n, (how, share) in enumerate(itertools.product(["stopped"], shares))
    }
    stalls[30] = [("asleep", rank, 0.98 * hang_s)]
    codes, said = staged(out, tmp_path, hang_s, stalls)
    assert codes == [0] * RANKS, said
    assert booked(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hang_s", [4.0, 8.0, 60.0])
@pytest.mark.parametrize("how", ["stopped", "asleep"])
def test_a_stall_beyond_the_limit_is_named_within_five_seconds_of_it(out, tmp_path, hang_s, rank, how):  # noqa: F811
    codes, said = staged(out, tmp_path, hang_s, {7: [(how, rank, 0 if how == "stopped" else 1000)]})
    assert any(codes)
    assert f"this run hangs: rank {rank} {'no longer runs' if how == 'stopped' else 'is not waiting'}" in said
    (began,) = re.findall(rf"([\d.]+) rank {rank} {how}", said)
    named_s = max(path.stat().st_mtime for path in (tmp_path / "run" / "flight").glob("rank_*.json")) - float(began)
    print(f"--hang {hang_s:g}: rank {rank} {how}, named after {named_s:.1f} s")
    assert hang_s < named_s < hang_s + 5.0
    assert len(booked(tmp_path / "run")) == 1
