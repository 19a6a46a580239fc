"""The clock of ranks on a slow link, which benchmarks measure attention's forms with."""

from __future__ import annotations

import torch

from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads
from benchmarks.delayed import DelayedComm, Link, Traffic


class Clock:
    """Seconds that a rank computes: as many as it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def seconds_of(work: tuple[float, float]) -> list[list[float]]:
    """Two ranks send each other 100 bytes, then gather 200, and compute so many seconds meanwhile; when each message is there."""
    traffic = Traffic(Link(100.0, 0.5))

    def rank(comm: Comm) -> list[float]:
        clock = Clock()
        slow = DelayedComm(comm, traffic, cpu_s=clock)
        x = torch.full((25,), float(comm.rank))
        shift, gather = slow.start_shift(x, "cp"), slow.start_all_gather(x, 0, "cp")
        clock.seconds += work[comm.rank]
        assert shift.wait().eq(1 - comm.rank).all()
        arrived = [slow.clock_s()]
        gather.wait()
        return [*arrived, slow.clock_s()]

    return run_threads(2, {"cp": 2}, rank)


def test_messages_queue_on_a_link() -> None:
    """100 bytes at 100 bytes/s are on the link for a second, and there half a second later."""
    assert seconds_of((0.0, 0.0)) == [[1.5, 2.5], [1.5, 2.5]]


def test_work_hides_messages() -> None:
    assert seconds_of((1.0, 4.0)) == [[1.5, 2.5], [4.0, 4.0]]


def test_an_exchange_takes_as_long_as_the_member_that_sends_most() -> None:
    link = Link(100.0, 0.0)
    sent = {0: (1, 3), 1: (5, 0)}

    def rank(comm: Comm) -> float:
        slow = DelayedComm(comm, traffic, cpu_s=lambda: 0.0)
        received = tuple(sent[m][slow.rank] for m in sent)
        rows = torch.zeros(sum(sent[slow.rank]), 25)
        slow.start_exchange(rows, sent[slow.rank], received, "x").wait()
        return slow.clock_s()

    traffic = Traffic(link)
    assert run_threads(2, {"x": 2}, rank) == [5.0, 5.0]
