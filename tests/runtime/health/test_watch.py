"""A stall that is over ends no run, one that lasts longer than the limit is named. Ranks, their time and their store are made
up here; real processes are stopped in test_stalls.py."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from autopar.runtime.health import flight as flight_module
from autopar.runtime.health.diagnosis import Beat, standstill_s
from autopar.runtime.health.flight import Flight
from autopar.runtime.health.observed_time import TICK_S, SeenTime
from autopar.runtime.health.watch import Watch

NAMED_S = 5.0
"""Seconds after the limit within which the cause is named, at most."""
STEP_S = 0.3
FIRST_STEP_S = 20.0
NOW_S = [0.0]


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks that ranks note times with: one is that of the made-up run, and somebody sets the other back and forth."""
    wall_s = random.Random(0)
    made = SimpleNamespace(monotonic=lambda: NOW_S[0], time=lambda: wall_s.uniform(1e8, 2e9))
    monkeypatch.setattr(flight_module, "time", made)
    NOW_S[0] = 0.0


@dataclass
class Stall:
    """A rank does not go on from at_s for some seconds. stopped: nor does anything else of its process."""

    rank: int
    at_s: float
    seconds: float
    stopped: bool = True

    def covers(self, rank: int, now_s: float) -> bool:
        return rank == self.rank and self.at_s <= now_s < self.at_s + self.seconds


@dataclass
class Made:
    """A run of made-up ranks that all wait for each other in every step. lateness_s: by which a busy machine delays a thread, at
    most; ended: when, and with which text."""

    folder: Path
    limit_s: float
    ranks: int = 2
    lateness_s: float = 0.0
    seed: int = 0
    now_s: float = 0.0
    ended: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store: Any = dist.HashStore()
        self.draw = random.Random(self.seed)
        self.flights = [Flight(rank, self.ranks) for rank in range(self.ranks)]
        for flight in self.flights:
            flight.seen = SeenTime(lambda: self.now_s)
        self.watches = [
            Watch(flight, self.folder, self.limit_s, 600.0, lambda text: self.ended.append((self.now_s, text)))
            for flight in self.flights
        ]
        self.ticks = [0.0] * self.ranks
        self.turns = [0.0] * self.ranks
        self.busy_until = [0.0] * self.ranks
        self.entries: list[Any] = [None] * self.ranks

    def run(self, stalls: list[Stall], until_s: float) -> Made:
        while self.now_s < until_s and not self.ended:
            self.now_s += TICK_S / 2
            NOW_S[0] = self.now_s
            for rank in range(self.ranks):
                covering = [stall for stall in stalls if stall.covers(rank, self.now_s)]
                if not any(stall.stopped for stall in covering):
                    if not covering:
                        self.train(rank)
                    self.beat(rank)
        return self

    def train(self, rank: int) -> None:
        flight, entry = self.flights[rank], self.entries[rank]
        if entry is not None and all(other.step >= flight.step for other in self.flights):
            flight.end(entry)
            flight.end_step()
            self.entries[rank] = None
            self.busy_until[rank] = self.now_s + (FIRST_STEP_S if flight.step == 1 else STEP_S)
        elif entry is None and self.now_s >= self.busy_until[rank]:
            flight.begin_step(flight.step + 1)
            group = tuple(range(self.ranks))
            self.entries[rank] = flight.start(flight.step, "dp", group, ("all_reduce",), "all_reduce at loss".__str__)
            flight.wait(self.entries[rank])

    def beat(self, rank: int) -> None:
        late_s = self.draw.uniform(0, self.lateness_s)
        if self.now_s >= self.ticks[rank]:
            self.watches[rank].tick()
            self.ticks[rank] = self.now_s + TICK_S + late_s
        if self.now_s >= self.turns[rank]:
            pause_s = self.watches[rank].turn(self.store)
            self.turns[rank] = self.now_s + (pause_s or 0.0) + late_s


