"""A rank's clock beside that of its link: what messages expose."""

from __future__ import annotations

import pytest

from autopar.costmodel.bill import Purpose
from autopar.passes.price.link_clock import LinkClock

TP, EP = Purpose("tp"), Purpose("ep")


def test_a_message_is_exposed_by_what_the_work_beside_it_does_not_last() -> None:
    clock = LinkClock(0.0)
    clock.start("h", TP, 3.0)
    clock.compute(2.0)
    clock.wait("h")
    assert (clock.now_s, clock.exposed, clock.hidden_s) == (3.0, {TP: 1.0}, 2.0)


def test_messages_go_one_after_another() -> None:
    clock = LinkClock(0.0)
    clock.start("h", TP, 3.0)
    clock.start("k", EP, 2.0)
    clock.compute(4.0)
    clock.wait("h")
    assert clock.now_s == 4.0
    clock.wait("k")
    assert (clock.now_s, clock.exposed, clock.hidden_s) == (5.0, {TP: 0.0, EP: 1.0}, 4.0)


def test_a_message_that_is_waited_for_at_once_comes_behind_those_under_way() -> None:
    clock = LinkClock(0.0)
    clock.start("h", TP, 3.0)
    clock.compute(1.0)
    clock.send(EP, 2.0)
    assert (clock.now_s, clock.exposed[EP]) == (5.0, 4.0)
    clock.wait("h")
    assert (clock.now_s, sum(clock.exposed.values()), clock.hidden_s) == (5.0, 4.0, 1.0)


def test_a_share_stays_exposed_whatever_runs_beside() -> None:
    clock = LinkClock(0.25)
    clock.start("h", TP, 4.0)
    clock.compute(10.0)
    clock.wait("h")
    assert (clock.now_s, clock.exposed, clock.hidden_s) == (11.0, {TP: 1.0}, 3.0)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_a_message_with_no_work_beside_it_takes_as_long_as_one_that_is_waited_for(share: float) -> None:
    started, sent = LinkClock(share), LinkClock(share)
    started.start("h", TP, 0.7)
    started.wait("h")
    sent.send(TP, 0.7)
    assert started.now_s == pytest.approx(sent.now_s, rel=1e-15)
    assert sent.exposed == {TP: 0.7}
