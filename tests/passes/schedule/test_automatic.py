"""The automatic scheduler: against the papers, within its memory, and against an optimum on small pipelines."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from autopar.costmodel import simulate as sim
from autopar.ir import tables
from autopar.ir.actions import Action, StageGraph
from autopar.passes.rules.memo import Memo
from autopar.passes.schedule import ActionCosts, MemoryRoom, automatic, build, peak_bytes
from autopar.passes.schedule import greedy as greedy_module
from autopar.passes.schedule.greedy import Policy, greedy
from autopar.passes.schedule.proof import check_table
from autopar.passes.schedule.timed_pipeline import TimedPipeline
from tests.passes.schedule.pipelines import PAPER, chain, chains, cost, dags, random_costs


def paper_pipeline(row, limit, kept):
    """Costs of a row and room for `limit` microbatches, of which the share `kept` stays between B and W."""
    p = row["p"]
    costs = ActionCosts.uniform(p, row["TF_ms"], row["TB_ms"], row["TW_ms"], row["Tcomm_ms"])
    return chain(p), costs, MemoryRoom((float(limit),) * p, (1.0,) * p, (kept,) * p)


def by_size(test):
    rows = [
        pytest.param(r, marks=[pytest.mark.slow] if r["p"] > 8 else [], id=f"{r['model']}-m{r['m']}") for r in PAPER
    ]
    return pytest.mark.parametrize("row", rows)(test)


@pytest.mark.few(2)
@by_size
def test_the_automatic_scheduler_reaches_the_paper(row):
    """The paper's layers hold 34 sbh + 5 a s^2 b bytes between F and B and 32 sbh between B and W."""
    h, a, seq = row["hidden"], row["heads"], row["seq"]
    kept = 32 * h / (34 * h + 5 * a * seq)
    for name, limit in (("zb-1p", row["p"]), ("zb-2p", 2 * row["p"])):
        graph, costs, room = paper_pipeline(row, limit, kept)
        table = build("zb-auto", graph, row["m"], costs=costs, memory=room)
        check_table(table, graph, row["m"], split=True, memory=room)
        rate = sim.simulate(table, graph, costs.seconds, costs.comm_s).bubble_rate
        assert rate <= row["published"][name] + 0.001, name


@pytest.mark.few(3)
@by_size
def test_where_w_releases_everything_twice_the_memory_gives_the_least_bubble_there_is(row):
    """With room for L microbatches the last group has run m - L W before its last B, which still must reach the first:

    span of group 0 >= (p-1)(F + B + 2 comm) + m (F + B) + (m - L) W + W.
    """
    p, m, limit = row["p"], row["m"], 2 * row["p"]
    F, B, W, comm = (row[k] for k in ("TF_ms", "TB_ms", "TW_ms", "Tcomm_ms"))
    graph, costs, room = paper_pipeline(row, limit, 1.0)
    found = cost(build("zb-auto", graph, m, costs=costs, memory=room), graph, costs)
    bound = (p - 1) * (F + B + 2 * comm) + m * (F + B) + (m - limit + 1) * W
    assert bound <= found * (1 + 1e-9)
    assert found <= 1.0005 * bound


@given(case=st.one_of(chains(names=("zb-auto", "zb-v")), dags(names=("zb-auto",))), data=st.data())
def test_searched_tables_keep_to_their_memory_and_beat_the_fixed_ones_that_do(case, data):
    graph, name, m = case
    costs = random_costs(data.draw, graph)
    held = tuple(data.draw(st.floats(0.5, 4)) for _ in range(graph.stages))
    later = tuple(h * data.draw(st.floats(0, 3)) for h in held)
    any_room = MemoryRoom((), held, later)
    bound = tuple(data.draw(st.floats(1, 6)) * any_room.least(group) for group in graph.groups)
    room = MemoryRoom(bound, held, later)
    table = build(name, graph, m, costs=costs, memory=room)
    check_table(table, graph, m, split=True, memory=room)
    for fixed in (tables.zb_h1, tables.zb_h2) if name == "zb-auto" else (tables.zb_v,):
        other = fixed(graph, m)
        if all(a <= b for a, b in zip(peak_bytes(other, graph, held, later), bound, strict=True)):
            makespan = sim.makespan_s(other, graph, costs.seconds, costs.comm_s)
            assert cost(table, graph, costs) <= cost(other, graph, costs) + 1e-3 * makespan + 1e-9


