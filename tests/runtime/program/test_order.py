"""Sends and receives put into rows of actions: a brute-force player with blocking, nameless messages always ends."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime import RuntimeProgramError
from autopar.runtime.program.actions import Action, parse_row
from autopar.runtime.program.order import Transfer, plan_order
from tests.runtime.pipelines import one_f_one_b


def transfers_of(edges):
    roads = [(f"h{u}{v}", "value", u, v) for u, v in edges] + [(f"d{v}{u}", "gradient", v, u) for u, v in edges]
    return [Transfer(n, *road) for n, road in enumerate(roads)]


def play(slots, groups):
    """Run every group as blocking batches (its sends, then the next receives); a pair's messages match in order."""
    group_of = {s: g for g, stages in enumerate(groups) for s in stages}
    programs = []
    for row in slots:
        items, sends = [], []
        for slot in row:
            items += [("batch", sends + [("recv", t, m) for t, m in slot.receive]), ("act", slot)]
            sends = [("send", t, slot.action.microbatch) for t in slot.send]
        programs.append([*items, ("batch", sends)])
    place, waiting, log = [0] * len(slots), [None] * len(slots), []
    queues = {(a, b, kind): deque() for a in range(len(slots)) for b in range(len(slots)) for kind in ("send", "recv")}
    matched, arrived = set(), set()
    moved = True
    while moved:
        moved = False
        for g, items in enumerate(programs):
            while place[g] < len(items):
                kind, what = items[place[g]]
                if kind == "act":
                    needs = {(t.number, what.action.microbatch, g) for t in what.need}
                    assert needs <= arrived, f"{what.action} starts before its receives"
                    log.append(what.action)
                else:
                    if waiting[g] is None:
                        waiting[g] = {(side, t.number, m) for side, t, m in what}
                        for side, t, m in what:
                            queues[group_of[t.source], group_of[t.target], side].append((t.number, m))
                        moved = True
                    for (a, b, side), queue in queues.items():
                        other = queues[a, b, "recv"]
                        while side == "send" and queue and other:
                            sent, wanted = queue.popleft(), other.popleft()
                            assert sent == wanted, f"groups {a} and {b}: {sent} is taken for {wanted}"
                            matched.add(sent)
                            arrived.add((*sent, b))
                    if any((n, m) not in matched for _, n, m in waiting[g]):
                        break
                    waiting[g] = None
                place[g] += 1
                moved = True
    assert all(p == len(items) for p, items in zip(place, programs, strict=True)), "the groups wait for each other"
    return log


@st.composite
def programs(draw):
    """Groups, edges and rows that some play of the actions has produced."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    edges = [(u, v) for v in range(stages) for u in range(v) if u + 1 == v or draw(st.booleans())]
    cut = draw(st.integers(1, stages))
    groups = [[s for s in range(stages) if s % cut == g] for g in range(cut)]
    split = draw(st.booleans())
    rows = [[] for _ in groups]
    done = set()
    kinds = "FBW" if split else "FB"
    todo = {Action(k, m, s) for k in kinds for m in range(microbatches) for s in range(stages)}
    while todo:
        ready = []
        for action in sorted(todo, key=str):
            kind, m, s = action.kind, action.microbatch, action.stage
            before = {"F": [], "B": [Action("F", m, s)], "W": [Action("B", m, s)]}[kind]
            if kind == "F":
                before += [Action("F", m, u) for u, v in edges if v == s]
            if kind == "B":
                before += [Action("B", m, v) for u, v in edges if u == s]
            if all(b in done for b in before):
                ready.append(action)
        action = draw(st.sampled_from(ready))
        todo.remove(action)
        done.add(action)
        rows[action.stage % cut].append(action)
    return rows, groups, transfers_of(edges), microbatches


@given(programs())
def test_any_table_that_can_be_played_runs_with_blocking_messages_in_order(program):
    rows, groups, transfers, microbatches = program
    slots = plan_order(rows, groups, transfers, microbatches, True, ahead=False)
    assert len(play(slots, groups)) == sum(map(len, rows))


@given(programs())
def test_every_receive_is_begun_once_and_where_tags_allow_it_an_action_ahead(program):
    rows, groups, transfers, microbatches = program
    for ahead in (False, True):
        for row in plan_order(rows, groups, transfers, microbatches, True, ahead=ahead):
            begun = {(t.number, m): k for k, slot in enumerate(row) for t, m in slot.receive}
            needed = {(t.number, slot.action.microbatch): k for k, slot in enumerate(row) for t in slot.need}
            assert begun.keys() == needed.keys()
            assert all(begun[key] <= max(needed[key] - ahead, 0) for key in needed)


def test_values_arrive_while_weight_gradients_are_computed():
    groups, rows = [[0], [1], [2], [3]], list(map(parse_row, one_f_one_b(4, 8, True)))
    last = plan_order(rows, groups, transfers_of([(0, 1), (1, 2), (2, 3)]), 8, True, ahead=False)[3]
    begun = [str(slot.action) for slot in last for t, m in slot.receive]
    assert [name[0] for name in begun].count("F") == 1
    assert len(begun) == 8


def test_in_lockstep_what_a_backward_sends_and_the_next_forward_receives_go_together():
    groups, rows = [[0], [1]], list(map(parse_row, one_f_one_b(2, 4)))
    last = plan_order(rows, groups, transfers_of([(0, 1)]), 4, True, ahead=False)[1]
    assert [(str(slot.action), [m for _, m in slot.receive]) for slot in last if slot.receive] == [
        ("F0.1", [0]),
        ("B0.1", [1]),
        ("F2.1", [2]),
        ("F3.1", [3]),
    ]


def test_words_that_are_no_actions_are_named():
    for word in ("F1", "G0.0", "Fx.0", "F0.y"):
        with pytest.raises(RuntimeProgramError, match=word):
            parse_row(f"F0.0 {word}")
