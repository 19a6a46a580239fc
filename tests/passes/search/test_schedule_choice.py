"""The schedule that a draft gets, from seconds and bytes written by hand: no model is captured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.costmodel.bill import CallBill, StageBill, Work
from autopar.costmodel.software import NEUTRAL
from autopar.ir.actions import StageGraph
from autopar.options import Options
from autopar.passes.account.collectives import Collective
from autopar.passes.account.program import Account, Later, StageAccount, StagePrice
from autopar.passes.memory.peak import Moment, StageMemory
from autopar.passes.memory.step_peaks import group_peaks
from autopar.passes.schedule import in_flight
from autopar.passes.search.stages import schedule_choice
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.stages.schedule_choice import fastest_schedule, schedule_names
from autopar.passes.stage import StageSolution

M = 4


def recomputing(split: bool) -> StageMemory:
    """3 bytes of a microbatch from F to B, which makes 9 again that W reads too; 5 of gradients from the first W on, which it
    adds while it runs. 2 are sent and received."""
    middle = {"F": Moment(4.0, 3.0, 0.0, 2.0, 2.0), "B": Moment(14.0, 12.0, 0.0, 2.0, 2.0), "W": Moment(13.0, 0.0)}
    first = {**middle, "W": Moment(18.0, 0.0, 5.0)}
    if not split:
        middle, first = ({"F": m["F"], "B": replace(m["W"], peak=m["W"].peak + 2)} for m in (middle, first))
    return StageMemory({"parameters": 10.0}, middle, first, middle)


def memory(split: bool) -> StageMemory:
    """10 bytes at rest, and 8 for every microbatch from F until its backward has ended, which needs a little more itself."""
    kinds = {"B": Moment(12.0, 8.0), "W": Moment(8.0, 0.0)} if split else {"B": Moment(10.0, 0.0)}
    return StageMemory({"parameters": 10.0}, {"F": Moment(8.0, 8.0), **kinds})


def draft(groups: int, limit: float, schedule: str = "auto", chunks: int = 1, shape: str = "loop") -> Draft:
    stages: Any = (SimpleNamespace(),) * (groups * chunks)
    solution = StageSolution(stages, 0.0, 0.0, 0.0, StageGraph.chain(groups, chunks).groups, (0.0,) * groups)
    task: Any = SimpleNamespace(options=Options(schedule=schedule), limit_at=lambda rank: limit)
    return Draft(task, M, chunks, shape, solution, ())


def chosen(
    groups: int,
    limit: float,
    schedule: str = "auto",
    useless_from_s: float = math.inf,
    memory: Callable[[bool], StageMemory] = memory,
    there: float = math.inf,
) -> tuple[str, Any] | float:
    """The schedule that a chain of equal stages gets, whose F, B and W take a second each. there: bytes of a device."""
    graph = StageGraph.chain(groups)
    second = Work(computed_s=1.0)

    def account(split: bool) -> Account:
        backward = (second, second) if split else (Work(computed_s=2.0), Work())
        seconds = {"F": 1.0, "B": 1.0, "W": 1.0} if split else {"F": 1.0, "B": 2.0, "W": 0.0}
        bytes_held, nothing_sent = Later(lambda: memory(split)), Later[tuple[Collective, ...]](lambda: ())
        bill = StageBill(((CallBill(second, *backward), 1),))
        counted = StageAccount(Later(lambda: StagePrice(bill, seconds, 0.0)), bytes_held, nothing_sent)
        return Account((counted,) * groups, (), graph, {}, M, 1.0, NEUTRAL)

    limits_bytes, there_bytes = [limit] * groups, [min(limit, there)] * groups
    result = fastest_schedule(
        draft(groups, limit, schedule), account(True), account(False), limits_bytes, there_bytes, useless_from_s
    )
    return result if isinstance(result, float) else (result[0], result[1].table)


def test_in_any_memory_backward_is_split_to_fill_the_bubble() -> None:
    result = chosen(3, 1e9)
    assert not isinstance(result, float)
    name, table = result
    assert name.startswith("zb")
    assert any(action.kind == "W" for row in table for action in row)


@pytest.mark.parametrize("limit", [36.0, 40.0, 46.0])
def test_what_is_chosen_keeps_to_the_limit(limit: float) -> None:
    """1F1B fits in 36 bytes: its first stage holds three microbatches, one of which is in its backward, 10 + 2 * 8 + 10."""
    result = chosen(3, limit)
    assert not isinstance(result, float)
    name, table = result
    split = any(action.kind == "W" for row in table for action in row)
    assert max(group_peaks(StageGraph.chain(3), table, [memory(split)] * 3)) <= limit
    assert name in ("1f1b", "zb-auto") if limit < 38 else name != "1f1b"


@pytest.mark.parametrize("limit", [38.0, 41.0, 44.0, 50.0, 60.0])
def test_a_searched_table_fits_whatever_b_keeps_and_gradients_take(limit: float) -> None:
    result = chosen(3, limit, "zb-auto", memory=recomputing)
    assert not isinstance(result, float)
    assert max(group_peaks(StageGraph.chain(3), result[1], [recomputing(True)] * 3)) <= limit


def test_what_a_searched_table_may_fill_is_filled() -> None:
    """One microbatch takes 10 + 5 + 14 bytes with 4 that arrive meanwhile, and every further one takes 3."""
    result = chosen(3, 40.0, "zb-auto", memory=recomputing)
    assert not isinstance(result, float)
    assert max(in_flight(result[1], StageGraph.chain(3))) == 3


def test_a_searched_table_fills_no_more_than_devices_have_unless_nothing_fits_there() -> None:
    """Where any memory is allowed, 4 microbatches are in flight in it, and as many as a device has room for on that device."""
    held = [
        max(in_flight(result[1], StageGraph.chain(3)))
        for there in (math.inf, 40.0, 33.0, 30.0)
        if not isinstance(result := chosen(3, 1e9, "zb-auto", memory=recomputing, there=there), float)
    ]
    assert held == [4, 3, 1, 4]


def test_where_no_searched_table_fits_it_is_told_how_full_one_microbatch_makes_a_group() -> None:
    assert chosen(3, 30.0, "zb-auto", memory=recomputing) == pytest.approx(33.0 / 30.0)


def test_a_schedule_whose_form_cannot_beat_what_is_known_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages, four microbatches of 3 s: 12 s of work, and where B and W are one 3 s at either end at least, 1 + 2 each."""
    built: list[str] = []
    build = schedule_choice.schedule_table

    def noted(name: str, *rest: Any) -> Any:
        built.append(name)
        return build(name, *rest)

    monkeypatch.setattr(schedule_choice, "schedule_table", noted)
    assert chosen(3, 1e9, useless_from_s=12.0) == math.inf
    assert built == []
    result = chosen(3, 1e9, useless_from_s=15.0)
    assert not isinstance(result, float)
    assert "1f1b" not in built
    assert result == chosen(3, 1e9), "what is faster than that is found all the same"