@pytest.mark.few(6)
@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("limit_s", [4.0, 8.0, 60.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_stalls_below_the_limit_end_no_run_one_after_another(tmp_path, limit_s, rank, stopped):
    draw, stalls, at_s = random.Random(rank), [], 24.0
    for _ in range(10):
        stalls.append(Stall(rank, at_s, draw.uniform(0.5, 0.98) * limit_s, stopped))
        at_s += stalls[-1].seconds + draw.uniform(0.1, 2.0)
    made = Made(tmp_path, limit_s, lateness_s=0.3, seed=rank).run(stalls, at_s + 5.0)
    assert made.ended == []
    assert made.flights[0].step > 10
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("limit_s", [4.0, 8.0, 60.0])
def test_a_stall_that_lasts_is_named_within_seconds_of_the_limit(tmp_path, limit_s, stopped):
    for seed in range(5):
        rank = seed % 2
        made = Made(tmp_path, limit_s, lateness_s=0.3, seed=seed).run([Stall(rank, 24.3, 1e9, stopped)], 200.0)
        at_s, text = made.ended[0]
        assert limit_s < at_s - 24.3 < limit_s + NAMED_S
        assert text.startswith(f"this run hangs: rank {rank} {'no longer runs' if stopped else 'is not waiting'}")


@pytest.mark.parametrize("share", [1.05, 1.5])
def test_a_stall_beyond_the_limit_is_named_although_others_came_before_it(tmp_path, share):
    """Neither the first step nor a stall that is over makes the limit longer."""
    stalls = [Stall(0, 24.0, 50.0), Stall(1, 75.0, 50.0, stopped=False), Stall(0, 126.0, share * 60.0 + 2.5)]
    at_s, text = Made(tmp_path, 60.0).run(stalls, 400.0).ended[0]
    assert 60.0 < at_s - 126.0 < 60.0 + NAMED_S
    assert "rank 0 no longer runs" in text


def test_stalls_of_several_ranks_one_after_another_are_not_added_up(tmp_path):
    """Rank 2 waits for the same message all the time."""
    stalls = [Stall(0, 24.3, 7.0), Stall(1, 31.0, 7.0), Stall(0, 38.0, 7.0)]
    made = Made(tmp_path, 8.0, ranks=3).run(stalls, 60.0)
    assert made.ended == []


def test_a_machine_that_is_suspended_ends_nothing(tmp_path):
    """All clocks are ahead, on all ranks at once, and a rank that was about to wait too long does not have waited so long."""
    stalls = [Stall(1, 24.3, 5.0, stopped=False), *(Stall(rank, 26.0, 3000.0) for rank in range(2))]
    made = Made(tmp_path, 8.0).run([stalls[1], stalls[2]], 3040.0)
    assert made.ended == []
    made = Made(tmp_path, 8.0).run(stalls, 3040.0)
    assert made.ended == []


def test_a_stall_that_was_too_long_and_is_over_is_said_once_and_ends_nothing(tmp_path, capfd):
    made = Made(tmp_path, 8.0, ranks=4).run([Stall(2, 24.3, 9.0)], 50.0)
    assert made.ended == []
    (line,) = capfd.readouterr().err.splitlines()
    assert "longer than --hang 8: rank 2 no longer runs" in line
    assert line.endswith("That is over, and the run goes on")


def test_an_excuse_is_taken_while_a_collective_may_wait(tmp_path):
    made = Made(tmp_path, 4.0)
    with made.flights[1].excused("saving step 4"):
        made.run([Stall(1, 24.3, 30.0, stopped=False)], 60.0)
    assert made.ended == []
    assert made.flights[0].step > 10


def test_every_beat_tells_of_an_excuse_that_lasts_or_is_over(monkeypatch):
    """Another thread says them, at any moment: here whenever the rank looks at the clock."""
    flight, told = Flight(0, 2), []

    def looked_at_s() -> float:
        with monkeypatch.context() as inside:
            inside.setattr(flight_module.time, "monotonic", lambda: NOW_S[0])
            beat = flight.beat()
        told.append(bool(beat.excuse or beat.stood))
        return NOW_S[0]

    with flight.excused("saving step 4"):
        NOW_S[0] += 30.0
        monkeypatch.setattr(flight_module.time, "monotonic", looked_at_s)
    assert told == [True]


def test_clocks_that_are_set_change_nothing_of_what_was_waited_for(tmp_path):
    made = Made(tmp_path, 8.0).run([], 40.0)
    assert made.ended == []
    assert 0 <= made.flights[0].waited_s < 5.0
    data = made.flights[0].as_data(made.flights[0].beat())
    spans = [row["ended"] - row["started"] for row in data["recent"] if row["ended"]]
    assert 0 <= min(spans) <= max(spans) < 1.0


def test_the_wait_of_one_message_is_not_that_of_the_next():
    now_s = 0.0
    seen = SeenTime(lambda: now_s)
    first, second = ["all_reduce"], ["all_reduce"]
    for entry, seconds in ((first, 5.0), (second, 3.0)):
        for _ in range(int(seconds / TICK_S)):
            now_s += TICK_S
            seen.tick(TICK_S, entry)
    assert seen.awaited[0] is second
    assert 2.5 < seen.awaited[1] < 3.1


def test_time_in_which_a_process_stood_still_is_not_seen():
    now_s = 0.0
    seen = SeenTime(lambda: now_s)
    for took_s in (TICK_S, 50.0, TICK_S, 0.5):
        now_s += took_s
        seen.tick(TICK_S, seen)
    assert seen.seconds == pytest.approx(3 * TICK_S + 0.5)
    ((over_s, took_s),) = seen.stood()
    assert (over_s, took_s) == (pytest.approx(TICK_S + 0.5), pytest.approx(50.0 - TICK_S))


@pytest.mark.parametrize(
    ("stood", "seconds"),
    [
        ({1: ((0.5, 30.0),)}, 30.0),
        ({1: ((0.5, 90.0),)}, 59.5),
        ({1: ((70.0, 5.0),)}, 0.0),
        ({1: ((0.0, 10.0),), 2: ((5.0, 10.0),)}, 15.0),
        ({0: ((0.0, 10.0),), 2: ((5.0, 10.0),)}, 5.0),
        ({0: ((0.0, 10.0),)}, 0.0),
    ],
)
def test_what_ranks_stood_still_in_a_wait_is_counted_once(stood, seconds):
    rows = [{"rank": rank, "number": 1, "step": 1, "action": "", "stood": stood.get(rank, ())} for rank in range(3)]
    beats = [Beat.of(json.loads(json.dumps(row))) for row in rows]
    assert standstill_s(0, [*beats, None], 60.0) == pytest.approx(seconds)
