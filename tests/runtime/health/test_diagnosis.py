"""Who keeps a run that hangs is named, from made-up beats of thirteen faults. Real processes: test_faults.py."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from autopar.runtime.health.diagnosis import Beat, diagnose, standstill_s
from autopar.runtime.health.flight import KEPT, Flight
from autopar.runtime.health.message_order import Row, stable_hash
from autopar.runtime.health.watch import Watch

ALL = (0, 1, 2, 3)
FROM_1 = "messages 1 to 0"
REDUCE, GATHER = "all_reduce[sum] of float32[8] at loss", "all_gather of float32[4] at w"


def waiting(
    rank: int, place: int = 5, what: str = REDUCE, group: str = "dp", members=ALL, step: int = 7, **more
) -> Beat:
    started = more.pop("started", {group: place})
    last = (Row(group, step, place, stable_hash(what), what),) if members == ALL else ()
    return Beat(
        rank,
        40,
        step,
        "B0.0",
        what,
        50.0 + rank,
        group,
        place,
        members,
        started,
        "train.py:9 (main)",
        turn=step,
        last=last,
        **more,
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
            "does not arrive: look at the network of ranks 0, 1, 2, 3",
        ),
        (
            [waiting(0), waiting(1, what=GATHER), waiting(2), waiting(3)],
            (),
            (1,),
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
            "does not arrive: look at the network of ranks 1, 2",
        ),
        (
            [
                pair(0, 1, 0, 3, started={"messages 1 to 0": 3}),
                pair(1, 0, 1, 3, started={"messages 1 to 0": 3, "messages 0 to 1": 3}),
            ],
            (),
            (0,),
            "does not arrive: look at the network of ranks 0, 1",
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
        flight.end(flight.start(n, "dp", ALL, ("all_reduce", 8), lambda: REDUCE))
    entry = flight.start(500, "dp", ALL, ("all_gather", 4), lambda: GATHER)
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


class SlowStore:
    """A store of one process, whose answers take a while."""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def clone(self):
        return self

    def check(self, keys):
        time.sleep(0.2)
        return self.store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_nothing_asks_the_store_once_a_run_is_over(tmp_path):
    flight = Flight(0, 1)
    watch = Watch(flight, tmp_path, 60.0, 60.0, pytest.fail)
    watch.start(SlowStore())
    watch.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "autopar beat"]


def test_excuses_nest_and_what_they_took_counts_as_a_standstill():
    flight = Flight(1, 2)
    now = [100.0]
    with mock.patch("autopar.runtime.health.flight.time.monotonic", side_effect=lambda: now[0]):
        with flight.excused("saving step 4"):
            now[0] += 5
            with flight.excused("checking step 4"):
                assert flight.beat().excuse == "checking step 4"
                now[0] += 3
            assert (flight.beat().excuse, flight.beat().excused_s) == ("saving step 4", 8.0)
        beat = flight.beat()
    assert (beat.excuse, beat.excused_s) == ("", 0.0)
    assert standstill_s(0, [None, beat], 60.0) == 8.0
