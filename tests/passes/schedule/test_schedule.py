"""Schedules: their orders and their memory, and their time against the papers."""

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.costmodel import simulate as sim
from autopar.errors import PlanError
from autopar.ir import tables
from autopar.ir.actions import Action, StageGraph, parse_row, show_row
from autopar.passes.schedule import SCHEDULES, ActionCosts, MemoryRoom, build, in_flight, least_span_s, peak_bytes
from autopar.passes.schedule.proof import check_table
from tests.passes.schedule.pipelines import (
    IN_A_LOOP,
    IN_A_V,
    ONE_STAGE,
    chain,
    chains,
    cost,
    dags,
    graph_of,
    random_costs,
)


@given(case=st.one_of(chains(), dags()))
def test_every_schedule_is_a_complete_step_without_deadlock(case):
    graph, name, m = case
    table = build(name, graph, m)
    check_table(table, graph, m, training=name != "forward", split=SCHEDULES[name].splits_backward)
    assert build(name, graph, m) == table


def test_the_orders_are_those_of_the_papers():
    def rows(name, graph, m):
        return [show_row(row).replace(f".{g}", "") for g, row in enumerate(build(name, graph, m))]

    assert rows("gpipe", chain(2), 2) == ["F0 F1 B0 B1"] * 2
    assert rows("1f1b", chain(3), 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert rows("zb-h1", chain(2), 3) == ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]
    assert rows("zb-h2", chain(2), 4) == ["F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3", "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"]
    assert build("interleaved", chain(2, 2), 2) == (
        parse_row("F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0"),
        parse_row("F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1"),
    )
    assert build("none", chain(1, 2), 2) == (parse_row("F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0"),)
    assert build("forward", chain(2, 2), 3)[0] == parse_row("F0.0 F1.0 F0.2 F1.2 F2.0 F2.2")


@given(case=dags(names=("gpipe", "1f1b", "zb-h1", "zb-h2", "forward"), groups=7))
def test_a_stage_holds_what_its_depth_asks_for(case):
    graph, name, m = case
    held, top = in_flight(build(name, graph, m), graph), max(graph.depth)
    for g, (s,) in enumerate(graph.groups):
        d = graph.depth[s]
        most = {"gpipe": m, "1f1b": d + 1, "zb-h1": top + 1, "zb-h2": 2 * top + 1, "forward": 0}[name]
        if name in ("gpipe", "1f1b"):
            assert held[g] == min(most, m)
        assert held[g] <= min(most, m)


