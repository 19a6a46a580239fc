"""Who keeps a run that hangs is named: from made-up beats of twelve faults, and in real processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.runtime.diagnosis import Beat, diagnose
from autopar.runtime.flight import KEPT, Flight

from .test_launch import emitted  # noqa: F401
from .test_process import torchrun
from .test_staying import RunDirectory, command, out, start, workers  # noqa: F401

ALL = (0, 1, 2, 3)
FROM_1 = "messages 1 to 0"
REDUCE, GATHER = "all_reduce[sum] of float32[8] at loss", "all_gather of float32[4] at w"


def waiting(
    rank: int, place: int = 5, what: str = REDUCE, group: str = "dp", members=ALL, step: int = 7, **more
) -> Beat:
    started = more.pop("started", {group: place})
    return Beat(
        rank, 40, step, "B0.0", what, 50.0 + rank, group, place, what, members, started, "train.py:9 (main)", **more
    )


def running(rank: int, step: int = 7, line: str = "data.py:12 (load)", **more) -> Beat:
    return Beat(rank, 40, step, "F1.0", started={"dp": 4}, line=line, **more)


def pair(rank: int, source: int, target: int, place: int, **more) -> Beat:
    way = f"messages {source} to {target}"
    return waiting(rank, place, f"recv from rank {source}, tag 3", way, (source, target), **more)


def asked(*beats: Beat | None, silent: tuple[int, ...] = ()):
    """The diagnosis where all beat but the silent ones."""
    first = [b and replace(b, number=b.number - (b.rank not in silent)) for b in beats]
    return diagnose(first, beats)


@pytest.mark.parametrize(
    ("beats", "silent", "culprits", "said"),
    [
        ([waiting(0), running(1), waiting(2), waiting(3)], (), (1,), "data.py:12 (load)"),
        ([waiting(0), waiting(1), waiting(2), running(3, 6)], (), (3,), "step 6, action F1.0"),
        ([running(0, 8), waiting(1), running(2, 7), waiting(3)], (), (2,), "rank 2 is not waiting"),
        ([waiting(0), waiting(1), running(2), waiting(3)], (2,), (2,), "no longer runs"),
        ([waiting(0), waiting(1), waiting(2), waiting(3)], (0,), (0,), "rank 0 no longer runs"),
        ([waiting(0), None, waiting(2), waiting(3)], (), (1,), "said nothing yet"),
        (
            [waiting(0), waiting(1, 4, started={"dp": 4}), waiting(2), waiting(3)],
            (),
            (1,),
            "has not come to all_reduce",
        ),
        (
            [waiting(0), waiting(1, what=GATHER), waiting(2), waiting(3)],
            (),
            (0, 1),
            "rank 1 calls all_gather of float32[4] at w",
        ),
        (
            [waiting(0), waiting(1), waiting(2, 9, GATHER, "tp", (2, 3), started={"tp": 9, "dp": 4}), waiting(3)],
            (),
            (2,),
            "rank 2 has not come to all_reduce",
        ),
        ([waiting(0), waiting(1), waiting(2), waiting(3)], (), (), "look at the network"),
        (
            [
                pair(0, 1, 0, 3),
                waiting(1, 2, "send to rank 2, tag 1", "messages 1 to 2", (1, 2), started={"messages 1 to 2": 2}),
            ],
            (),
            (1,),
            "rank 1 has not come to recv from rank 1",
        ),
        (
            [
                pair(0, 1, 0, 3, started={"messages 1 to 0": 3}),
                pair(1, 0, 1, 3, started={"messages 1 to 0": 3, "messages 0 to 1": 3}),
            ],
            (),
            (0,),
            "rank 0 has not come to recv from rank 0",
        ),
        ([waiting(0), running(1), running(2), waiting(3)], (), (1, 2), "ranks 0, 3 wait, the longest rank 3 for 53 s"),
    ],
)
def test_the_culprit_of_a_staged_fault_is_named(beats, silent, culprits, said):
    found = asked(*beats, silent=silent)
    assert found.culprits == culprits, found.text
    assert said in found.text


def test_the_buffer_keeps_the_last_messages_and_what_they_were_for():
    flight = Flight(1, 4)
    for n in range(KEPT + 10):
        flight.begin_step(n)
        flight.end(flight.start(n, "dp", ALL, REDUCE, ("all_reduce", 8)))
    entry = flight.start(500, "dp", ALL, GATHER)
    flight.wait(entry)
    data = json.loads(json.dumps(flight.as_data(flight.beat())))
    assert len(data["recent"]) == KEPT
    assert data["recent"][-1]["what"] == GATHER
    assert data["recent"][-1]["ended"] is None
    beat = Beat.of(data["beat"])
    assert (beat.waits, beat.place, beat.started, beat.members) == (GATHER, 500, {"dp": 500}, ALL)
    assert "test_diagnosis.py" in beat.line


def test_a_rank_that_is_excused_is_not_blamed():
    flight = Flight(0, 1)
    with flight.excused("saving step 4"):
        assert flight.beat().excuse == "saving step 4"
    assert flight.beat().excuse == ""


HARM = """
def harmed(n):
    if n == 6 and os.environ["RANK"] == "1":
        while True:  # an endless loop
            pass

def looping():
    return batches(harmed)
"""


def hung(out: Path, run: Path, data: str) -> str:  # noqa: F811
    done = torchrun(2, *command(out, run, data, "--hang", "6", "--timeout", "60"), timeout=120)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.timeout(200)
def test_an_endless_loop_is_named_with_its_line(out, tmp_path):  # noqa: F811
    text = (out / "data.py").read_text()
    if "looping" not in text:
        (out / "data.py").write_text(text + HARM)
    said = hung(out, tmp_path / "run", "looping")
    line = (out / "data.py").read_text().splitlines().index("        while True:  # an endless loop") + 1
    assert (
        "this run hangs: rank 0 is not waiting for anybody; it is at step" in said
    )  # its rank in the program: see placement
    assert f"data.py:{line}" in said or f"data.py:{line + 1}" in said
    dumps = [json.loads((tmp_path / "run/flight" / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert dumps[1]["beat"]["waits"].startswith("all_gather") or dumps[1]["beat"]["waits"].startswith("reduce_scatter")


@pytest.mark.timeout(200)
def test_a_stopped_process_is_named(out, tmp_path):  # noqa: F811
    process = start(out, command(out, tmp_path / "run", "slow", "--hang", "6", "--timeout", "60"))
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        if line.startswith("step 5 "):
            break
    stopped = workers(process.pid)[0]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    timer = threading.Timer(90, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    for line in process.stdout or ():
        lines.append(line)
        if "this run hangs" in line:
            break
    timer.cancel()
    took_s = time.monotonic() - began
    os.kill(stopped, signal.SIGCONT)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert "no longer runs (stopped" in lines[-1], "".join(lines)
    assert took_s < 80
    assert RunDirectory(tmp_path / "run").steps()
