"""Ranks that are slow are found in what all tell each other."""

from __future__ import annotations

from dataclasses import replace

from autopar.runtime.health.observed_time import SeenTime
from autopar.runtime.run.rank_consistency import Told, slow_ranks, slow_text


def told(*busy: float) -> list[Told]:
    return [Told(2.0, 2.0 - seconds, f"host{rank}") for rank, seconds in enumerate(busy)]


def test_slow_ranks_are_those_that_wait_least():
    ranks = told(1.0, 1.3, 1.02, 1.9, 0.98)
    assert slow_ranks(ranks) == [3, 1]
    assert slow_text(ranks, 10).startswith("slow: rank 3 (host3): busy for 190.0 ms a step, rank 1 (host1)")
    assert slow_text([replace(one, waited_s=1.0) for one in ranks], 10) == ""


def test_where_a_process_stood_still_nobody_is_called_slow() -> None:
    """A machine that was suspended, or a process that was stopped, is no slow machine; the next telling says who is."""
    ranks = told(1.0, 1.0, 1.6)
    assert slow_ranks(ranks) == [2]
    ranks[2] = replace(ranks[2], stood=True)
    assert slow_ranks(ranks) == []
    assert slow_text(ranks, 10) == ""


def test_a_standstill_is_told_once() -> None:
    now = [0.0]
    seen = SeenTime(lambda: now[0])
    for took_s in (0.1, 56.0, 0.1):
        now[0] += took_s
        seen.tick(0.1)
    assert seen.stood_since(0.0)
    assert not seen.stood_since(seen.seconds)
