"""The hash of what ranks send is the same for those who send the same, and the first message that differs is found."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest

from autopar.runtime.health.diagnosis import Beat
from autopar.runtime.health.flight import Flight
from autopar.runtime.health.message_order import (
    KEPT_MARKS,
    MessageOrder,
    Row,
    differing_group,
    first_difference,
    marked_difference,
    odd_ones,
    stable_hash,
)

DP, TP = (
    {0: "dp (0, 2)", 1: "dp (1, 3)", 2: "dp (0, 2)", 3: "dp (1, 3)"},
    {0: "tp (0, 1)", 1: "tp (0, 1)", 2: "tp (2, 3)", 3: "tp (2, 3)"},
)
STEP = [("dp", "gather w"), ("tp", "reduce y"), ("dp", "reduce x"), ("tp", "reduce dx"), ("dp", "scatter g")]


def sent(rank: int, steps: int, change=None, last: int = 99) -> tuple[MessageOrder, list[Row]]:
    """The messages that a rank has sent in so many steps of the program, whose lines `change` may change."""
    order, rows = MessageOrder(apart_s=0.0), []
    for step in range(steps):
        lines = STEP if change is None else change(step, list(STEP))
        for axis, what in lines[: last if step == steps - 1 else 99]:
            group = (DP if axis == "dp" else TP)[rank]
            turn, place = order.turn, order.note(group, stable_hash(what))
            rows.append(Row(group, turn, place, stable_hash(what), what))
        if step < steps - 1 or last == 99:
            order.end_turn()
    return order, rows


def everyone(*steps: int, last=(99, 99, 99, 99), **changes) -> dict[int, tuple[MessageOrder, list[Row]]]:
    return {rank: sent(rank, steps[rank], changes.get(f"of_{rank}"), last[rank]) for rank in range(4)}


def found(ranks, kept: int = 256):
    return first_difference(
        {r: rows[-kept:] for r, (_, rows) in ranks.items()}, {r: o.turn for r, (o, _) in ranks.items()}
    )


def test_the_same_messages_have_the_same_hashes_and_marks_in_every_process():
    first, second = sent(0, 9)[0], sent(2, 9)[0]
    assert first.hashes["dp (0, 2)"] == second.hashes["dp (0, 2)"]
    assert differing_group(first.marks(), second.marks()) == ""
    assert len(first.marks()) == KEPT_MARKS
    assert stable_hash(("all_reduce", "sum", 0, (8, 4))) == 3939879517058806  # of the text, not of this process


@pytest.mark.parametrize(
    "change",
    [
        lambda step, lines: lines[1:] if step == 4 else lines,
        lambda step, lines: [lines[2], lines[1], lines[0], *lines[3:]] if step == 4 else lines,
        lambda step, lines: [("dp", "another"), *lines[1:]] if step == 4 else lines,
        lambda step, lines: [*lines, lines[-1]] if step == 4 else lines,
    ],
    ids=["left out", "in another order", "another", "one more"],
)
def test_one_other_message_changes_all_marks_after_it(change):
    usual, other = sent(0, 6)[0], sent(2, 6, change)[0]
    assert differing_group(usual.marks(), other.marks()) == "dp (0, 2)"
    assert differing_group(sent(0, 4)[0].marks(), sent(2, 4, change)[0].marks()) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [lines[0], *lines[2:]], "rank 3 calls reduce dx"),
        (lambda lines: lines[1:], "rank 3 calls reduce x"),
        (lambda lines: lines[:-1], "rank 3 calls nothing"),
        (lambda lines: [*lines[:2], ("dp", "reduce z"), *lines[3:]], "rank 3 calls reduce z"),
    ],
    ids=["left out of tp", "first of dp", "last", "another"],
)
@pytest.mark.parametrize("seed", range(5))
def test_the_first_difference_names_the_rank_also_where_ranks_are_steps_apart_and_forget(change, said, seed):
    """Each of the pairs (1, 3) and (2, 3) leaves open who is wrong; what the other pairs do says it."""
    draw = random.Random(seed)
    ranks = everyone(
        *(draw.randrange(7, 9) for _ in range(4)), of_3=lambda step, lines: change(lines) if step >= 5 else lines
    )
    one = found(ranks, kept=draw.choice((18, 256)))
    assert one is not None
    assert one.ranks == (3,)
    assert said in one.text
    assert found(everyone(7, 8, 8, 7), kept=20) is None


def test_a_rank_that_has_only_not_come_so_far_does_not_differ():
    assert found(everyone(5, 5, 5, 5, last=(5, 2, 4, 0))) is None
    assert found(everyone(5, 4, 5, 5, last=(1, 99, 2, 3))) is None


def test_where_the_messages_are_forgotten_marks_say_who():
    change = lambda step, lines: [("dp", "another"), *lines[1:]] if step == 4 else lines  # noqa: E731
    marks = {rank: sent(rank, 6, change if rank == 2 else None)[0].marks() for rank in range(4)}
    one = marked_difference(marks)
    assert one is not None
    assert (one.ranks, one.group, one.turn) == ((0, 2), "dp (0, 2)", 5)
    assert marked_difference({rank: sent(rank, 6)[0].marks() for rank in range(4)}) is None


@pytest.mark.parametrize(
    ("said", "odd"), [("aaaa", []), ("aaba", [2]), ("ab", [0, 1]), ("aabb", [0, 1, 2, 3]), ("abcc", [0, 1]), ("a", [])]
)
def test_odd_ones(said, odd):
    assert odd_ones(dict(enumerate(said))) == odd


def test_marks_are_as_far_apart_as_asked_and_common_to_ranks_of_unlike_speed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    marks = []
    for step_s in (0.011, 0.013):
        order = MessageOrder(1.0)
        for _ in range(1000):
            now[0] += step_s
            order.end_turn()
        marks.append({int(turn) for turn in order.marks()})
    assert min(b - a for a, b in zip(sorted(marks[0]), sorted(marks[0])[1:], strict=False)) >= 64
    assert marks[0] & marks[1]


def test_a_beat_with_messages_goes_through_json():
    flight = Flight(0, 2)
    flight.end(flight.start(0, "dp (0, 1)", (0, 1), ("all_reduce", 8), "all_reduce of 8".__str__))
    flight.end_step()
    beat = flight.beat(asked=True)
    assert Beat.of(json.loads(json.dumps(asdict(beat)))) == beat
    assert beat.last[0].what == "all_reduce of 8"
