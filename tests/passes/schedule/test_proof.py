"""The checker of action tables against executors that know nothing of it: what it accepts runs, what it refuses does not."""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import CheckError
from autopar.ir.actions import Action, StageGraph, parse_row
from autopar.passes.schedule import SCHEDULES, MemoryRoom, build
from autopar.passes.schedule.proof import check_table, rendezvous_deadlock
from tests.passes.schedule.pipelines import chains, dags

chain = StageGraph.chain


def ports(action, graph):
    """(messages an action takes, messages it makes) as (sender, receiver, kind, microbatch)."""
    back = graph.edges if graph.gradients is None else graph.gradients
    s, k = action.stage, action.microbatch
    if action.kind == "F":
        return [(u, v, "F", k) for u, v in graph.edges if v == s], [(u, v, "F", k) for u, v in graph.edges if u == s]
    if action.kind == "B":
        return [(v, u, "B", k) for u, v in back if u == s], [(v, u, "B", k) for u, v in back if v == s]
    return [], []


def runs(table, graph, m, kinds):
    """Executes the table with a queue per channel; whether it ends with everything done once and every queue in order.

    What stays in a group needs no order.
    """
    queues, done, at = defaultdict(deque), [], [0] * len(table)
    moved = True
    while moved:
        moved = False
        for g, row in enumerate(table):
            while at[g] < len(row):
                action = row[at[g]]
                if graph.group_of.get(action.stage) != g:
                    return False
                takes, makes = ports(action, graph)
                here = [t for t in takes if graph.group_of[t[0]] == g]
                if any(k not in queues[u, v, kind] for u, v, kind, k in here):
                    break
                takes = [t for t in takes if t not in here]
                if any(not queues[u, v, kind] for u, v, kind, _ in takes):
                    break
                if any(queues[u, v, kind].popleft() != k for u, v, kind, k in takes):
                    return False
                before = {"B": "F", "W": "B"}.get(action.kind)
                if before and action._replace(kind=before) not in done:
                    return False
                for u, v, kind, k in makes:
                    queues[u, v, kind].append(k)
                done.append(action)
                at[g] += 1
                moved = True
    wanted = {Action(kind, k, s) for kind in kinds for k in range(m) for s in range(graph.stages)}
    ended = all(n == len(row) for n, row in zip(at, table, strict=True))
    return ended and len(done) == len(wanted) and set(done) == wanted


def meets(table, graph):
    """Executes the table with a barrier of messages before every action; whether everybody gets to the end."""

    def away(message):
        return graph.group_of[message[0]] != graph.group_of[message[1]]

    def batch(g, n):
        row = table[g]
        sends = [(m, "send") for m in ports(row[n - 1], graph)[1] if away(m)] if n else []
        return sends + ([(m, "take") for m in ports(row[n], graph)[0] if away(m)] if n < len(row) else [])

    at, posted = [0] * len(table), set()
    moved = True
    while moved:
        moved = False
        for g, row in enumerate(table):
            if at[g] > len(row):
                continue
            here = batch(g, at[g])
            moved = moved or not posted.issuperset(here)
            posted.update(here)
            if all((m, "take" if end == "send" else "send") in posted for m, end in here):
                at[g] += 1
                moved = True
    return all(at[g] > len(row) for g, row in enumerate(table))


def accepted(table, graph, m, kinds, **how):
    try:
        check_table(table, graph, m, training=kinds != "F", split=kinds == "FBW", **how)
    except CheckError:
        return False
    return True


