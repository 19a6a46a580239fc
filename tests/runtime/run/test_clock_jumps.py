"""Clocks that somebody sets, back or forth, by seconds or by years, change nothing of what a run does.

What waits counts seconds of clocks that nobody can set; owners are told by whether their beat changes, whatever it says. Only
ages of failures are told by the clock of the machine (test_excluded_nodes.py).
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from autopar.runtime.errors import CheckpointError
from autopar.runtime.run import ownership
from autopar.runtime.run.excluded_nodes import FAILED, Failure, note
from tests.runtime.checkpoint.test_disk import ARGUMENTS, STEPS, went_on
from tests.runtime.checkpoint.test_disk import wanted as wanted
from tests.runtime.run.test_faults import DATA, out, staged  # noqa: F401
from tests.runtime.run.test_ownership import elsewhere, owned

YEAR_S = 365 * 86400.0
HARM = """
import random

def clocks():
    "Every look at the clock, and every time of a file, is another one within twenty years."
    pick, real_s, touch = random.Random(RANK), time.time, os.utime
    def now_s():
        return real_s() + pick.choice((0.0, 3.0, -3.0, 1e5, -1e5, 3e8, -3e8))
    def set_times(path, times=None, **more):
        return touch(path, times or ((now_s(),) * 2 if not more else None), **more)
    time.time, os.utime = now_s, set_times
    runtime("run.ownership").BEAT_S = 0.1
    return batches(lambda n, b: time.sleep(0.1))
"""


@pytest.fixture(scope="module", autouse=True)
def harmful(out: Path) -> None:  # noqa: F811
    (out / "data.py").write_text(DATA + HARM)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_whose_clocks_are_set_again_and_again_computes_and_saves_the_same(staged, wanted, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    for years in (-30, 30):
        note(run, Failure(time.time() + years * YEAR_S, "elsewhere", FAILED, "ended"))
    done = staged("clocks", *ARGUMENTS, "--hang", 5, "--exclude-after", 1)
    went_on(done, wanted, [14, 12, 10, 8, 6, 4, 2])
    assert "hang" not in done.said
    assert "gave no sign of life" not in done.said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(0 < line["seconds"] < 60 and 0 <= line["waited_s"] < 60 for line in lines)
    ahead = [one["at"] - other["at"] for one, other in zip(lines[1:], lines[:-1], strict=True)]
    assert min(ahead) < -1 < 60 < max(ahead)  # the clocks were set


@pytest.mark.parametrize("beat_s", [0.0, 1.0, 2e9, 4e9])
def test_an_owner_whose_clock_is_set_is_no_dead_one(tmp_path, beat_s):
    """Its beat is whenever its machine says."""
    elsewhere(tmp_path)
    beat = threading.Timer(0.2, os.utime, (tmp_path / "owner" / f"{1:010}", (beat_s, beat_s)))
    beat.start()
    with pytest.raises(CheckpointError, match="in use by process 77 on far"):
        owned(tmp_path, stale_s=30.0)
    beat.join()


@pytest.mark.parametrize("beat_s", [0.0, 4e9])
def test_a_dead_owner_is_waited_for_in_own_seconds_whatever_its_last_beat_says(tmp_path, beat_s, monkeypatch):
    elsewhere(tmp_path)
    os.utime(tmp_path / "owner" / f"{1:010}", (beat_s, beat_s))
    jumping = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: next(jumping) * YEAR_S)
    began_s = time.monotonic()
    owned(tmp_path).release()
    assert time.monotonic() - began_s >= 0.6


def test_an_owner_whose_clock_is_set_back_stays_the_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_S", 0.02)
    said: list[str] = []
    mine = owned(tmp_path, said=said)
    (path,) = (tmp_path / "owner").iterdir()
    for beat_s in (0.0, 4e9, 1e9):
        os.utime(path, (beat_s, beat_s))
        deadline_s = time.monotonic() + 60
        while path.stat().st_mtime == beat_s:
            assert time.monotonic() < deadline_s
        assert mine.problem() == ""
    mine.release()
    assert said == []
