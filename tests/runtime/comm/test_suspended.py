"""Ops that stop while their messages travel."""

from __future__ import annotations

import pytest

from autopar.runtime.comm.suspended import Parts, whole_or_suspended

DONE: list[str] = []


def _op(stops: int, *, fails: bool = False) -> Parts[int]:
    """Stops so often."""
    for stop in range(stops):
        DONE.append(f"part {stop}")
        yield
    if fails:
        raise ValueError("at the end")
    DONE.append("end")
    return stops


op, start_op = whole_or_suspended(_op)


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


@pytest.mark.parametrize("stops", [0, 1, 3])
def test_run_as_a_whole_it_never_stops(stops: int) -> None:
    assert op(stops) == stops
    assert [*(f"part {stop}" for stop in range(stops)), "end"] == DONE
    assert op.__doc__ == "Stops so often."


def test_started_it_goes_on_when_it_is_told() -> None:
    handle = start_op(2)
    assert DONE == ["part 0"]
    handle.go_on()
    assert DONE == ["part 0", "part 1"]
    assert handle.wait() == handle.wait() == 2
    assert DONE == ["part 0", "part 1", "end"]


@pytest.mark.parametrize("told", [0, 1, 5])
def test_what_is_left_is_done_by_wait_and_what_is_done_stays_done(told: int) -> None:
    handle = start_op(2)
    for _ in range(told):
        handle.go_on()
    assert handle.wait() == 2
    assert DONE == ["part 0", "part 1", "end"]


def test_an_error_comes_out_where_the_op_is_run() -> None:
    handle = start_op(1, fails=True)
    with pytest.raises(ValueError, match="at the end"):
        handle.wait()
