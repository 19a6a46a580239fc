"""The simulator: the zero-bubble paper's numbers, closed forms, and laws over random tables."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costmodel import simulate as sim
from autopar.costmodel.step import pipeline_s
from autopar.errors import PlanError
from autopar.passes import schedule as sched
from autopar.passes.schedule import Action

# Zero Bubble (Qi et al., ICLR 2024), Tables 5 and 9: p, m, chunks, TF, TB, TW, Tcomm (ms), bubble rates.
PAPER = [
    (8, 24, 3, 18.522, 18.086, 9.337, 0.601, {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083, "interleaved": 0.1055}),
    (8, 64, 3, 18.546, 18.097, 9.321, 0.762, {"1f1b": 0.1240, "zb-h1": 0.0674, "zb-h2": 0.0444, "interleaved": 0.0443}),
    (
        8,
        24,
        4,
        29.718,
        29.444,
        19.927,
        0.527,
        {"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698, "interleaved": 0.0808},
    ),
    (
        8,
        32,
        4,
        29.802,
        29.428,
        19.530,
        0.577,
        {"1f1b": 0.1898, "zb-h1": 0.1045, "zb-h2": 0.0559, "interleaved": 0.0628},
    ),
]


@pytest.mark.parametrize(("p", "m", "V", "tf", "tb", "tw", "comm", "published"), PAPER)
def test_reproduces_the_zero_bubble_paper(p, m, V, tf, tb, tw, comm, published):
    for name, rate in published.items():
        chunks = V if name == "interleaved" else 1
        timeline = sim.simulate(sched.build(name, p, m, chunks), sim.uniform(p, tf, tb, tw, chunks), comm)
        exact = 1 - m * (tf + tb + tw) / max(timeline.spans_s)
        assert timeline.bubble_rate == pytest.approx(exact)
        assert abs(exact - rate) < (0.004 if name == "interleaved" else 0.00006), name


@given(p=st.integers(1, 8), m=st.integers(1, 24), tf=st.floats(0.1, 5), tb=st.floats(0.1, 5), tw=st.floats(0, 5))
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_rounds(p, m, tf, tb, tw):
    for name in ("gpipe", "1f1b"):
        span = sim.makespan_s(sched.build(name, p, m), sim.uniform(p, tf, tb, tw))
        assert span == pytest.approx((m + p - 1) * (tf + tb + tw))


@given(p=st.integers(1, 6), rounds=st.integers(1, 4), V=st.integers(1, 4))
def test_interleaving_divides_the_bubble(p, rounds, V):
    m = p * rounds
    timeline = sim.simulate(sched.build("interleaved", p, m, V), sim.uniform(p, 1.0, 1.0, 1.0, V))
    assert timeline.makespan_s == pytest.approx(3 * (m + (p - 1) / V))


names = st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved"])


@settings(max_examples=60, deadline=None)
@given(name=names, p=st.integers(1, 5), rounds=st.integers(1, 3), data=st.data())
def test_never_shorter_than_the_critical_path_or_the_busiest_stream(name, p, rounds, data):
    V = 2 if name == "interleaved" else 1
    table = sched.build(name, p, p * rounds, V)
    seconds = st.floats(0.01, 10)
    durations = {(i, k, c): data.draw(seconds) for i in range(p) for k in "FBW" for c in range(V)}
    comm = data.draw(st.floats(0, 2))
    timeline = sim.simulate(table, durations, comm)
    assert timeline.makespan_s >= max(timeline.busy_s) - 1e-9
    path = timeline.critical_path
    assert timeline.makespan_s >= sum(e.end_s - e.start_s for e in path) - 1e-9
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(path))
    assert timeline.makespan_s == pytest.approx(sim.makespan_s(table, durations, comm))


@given(name=st.sampled_from(["gpipe", "1f1b", "zb-h1"]), p=st.integers(2, 6), m=st.integers(1, 20))
def test_more_microbatches_never_more_bubble(name, p, m):
    fewer = sim.simulate(sched.build(name, p, m), sim.uniform(p, 1.0, 1.0, 1.0))
    more = sim.simulate(sched.build(name, p, m + 1), sim.uniform(p, 1.0, 1.0, 1.0))
    assert more.bubble_fraction <= fewer.bubble_fraction + 1e-9


@settings(max_examples=40, deadline=None)
@given(p=st.integers(2, 6), m=st.integers(2, 12), v=st.booleans(), limit=st.integers(1, 2))
def test_greedy_zero_bubble_tables_are_complete_and_within_their_memory(p, m, v, limit):
    name, chunks = ("zb-v", 2) if v else ("zb-2p", 1)
    table = sched.zero_bubble_greedy(p, m, 1.0, 1.0, 1.0, 0.1, limit * p, name=name)
    for acts in table:
        assert sorted(map(str, acts)) == sorted(
            str(Action(k, i, c)) for k in "FBW" for i in range(m) for c in range(chunks)
        )
        held = peak = 0
        for a in acts:
            held += {"F": 1, "B": 0, "W": -1}[a.kind]
            peak = max(peak, held)
        assert peak <= limit * p * chunks
    sim.simulate(table, sim.uniform(p, 1.0, 1.0, 1.0, chunks), 0.1, name)


@pytest.mark.parametrize(
    ("name", "p", "m", "V"),
    [("1f1b", 8, 64, 1), ("1f1b", 32, 64, 1), ("zb-h1", 8, 64, 1), ("zb-h2", 8, 64, 1), ("interleaved", 8, 64, 8)],
)
def test_extrapolated_pipelines_agree_with_simulated_ones(name, p, m, V):
    durations = sim.uniform(p, 1.0, 1.1, 0.9, V)
    full = sim.makespan_s(sched.build(name, p, m, V), durations, 0.02)
    assert pipeline_s(name, p, m, V, durations, 0.02) == pytest.approx(full, rel=0.012)


def test_a_gradient_reduction_behind_the_last_backward_is_exposed_and_one_before_it_is_not():
    table, durations = sched.build("1f1b", 2, 4), sim.uniform(2, 1.0, 2.0, 0.0)
    last = table[0][-1]
    late = sim.simulate(table, durations, collectives=[sim.Collective(0, "reduce", 1.5, after=last)])
    early = sim.simulate(table, durations, collectives=[sim.Collective(0, "reduce", 1.5, after=Action("B", 1))])
    assert late.exposed_comm_s == pytest.approx(1.5)
    assert early.exposed_comm_s == 0
    gather = sim.Collective(0, "gather", 2.0, before=Action("F", 0))
    assert sim.simulate(table, durations, collectives=[gather]).makespan_s == early.makespan_s + 2


def test_the_trace_opens_in_perfetto():
    timeline = sim.simulate(sched.build("1f1b", 2, 2), sim.uniform(2, 1.0, 1.0, 1.0), 0.5)
    rows = json.loads(timeline.chrome_trace())["traceEvents"]
    bars = [r for r in rows if r["ph"] == "X"]
    assert {r["cat"] for r in bars} == {"compute", "comm"}
    assert all({"ts", "dur", "pid", "tid", "name"} <= set(r) for r in bars)


def test_a_deadlocked_table_is_named():
    table = ((Action("B", 0), Action("F", 0)), (Action("F", 0), Action("B", 0)))
    with pytest.raises(PlanError, match="stage 0 waits before B0"):
        sim.simulate(table, sim.uniform(2, 1.0, 1.0, 1.0))
    with pytest.raises(PlanError, match="divisible by stages"):
        sched.build("interleaved", 4, 6, 2)
    with pytest.raises(PlanError, match="unknown schedule"):
        sched.build("zigzag", 4, 4)