def optimum(graph, m, seconds, comm, limit):
    """The least longest span, by CP-SAT: whole seconds, one stage per group, everything held until W."""
    model = cp_model.CpModel()
    horizon = sum(seconds.values()) * m * 2
    start, end = {}, {}
    for s, k, kind in itertools.product(range(graph.stages), range(m), "FBW"):
        start[kind, k, s] = model.new_int_var(0, horizon, "")
        end[kind, k, s] = start[kind, k, s] + seconds[s, kind]
    spans = model.new_int_var(0, horizon, "")
    for s in range(graph.stages):
        mine = list(itertools.product("FBW", range(m)))
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[kind, k, s], seconds[s, kind], "") for kind, k in mine
        )
        for k in range(m):
            model.add(start["W", k, s] >= end["B", k, s])
            model.add(start["B", k, s] >= end["F", k, s])
            for u in graph.feeds[s]:
                model.add(start["F", k, s] >= end["F", k, u] + comm)
            for v in graph.returns[s]:
                model.add(start["B", k, s] >= end["B", k, v] + comm)
            if k:  # microbatches are alike: any order of F can be renamed, and B and W follow in a table
                for kind in "FBW":
                    model.add(start[kind, k, s] >= end[kind, k - 1, s])
            if k >= limit:
                model.add(start["F", k, s] >= end["W", k - limit, s])
        model.add(spans >= end["W", m - 1, s] - start["F", 0, s])
    model.minimize(spans)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value


DIAMOND = StageGraph(((0,), (1,), (2,), (3,)), ((0, 1), (0, 2), (1, 3), (2, 3)))


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("graph", "m", "FBW", "comm"),
    [(chain(2), 4, (2, 2, 2), 0), (chain(3), 4, (3, 4, 2), 1), (chain(3), 5, (2, 2, 3), 0), (DIAMOND, 3, (2, 3, 1), 1)],
    ids=["2x4", "3x4", "3x5", "diamond"],
)
def test_small_pipelines_are_close_to_the_optimum(graph, m, FBW, comm, limit):
    seconds = {(s, k): t for s in range(graph.stages) for k, t in zip("FBW", FBW, strict=True)}
    costs = ActionCosts(seconds, float(comm))
    best = optimum(graph, m, seconds, comm, limit)
    found = cost(build("zb-auto", graph, m, costs=costs, memory=limit), graph, costs)
    assert best <= found + 1e-9
    assert found <= 1.03 * best


@settings(max_examples=15)
@given(p=st.integers(2, 6), m=st.integers(2, 16))
def test_more_memory_makes_the_automatic_schedule_no_slower_than_1f1b(p, m):
    costs = ActionCosts.uniform(p, 1.0, 1.1, 0.8, 0.05)
    plain = cost(build("1f1b", chain(p), m), chain(p), costs)
    assert cost(build("zb-auto", chain(p), m, costs=costs, memory=p), chain(p), costs) <= plain + 1e-9
    assert cost(build("zb-auto", chain(p), m, costs=costs, memory=2 * p), chain(p), costs) <= plain + 1e-9