@given(p=st.integers(1, 5), V=st.integers(2, 4), m=st.integers(1, 14))
def test_interleaved_serves_any_number_of_microbatches_at_no_more_than_the_next_multiple_costs(p, V, m):
    graph, more = chain(p, V), -(-m // p) * p
    table, padded = build("interleaved", graph, m), build("interleaved", graph, more)
    assert table == tuple(tuple(a for a in row if a.microbatch < m) for row in padded)
    assert all(a <= b for a, b in zip(in_flight(table, graph), in_flight(padded, graph), strict=True))
    seconds = sim.uniform(graph.stages, 1.0, 1.3, 0.7)
    assert sim.makespan_s(table, graph, seconds, 0.1) <= sim.makespan_s(padded, graph, seconds, 0.1) + 1e-9


def test_bytes_are_taken_by_f_and_released_by_b_and_w():
    graph = StageGraph(((0, 1),), ((0, 1),))
    table = (parse_row("F0.0 F0.1 B0.1 F1.0 W0.1 B0.0 W0.0 F1.1 B1.1 B1.0 W1.1 W1.0"),)
    assert peak_bytes(table, graph, [10, 4], [3, 1]) == (21,)
    assert peak_bytes(table, graph, [10, 4]) == (24,)
    assert peak_bytes((parse_row("F0.0 F0.1 B0.1 B0.0"),), graph, [10, 4]) == (14,)
    assert in_flight(build("forward", graph, 5), graph) == (0,)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zb_v_has_no_bubble_and_1f1bs_memory_when_f_b_and_w_are_equal(p):
    graph = chain(p, 2, "v")
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        table = build("zb-v", graph, m)
        assert sim.simulate(table, graph, sim.uniform(2 * p, 1.0, 1.0, 1.0)).bubble_rate == pytest.approx(0, abs=1e-9)
        assert max(in_flight(table, graph)) <= 2 * p


SECONDS = [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (3.0, 2.0, 2.0)]
"""Seconds of F, B and W, of which W is no longer than F."""


@pytest.mark.parametrize("p", [2, 4, 5])
@pytest.mark.parametrize(("tf", "tb", "tw"), SECONDS)
def test_interleaved_zero_bubble_idles_as_zb_h1_does_and_a_vth_of_it(tf, tb, tw, p):
    """(p-1)(F+B-W) seconds of a stage, which with V stages per group is 1/V of those of a group."""
    for V in (2, 3):
        graph, m = chain(p, V), 3 * p
        span_s = sim.makespan_s(build("interleaved-zb", graph, m), graph, sim.uniform(p * V, tf, tb, tw), {})
        assert span_s - m * V * (tf + tb + tw) == pytest.approx((p - 1) * (tf + tb - tw))


@pytest.mark.parametrize("p", [2, 4, 5])
@pytest.mark.parametrize(("tf", "tb", "tw"), SECONDS)
def test_dualpipev_idles_no_longer_than_its_authors_say(tf, tb, tw, p):
    """(p-1)(F&B + BW - 3W), where F&B, a forward beside a whole backward BW, takes what both take."""
    graph, m = chain(p, 2, "v"), 3 * p
    span_s = sim.makespan_s(build("dualpipev", graph, m), graph, sim.uniform(2 * p, tf, tb, tw), {})
    assert 0 < span_s - 2 * m * (tf + tb + tw) <= (p - 1) * (tf + 2 * (tb + tw) - 3 * tw) + 1e-9


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb", "dualpipev"])
def test_a_group_holds_until_w_what_the_row_says(name):
    for p, V in ((2, 2), (3, 3), (4, 2)):
        graph = graph_of(name, p, V)
        own, m = len(graph.groups[0]), 4 * p
        says = [SCHEDULES[name].held_by_group(g, p, m, own) * own for g in range(p)]
        assert list(in_flight(build(name, graph, m), graph)) == pytest.approx(says)


def actions_of(action):
    """An action of torch's, its halves one after another, a whole backward as B and W."""
    kind = action.computation_type
    if kind == torch_schedules.OVERLAP_F_B:
        return [one for half in action.sub_actions for one in actions_of(half)]
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    return [Action(letter, action.microbatch_index, action.stage_index) for letter in letters[kind.name]]


@pytest.mark.parametrize(
    ("name", "kind", "V", "rounds"),
    [
        ("interleaved-zb", torch_schedules.ScheduleInterleavedZeroBubble, 2, 1),
        ("interleaved-zb", torch_schedules.ScheduleInterleavedZeroBubble, 3, 3),
        ("dualpipev", torch_schedules.ScheduleDualPipeV, 2, 2),
        ("dualpipev", torch_schedules.ScheduleDualPipeV, 2, 3),
    ],
)
def test_the_orders_are_those_of_torch(name, kind, V, rounds):
    for p in range(1, 6):
        graph, m = graph_of(name, p, V), rounds * p
        table = build(name, graph, m)
        for g, row in enumerate(table):
            theirs = kind.__new__(kind)  # without processes, which its constructor asks for
            theirs.pp_group_size, theirs.rank, theirs.n_local_stages, theirs._n_microbatches = p, g, V, m
            theirs.microbatches_per_round = p
            actions = theirs._calculate_single_rank_operations(g)
            assert [one for action in actions if action is not None for one in actions_of(action)] == list(row)


@pytest.mark.parametrize(
    ("tf", "tb", "tw", "comm"), [(1.0, 1.0, 0.7, 0.03), (1.0, 1.2, 0.9, 0.1), (1.0, 2.0, 1.0, 0.0)]
)
def test_zb_v_beats_interleaved_for_times_as_they_are(tf, tb, tw, comm):
    p, m = 6, 18
    v, loop, costs = chain(p, 2, "v"), chain(p, 2), ActionCosts.uniform(12, tf, tb, tw, comm)
    assert cost(build("zb-v", v, m, costs=costs), v, costs) < cost(build("interleaved", loop, m), loop, costs)


def test_every_name_says_what_it_is_for_and_what_it_needs():
    assert set(SCHEDULES) >= {*ONE_STAGE, *IN_A_LOOP, *IN_A_V, "none"}
    assert all(len(what) > 10 and "\n" not in what for what in (row.what for row in SCHEDULES.values()))
    apart = {"zb-h1", "zb-h2", "zb-auto", "zb-v", "interleaved-zb", "dualpipev"}
    assert {n for n in SCHEDULES if SCHEDULES[n].splits_backward} == apart
    assert SCHEDULES["1f1b"].stages == (1, 1)
    assert SCHEDULES["interleaved"].stages == (2, None)
    assert SCHEDULES["zb-v"].stages == (2, 2)
    for name in SCHEDULES:
        table = build(name, graph_of(name, 3), 4)
        assert any(a.kind == "W" for row in table for a in row) == SCHEDULES[name].splits_backward


@pytest.mark.parametrize(
    ("name", "graph", "m", "memory", "says"),
    [
        ("zigzag", chain(4), 4, None, "unknown schedule 'zigzag'; known: none, forward"),
        ("1f1b", chain(4), 0, None, "at least 1 microbatch"),
        ("none", chain(2), 4, None, "one group of ranks, this pipeline has 2; use 1f1b"),
        ("1f1b", chain(2, 2), 4, None, "needs 1 stage on every group, group 0 has 2; use interleaved"),
        ("zb-auto", chain(2, 2), 4, None, "use interleaved, zb-v"),
        ("zb-v", chain(4), 4, None, "needs 2 stages on every group, group 0 has 1; use 1f1b or zb-auto"),
        ("interleaved", chain(4), 4, None, "needs at least 2 stages"),
        ("zb-v", chain(4, 2), 4, None, "needs stages placed as"),
        ("interleaved", chain(4, 2, "v"), 4, None, "gpipe runs any placement"),
        ("gpipe", chain(2), 8, 4, "gpipe holds 8 on group 0, 4 is allowed; use zb-auto"),
        ("zb-auto", chain(2), 8, 0.5, "group 0 has room for 0.5, one microbatch needs 1; use smaller microbatches"),
        ("zb-auto", chain(2), 8, MemoryRoom((1.0,), (1.0, 1.0)), "memory is given for 1 groups and 2 stages"),
        ("zb-auto", chain(1), 8, MemoryRoom((1.0,), (1.0,), (2.0,)), "group 0 has room for 1, one microbatch needs 2"),
    ],
)
def test_what_a_schedule_cannot_serve_is_refused_with_what_would_do(name, graph, m, memory, says):
    with pytest.raises(PlanError, match=says):
        build(name, graph, m, memory=memory)


def test_missing_seconds_are_named():
    for bad in ({}, {(0, "F"): 1.0, (0, "B"): math.nan, (0, "W"): 1.0}):
        with pytest.raises(PlanError, match=r"costs need seconds of [FB] on stage 0"):
            build("zb-auto", chain(1), 2, costs=ActionCosts(bad))


@pytest.mark.parametrize("name", [*IN_A_LOOP, *IN_A_V])
def test_values_that_skip_stages_come_along_in_the_chain_s_order(name: str) -> None:
    plain = chain(3, 2, "v" if name in IN_A_V else "loop")
    skips = StageGraph(plain.groups, (*plain.edges, (0, 3), (1, 5)))
    table = build(name, skips, 6)
    assert table == build(name, plain, 6)
    check_table(table, skips, 6)


@given(
    case=st.one_of(chains(names=("1f1b", "zb-h1", "zb-h2", "zb-v", "gpipe")), dags(names=("1f1b", "gpipe"))),
    data=st.data(),
)
def test_no_table_takes_less_than_the_least_span(case, data):
    """The bound is given the most that a table's stages hold in it at once between F and B."""
    graph, name, m = case
    costs = random_costs(data.draw, graph)
    table = build(name, graph, m, costs=costs if SCHEDULES[name].timed else None)
    change = {"F": 1, "B": -1, "W": 0}
    most = [
        max(accumulate(change[a.kind] for a in table[graph.group_of[s]] if a.stage == s)) for s in range(graph.stages)
    ]
    least = least_span_s(graph, m, costs, most)
    assert least <= sim.makespan_s(table, graph, costs.seconds, costs.comm_s) * (1 + 1e-9)


def test_the_least_span_is_that_of_an_ideal_pipeline():
    """Equal stages in any memory: zb-h2 works without a gap from when the first microbatch arrives."""
    graph, costs = StageGraph.chain(4), ActionCosts.uniform(4)
    assert least_span_s(graph, 16, costs, [math.inf] * 4) == 3 + 16 * 3
    assert sim.makespan_s(tables.zb_h2(graph, 16), graph, costs.seconds) == pytest.approx(3 + 16 * 3)
    held_s = least_span_s(graph, 16, costs, [4.0] * 4)
    assert held_s == 4 + 3 + 12 + 16 * 2, "the first stage waits for its first microbatch to come back"
    assert least_span_s(graph, 16, costs, [1.0] * 4) == 16 * 8 + 1, (
        "each microbatch waits for the one before it to come back"
    )
    assert least_span_s(graph, 16, costs, [2.0] * 4) == 8 * 8 + 1 + 1
