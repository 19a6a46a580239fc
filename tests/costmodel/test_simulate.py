"""The simulator: the zero-bubble paper's numbers, closed forms, laws over random pipelines, and a slow second opinion."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import simulate as sim
from autopar.costmodel.estimator.pipeline_time import pipeline_s
from autopar.errors import PlanError
from autopar.ir.actions import Action, StageGraph, parse_row
from autopar.passes.schedule import build
from tests.passes.schedule.pipelines import PAPER, chains, dags

chain = StageGraph.chain


@pytest.mark.few(3)
@pytest.mark.parametrize("row", PAPER, ids=lambda r: f"{r['model']}-m{r['m']}")
def test_reproduces_the_zero_bubble_paper(row):
    p, m = row["p"], row["m"]
    tf, tb, tw, comm = row["TF_ms"], row["TB_ms"], row["TW_ms"], row["Tcomm_ms"]
    for name in ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2"):
        V = row["chunks"] if name == "interleaved-1f1b" else 1
        graph = chain(p, V)
        table = build(name.removesuffix("-1f1b"), graph, m)
        timeline = sim.simulate(table, graph, sim.uniform(p * V, tf / V, tb / V, tw / V), comm)
        exact = 1 - m * (tf + tb + tw) / max(timeline.spans_s)
        assert timeline.bubble_rate == pytest.approx(exact)
        assert abs(exact - row["published"][name]) < (0.004 if V > 1 else 0.00006), name


@given(p=st.integers(1, 8), m=st.integers(1, 24), tf=st.floats(0.1, 5), tb=st.floats(0.1, 5), tw=st.floats(0, 5))
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_rounds(p, m, tf, tb, tw):
    for name in ("gpipe", "1f1b"):
        span = sim.makespan_s(build(name, chain(p), m), chain(p), sim.uniform(p, tf, tb, tw))
        assert span == pytest.approx((m + p - 1) * (tf + tb + tw))


@given(p=st.integers(1, 6), rounds=st.integers(1, 4), V=st.integers(2, 4))
def test_interleaving_divides_the_bubble(p, rounds, V):
    m, graph = p * rounds, chain(p, V)
    timeline = sim.simulate(build("interleaved", graph, m), graph, sim.uniform(p * V, 1 / V, 1 / V, 1 / V))
    assert timeline.makespan_s == pytest.approx(3 * (m + (p - 1) / V))


@given(case=st.one_of(chains(), dags()), data=st.data())
def test_agrees_with_repeating_the_definition_until_nothing_moves(case, data):
    graph, name, m = case
    table = build(name, graph, m)
    seconds = st.floats(0.01, 10)
    durations = {(s, k): data.draw(seconds) for s in range(graph.stages) for k in "FBW"}
    comm = data.draw(st.one_of(st.floats(0, 2), st.fixed_dictionaries({e: st.floats(0, 2) for e in graph.edges})))
    timeline = sim.simulate(table, graph, durations, comm)
    events = {e.action: e for e in timeline.events if e.action is not None}
    expected = relaxed(table, graph, durations, comm)
    assert {a: e.start_s for a, e in events.items()} == pytest.approx(expected)
    assert timeline.makespan_s == pytest.approx(sim.makespan_s(table, graph, durations, comm))
    spans, makespan = sim.bubble_spans(table, graph, durations, comm)
    assert (spans, makespan) == (pytest.approx(timeline.spans_s), pytest.approx(timeline.makespan_s))
    assert timeline.makespan_s >= max(timeline.busy_s) - 1e-9
    path = timeline.critical_path
    assert timeline.makespan_s >= sum(e.end_s - e.start_s for e in path) - 1e-9
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(path))


def relaxed(table, graph, durations, comm):
    """Starts by raising every action to what its inputs allow, over and over."""
    split = any(a.kind == "W" for row in table for a in row)

    def lasts(a):
        return durations[a.stage, a.kind] + (durations[a.stage, "W"] if a.kind == "B" and not split else 0)

    def away(u, v):
        if graph.group_of[u] == graph.group_of[v]:
            return 0.0
        return comm if isinstance(comm, float) else comm.get((u, v), comm.get((v, u)))

    back = graph.edges if graph.gradients is None else graph.gradients
    needs = {a: [] for row in table for a in row}
    for a in needs:
        k, s = a.microbatch, a.stage
        if a.kind == "F":
            needs[a] += [(Action("F", k, u), away(u, s)) for u, v in graph.edges if v == s]
        if a.kind == "B":
            needs[a] += [(Action("B", k, v), away(v, s)) for u, v in back if u == s] + [(Action("F", k, s), 0.0)]
        if a.kind == "W":
            needs[a] += [(Action("B", k, s), 0.0)]
    for row in table:
        for before, after in pairwise(row):
            needs[after].append((before, 0.0))
    start = dict.fromkeys(needs, 0.0)
    moved = True
    while moved:
        moved = False
        for a, inputs in needs.items():
            at = max((start[x] + lasts(x) + c for x, c in inputs), default=0.0)
            if at > start[a]:
                start[a], moved = at, True
    return start


@given(name=st.sampled_from(["gpipe", "1f1b", "zb-h1"]), p=st.integers(2, 6), m=st.integers(1, 20))
def test_more_microbatches_never_more_bubble(name, p, m):
    fewer = sim.simulate(build(name, chain(p), m), chain(p), sim.uniform(p, 1.0, 1.0, 1.0))
    more = sim.simulate(build(name, chain(p), m + 1), chain(p), sim.uniform(p, 1.0, 1.0, 1.0))
    assert more.bubble_fraction <= fewer.bubble_fraction + 1e-9


@pytest.mark.parametrize(
    ("name", "p", "m", "V"),
    [("1f1b", 8, 64, 1), ("1f1b", 32, 64, 1), ("zb-h1", 8, 64, 1), ("zb-h2", 8, 64, 1), ("interleaved", 8, 64, 8)],
)
def test_extrapolated_pipelines_agree_with_simulated_ones(name, p, m, V):
    graph, durations = chain(p, V), sim.uniform(p * V, 1.0 / V, 1.1 / V, 0.9 / V)
    full = sim.makespan_s(build(name, graph, m), graph, durations, 0.02)
    assert pipeline_s(name, p, m, V, durations, 0.02) == pytest.approx(full, rel=0.012)


def test_branches_side_by_side_take_the_time_of_the_longer_one():
    graph = StageGraph(((0,), (1,), (2,)), ((0, 2), (1, 2)))
    durations = {(s, k): t for s, t in ((0, 1.0), (1, 3.0), (2, 1.0)) for k in "FBW"}
    assert sim.makespan_s(build("forward", graph, 1), graph, durations) == 4
    one = sim.simulate(build("1f1b", graph, 1), graph, durations, {(0, 2): 0.0, (1, 2): 0.5})
    assert one.makespan_s == 3 + 0.5 + 1 + 2 + 0.5 + 6


def test_only_what_leaves_a_group_pays_and_a_way_back_may_cost_its_own():
    table, graph = (parse_row("F0.0 F0.1 B0.1 B0.0"),), StageGraph(((0, 1),), ((0, 1),))
    assert sim.makespan_s(table, graph, sim.uniform(2, 1.0, 1.0, 0.0), 9.0) == 4
    table = (parse_row("F0.0 B0.0"), parse_row("F0.1 B0.1"))
    for comm, seconds in ((9.0, 22), ({(0, 1): 2.0}, 8), ({(0, 1): 2.0, (1, 0): 3.0}, 9)):
        assert sim.makespan_s(table, chain(2), sim.uniform(2, 1.0, 1.0, 0.0), comm) == seconds


def test_a_gradient_reduction_behind_the_last_backward_is_exposed_and_one_before_it_is_not():
    graph, durations = chain(2), sim.uniform(2, 1.0, 2.0, 0.0)
    table = build("1f1b", graph, 4)
    last = table[0][-1]
    late = sim.simulate(table, graph, durations, collectives=[sim.StreamWork(0, "reduce", 1.5, after=last)])
    early = sim.simulate(table, graph, durations, collectives=[sim.StreamWork(0, "reduce", 1.5, after=Action("B", 1))])
    assert late.exposed_comm_s == pytest.approx(1.5)
    assert early.exposed_comm_s == 0
    gather = sim.StreamWork(0, "gather", 2.0, before=Action("F", 0))
    assert sim.simulate(table, graph, durations, collectives=[gather]).makespan_s == early.makespan_s + 2


def test_the_trace_opens_in_perfetto():
    timeline = sim.simulate(build("1f1b", chain(2), 2), chain(2), sim.uniform(2, 1.0, 1.0, 1.0), 0.5)
    rows = json.loads(timeline.chrome_trace())["traceEvents"]
    bars = [r for r in rows if r["ph"] == "X"]
    assert {r["cat"] for r in bars} == {"compute", "comm"}
    assert all({"ts", "dur", "pid", "tid", "name"} <= set(r) for r in bars)


def test_what_cannot_be_timed_is_named():
    table = (parse_row("B0.0 F0.0"), parse_row("F0.1 B0.1"))
    with pytest.raises(PlanError, match=r"group 0 waits before B0\.0"):
        sim.simulate(table, chain(2), sim.uniform(2, 1.0, 1.0, 1.0))
    with pytest.raises(PlanError, match="2 rows for 3 groups"):
        sim.makespan_s(table, chain(3), sim.uniform(3, 1.0, 1.0, 1.0))
    with pytest.raises(PlanError, match=r"no duration for \(1, 'F'\)"):
        sim.makespan_s(build("1f1b", chain(2), 1), chain(2), {(0, "F"): 1.0, (0, "B"): 1.0, (1, "B"): 1.0})


def test_the_cost_model_does_not_know_the_passes():
    files = list(Path(sim.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    assert not [f.name for f in files if "autopar.passes" in f.read_text()]