@st.composite
def mutations(draw, case):
    """(what was done, table, graph, microbatches, kinds): a built table with one to three changes."""
    graph, name, m = draw(case)
    kinds = "F" if name == "forward" else "FBW" if SCHEDULES[name].splits_backward else "FB"
    rows = [list(row) for row in build(name, graph, m)]
    changes = []
    for _ in range(draw(st.integers(1, 3))):
        full = [g for g, row in enumerate(rows) if row]
        if not full:
            break
        g = draw(st.sampled_from(full))
        row, i = rows[g], draw(st.integers(0, len(rows[g]) - 1))
        change = draw(st.sampled_from(["swap", "next", "drop", "twice", "move", "microbatch", "kind", "stage"]))
        if change == "swap":
            j = draw(st.integers(0, len(row) - 1))
            row[i], row[j] = row[j], row[i]
        elif change == "next" and i + 1 < len(row):
            row[i], row[i + 1] = row[i + 1], row[i]
        elif change == "drop":
            del row[i]
        elif change == "twice":
            row.insert(draw(st.integers(0, len(row))), row[i])
        elif change == "move":
            other = rows[draw(st.integers(0, len(rows) - 1))]
            other.insert(draw(st.integers(0, len(other))), row.pop(i))
        elif change == "microbatch":
            row[i] = row[i]._replace(microbatch=draw(st.integers(-1, m)))
        elif change == "kind":
            row[i] = row[i]._replace(kind=draw(st.sampled_from("FBW")))
        else:
            row[i] = row[i]._replace(stage=draw(st.integers(0, graph.stages)))
        changes.append(f"{change} {g}:{i}")
    return changes, tuple(map(tuple, rows)), graph, m, kinds


@settings(max_examples=150)
@given(case=mutations(st.one_of(chains(groups=4, microbatches=5), dags(groups=4, microbatches=4))))
def test_a_changed_table_is_accepted_exactly_when_it_runs(case):
    _, table, graph, m, kinds = case
    assert accepted(table, graph, m, kinds) == runs(table, graph, m, kinds)


@pytest.mark.slow
@settings(max_examples=4000)
@given(case=mutations(st.one_of(chains(groups=5, microbatches=7), dags(groups=6, microbatches=6))))
def test_many_changed_tables_are_accepted_exactly_when_they_run(case):
    _, table, graph, m, kinds = case
    assert accepted(table, graph, m, kinds) == runs(table, graph, m, kinds)


@settings(max_examples=150)
@given(case=mutations(st.one_of(chains(groups=4, microbatches=5), dags(groups=4, microbatches=4))))
def test_sends_that_wait_are_accepted_exactly_when_everybody_meets(case):
    _, table, graph, m, kinds = case
    if accepted(table, graph, m, kinds):
        assert accepted(table, graph, m, kinds, rendezvous=True) == meets(table, graph)


SMALL = (chain(2), chain(1, 2), chain(2, 2), StageGraph(((0,), (1,), (2,)), ((0, 2), (1, 2))))


@settings(max_examples=100)
@given(data=st.data(), graph=st.sampled_from(SMALL))
def test_any_order_at_all_is_accepted_exactly_when_it_runs(data, graph):
    m, kinds = 2, data.draw(st.sampled_from(["F", "FB"]))
    table = tuple(
        tuple(data.draw(st.permutations([Action(kind, k, s) for kind in kinds for k in range(m) for s in group])))
        for group in graph.groups
    )
    assert accepted(table, graph, m, kinds) == runs(table, graph, m, kinds)
    if accepted(table, graph, m, kinds):
        assert (rendezvous_deadlock(table, graph) == "") == meets(table, graph)


@given(case=chains(names=("gpipe", "1f1b", "zb-h1", "forward", "none"), groups=7, microbatches=12))
def test_schedules_in_step_on_a_chain_run_even_when_sends_wait(case):
    graph, name, m = case
    assert rendezvous_deadlock(build(name, graph, m), graph) == ""


@given(case=dags(names=("gpipe", "forward"), groups=7))
def test_gpipe_and_forward_run_on_any_dag_even_when_sends_wait(case):
    graph, name, m = case
    assert rendezvous_deadlock(build(name, graph, m), graph) == ""


@pytest.mark.parametrize(
    ("name", "graph", "m"),
    [
        *[("zb-h2", chain(3), 6), ("interleaved", chain(3, 2), 6), ("zb-v", chain(3, 2, "v"), 6)],
        *[("interleaved-zb", chain(3, 2), 6), ("dualpipev", chain(3, 2, "v"), 6)],
    ],
)
def test_schedules_that_run_ahead_need_sends_that_do_not_wait(name, graph, m):
    table, split = build(name, graph, m), SCHEDULES[name].splits_backward
    check_table(table, graph, m, split=split)
    with pytest.raises(CheckError, match=r"when sends wait for their receivers: group \d waits before"):
        check_table(table, graph, m, split=split, rendezvous=True)