def test_no_table_is_searched_in_a_room_that_makes_it_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One microbatch at a time: four round trips of 3 F and 3 B each, and a W."""
    alone = chosen(3, 25.0, "zb-auto")
    assert not isinstance(alone, float)
    assert max(in_flight(alone[1], StageGraph.chain(3))) == 1
    monkeypatch.setattr(schedule_choice, "schedule_table", lambda *_: pytest.fail("it is too slow in so little room"))
    assert chosen(3, 25.0, "zb-auto", useless_from_s=25.0) == math.inf


def test_where_nothing_fits_the_fullest_group_is_told() -> None:
    assert chosen(3, 18.0) == pytest.approx(36.0 / 18.0)


def test_what_fits_and_is_too_slow_is_not_said_to_be_too_full() -> None:
    """GPipe is built, as its form allows 15 s, and takes 18."""
    assert chosen(3, 1e9, "gpipe", useless_from_s=15.5) == math.inf


def test_what_is_too_slow_in_any_memory_is_not_said_to_be_too_full() -> None:
    """GPipe holds 44 bytes and takes 18 s: in a smaller share of the memory it takes no less."""
    assert chosen(3, 22.0, "gpipe", useless_from_s=15.5) == math.inf


def test_a_forced_schedule_is_the_only_one_tried() -> None:
    """GPipe holds all four: 10 + 3 * 8 + 10 bytes."""
    assert chosen(3, 22.0, "gpipe") == pytest.approx(44.0 / 22.0)
    result = chosen(3, 1e9, "gpipe")
    assert not isinstance(result, float)
    assert result[0] == "gpipe"


def test_which_schedules_are_tried_follows_from_chunks_and_shape() -> None:
    def names(draft: Draft) -> list[str]:
        return schedule_names(draft.task, draft)

    assert names(draft(2, 1.0))[0] == "1f1b", "the simple one first: others must be faster to replace it"
    assert set(names(draft(2, 1.0))) == {"1f1b", "zb-h1", "zb-h2", "zb-auto", "gpipe"}
    assert names(draft(2, 1.0, chunks=2)) == ["interleaved", "interleaved-zb"]
    assert names(draft(2, 1.0, chunks=2, shape="v")) == ["zb-v"]
    assert "zb-auto" not in names(draft(2, 1.0, chunks=2, shape="any"))
    assert names(draft(2, 1.0, schedule="zb-h2")) == ["zb-h2"]
