"""Ranks that are slow are found in what all tell each other."""

from __future__ import annotations

from dataclasses import replace

from autopar.runtime.comparing import Told, slow_ranks, slow_text


def told(*busy: float) -> list[Told]:
    return [Told(2.0, 2.0 - seconds, f"host{rank}") for rank, seconds in enumerate(busy)]


def test_slow_ranks_are_those_that_wait_least():
    ranks = told(1.0, 1.3, 1.02, 1.9, 0.98)
    assert slow_ranks(ranks) == [3, 1]
    assert slow_text(ranks, 10).startswith("slow: rank 3 (host3): busy for 190.0 ms a step, rank 1 (host1)")
    assert slow_text([replace(one, waited_s=1.0) for one in ranks], 10) == ""