def test_messages_of_one_channel_must_be_taken_in_the_order_sent():
    table = (parse_row("F0.0 F1.0 B0.0 B1.0"), parse_row("F1.1 F0.1 B0.1 B1.1"))
    with pytest.raises(
        CheckError, match=r"group 1, action 0 \(F1\.1\): receives F1 of stage 0, which sends F0 before it"
    ):
        check_table(table, chain(2), 2)
    inside = (parse_row("F0.0 F1.0 F1.1 F0.1 B0.1 B1.1 B1.0 B0.0"),)
    check_table(inside, chain(1, 2), 2)


def test_memory_over_the_bound_names_the_action_that_breaks_it():
    graph, table = chain(2), build("gpipe", chain(2), 4)
    check_table(table, graph, 4, memory=MemoryRoom((40, 20), (10, 5)))
    with pytest.raises(
        CheckError, match=r"group 1, action 3 \(F3\.1\): holds 20 bytes after it, 1 over the bound of 19"
    ):
        check_table(table, graph, 4, memory=MemoryRoom((40, 19), (10, 5)))
    split = build("zb-h1", graph, 4)
    with pytest.raises(CheckError, match="over the bound of 15"):
        check_table(split, graph, 4, memory=MemoryRoom((15, 15), (10, 10), (6, 6)))
    check_table(split, graph, 4, memory=MemoryRoom((26, 26), (10, 10), (6, 6)))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["F0.0 B0.0"], "has 1 rows for 2 groups"),
        (["F0.0 B0.0", "F0.1"], r"group 1: B0\.1 is missing"),
        (["F0.0 B0.0", "F0.1 B0.1 B0.1"], r"group 1, action 2 \(B0\.1\): B0\.1 was done already"),
        (["F0.0 B0.0", "B0.1 F0.1"], r"group 1, action 0 \(B0\.1\): comes before F0\.1"),
        (["F0.0 B0.0 F0.1", "B0.1"], r"group 0, action 2 \(F0\.1\): stage 1 runs on group 1"),
        (["F0.0 B0.0", "F0.1 B0.1 F0.7"], "stage 7 is none of the 2 stages"),
        (["F0.0 B0.0", "F0.1 B0.1 F1.1"], r"action 2 \(F1\.1\): there are 1 microbatches, the first is 0"),
    ],
)
def test_what_is_wrong_is_said_with_group_and_action(rows, says):
    with pytest.raises(CheckError, match=says):
        check_table(tuple(map(parse_row, rows)), chain(2), 1)


def test_kinds_that_a_step_does_not_have_are_refused():
    both = tuple(map(parse_row, ["F0.0 B0.0", "F0.1 B0.1"]))
    with pytest.raises(CheckError, match="a step of kinds F has no B"):
        check_table(both, chain(2), 1, training=False)
    with pytest.raises(CheckError, match=r"W0\.0 is missing"):
        check_table(both, chain(2), 1, split=True)
    with pytest.raises(CheckError, match="a step of kinds F, B has no W"):
        check_table(build("zb-h1", chain(2), 1), chain(2), 1, split=False)


def test_a_wait_in_a_circle_is_told_from_both_ends():
    graph = StageGraph(((0, 2), (1,)), ((0, 1), (1, 2)))
    table = (parse_row("F0.0 F0.2 B0.2 F1.0 F1.2 B1.2 B1.0 B0.0"), parse_row("F0.1 F1.1 B0.1 B1.1"))
    with pytest.raises(CheckError, match=r"both ends of a channel|deadlocks"):
        check_table(table, graph, 2)
    table = (parse_row("F0.0 F0.2 B0.2 B0.0 F1.0 F1.2 B1.2 B1.0"), parse_row("F0.1 F1.1 B0.1 B1.1"))
    with pytest.raises(CheckError, match=r"deadlocks: group 0 waits before B0\.0 .*; group 1 waits before F1\.1"):
        check_table(table, graph, 2)