@pytest.mark.parametrize(("p", "m", "memory"), [(4, 8, 4.0), (8, 16, 10.0)])
def test_settings_that_are_given_up_would_not_have_been_finalists(p, m, memory, monkeypatch):
    graph = StageGraph.chain(p)
    costs = ActionCosts({(s, k): 1 + 0.3 * math.sin(7 * s + i) for s in range(p) for i, k in enumerate("FBW")}, 0.1)
    table = build("zb-auto", graph, m, costs=costs, memory=memory)
    monkeypatch.setattr(automatic, "greedy", lambda pipeline, policy, longest_s=math.inf: greedy(pipeline, policy))
    assert build("zb-auto", graph, m, costs=replace(costs, memo=Memo()), memory=memory) == table


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_is_under_way_is_kept_waiting_for_a_w(seed):
    """The list scheduler's own tables, which the search repairs, with memory and flights without end. Without patience no F keeps
    a B waiting either."""
    draw = random.Random(seed)
    graph, m = StageGraph.chain(draw.choice((2, 3, 4))), 6
    costs = ActionCosts(
        {(s, k): draw.uniform(0.5, 2.0) for s in range(graph.stages) for k in "FBW"}, draw.uniform(0, 1)
    )
    pipeline = TimedPipeline(graph, m, costs, MemoryRoom.microbatches(graph, 10 * m))
    found = greedy(pipeline, Policy((m,) * graph.stages, patience_F=0.0, patience_W=0.0, idle=1.0))
    assert found is not None
    check_table(found.table, graph, m, split=True)
    start, end = times(found.table, graph, costs)
    for before, after in itertools.chain.from_iterable(map(itertools.pairwise, found.table)):
        if (before.kind, after.kind) in (("W", "F"), ("W", "B"), ("F", "B")):
            read = reads(after, graph)
            arrived = max((end[one] + (costs.comm_s if one.stage != after.stage else 0.0) for one in read), default=0.0)
            under_way = all(start[one] < start[before] for one in read)
            assert not under_way or arrived <= start[before] or start[after] <= arrived + 1e-9, (before, after)


def reads(action, graph):
    """The actions that an F or B waits for."""
    others = (graph.feeds if action.kind == "F" else graph.returns)[action.stage]
    own = [Action("F", action.microbatch, action.stage)] if action.kind == "B" else []
    return own + [Action(action.kind, action.microbatch, s) for s in others]


def times(table, graph, costs):
    """Start and end of every action, where each starts as soon as it can."""
    start, end, free = {}, {}, [0.0] * len(table)
    left = [list(row) for row in table]
    while any(left):
        for g, row in enumerate(left):
            while row and all(one in end for one in reads(row[0], graph) if row[0].kind != "W"):
                action = row.pop(0)
                read = reads(action, graph) if action.kind != "W" else []
                arrived = max(
                    (end[one] + (costs.comm_s if one.stage != action.stage else 0.0) for one in read), default=0.0
                )
                start[action] = max(free[g], arrived)
                free[g] = end[action] = start[action] + costs.seconds[action.stage, action.kind]
    return start, end


@pytest.mark.parametrize("held", [0.6, 1.2])
def test_a_policy_whose_choices_another_room_does_not_change_is_not_run_again(held, monkeypatch):
    scheduler, runs = greedy_module._ListScheduler, []

    def noted(*given):
        runs.append(given)
        return scheduler(*given)

    monkeypatch.setattr(greedy_module, "_ListScheduler", noted)
    costs = ActionCosts({(s, k): 1 + 0.3 * math.sin(7 * s + i) for s in range(4) for i, k in enumerate("FBW")}, 0.1)
    spared = []
    for bound in (7.0, 6.9, 6.5, 3.6, 3.2):
        room = MemoryRoom((bound,) * 4, (1.0,) * 4, (held,) * 4)
        table = build("zb-auto", chain(4), 12, costs=costs, memory=room)
        taken = len(runs)
        runs.clear()
        assert build("zb-auto", chain(4), 12, costs=replace(costs, memo=Memo()), memory=room) == table
        spared.append(len(runs) - taken)
        runs.clear()
    assert spared[0] == 0
    assert sum(spared) > 0
