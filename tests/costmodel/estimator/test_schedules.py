"""Pipelines hold as many microbatches as the rows that cuts and estimates ask say, by the tables that run."""

from __future__ import annotations

import pytest

from autopar.costmodel import simulate
from autopar.costmodel.estimator.schedules import ESTIMATED, microbatches_held
from autopar.ir.actions import StageGraph, Table, splits_backward
from autopar.ir.schedules import SCHEDULES, Schedule

FIXED = [row for row in SCHEDULES.values() if not row.timed and row.shape in ("any", "loop") and row.groups is None]
SHAPES = [(p, V) for p in (2, 3, 4, 6) for V in (1, 2, 3)]


def held(graph: StageGraph, table: Table, end: str) -> tuple[int, ...]:
    """Most (microbatch, stage) of every group that have begun F and not ended B or W, while the simulator runs a table whose
    actions all take a second."""
    seconds = {(stage, kind): 1.0 for stage in range(graph.stages) for kind in "FBW"}
    now, most = [0] * len(graph.groups), [0] * len(graph.groups)
    for event in sorted(simulate.simulate(table, graph, seconds).events, key=lambda event: event.start_s):
        assert event.action is not None
        now[event.group] += event.action.kind == "F"
        most[event.group] = max(most[event.group], now[event.group])
        now[event.group] -= event.action.kind == end
    return tuple(most)


@pytest.mark.parametrize("row", [row for row in FIXED if row.name != "forward"], ids=lambda row: row.name)
def test_a_row_says_what_its_table_holds(row: Schedule) -> None:
    for p, V in SHAPES:
        for M in range(1, 3 * p + 2) if row.serves(V) else ():
            graph = StageGraph.chain(p, V)
            table = row.table(graph, M)
            last = "W" if splits_backward(table) else "B"
            assert [V * row.held_by_group(g, p, M, V) for g in range(p)] == pytest.approx(held(graph, table, last))
            rule = row.in_flight(V)
            by_group = [sum(rule(p * V - 1 - s, p * V, M) for s in group) for group in graph.groups]
            assert by_group == pytest.approx(held(graph, table, "B")), (p, V, M)


@pytest.mark.parametrize("name", [name for name, row in ESTIMATED.items() if row.order])
def test_an_estimate_counts_what_the_table_holds(name: str) -> None:
    row = ESTIMATED[name]
    for p, V in SHAPES:
        if (row.chunks == V) if row.chunks else V > 1:
            for M in range(row.least(p), 3 * p + 2):
                graph = StageGraph.chain(p, V)
                table = SCHEDULES[row.order].table(graph, M)
                counted = [V * microbatches_held(name, g, p, M, V) for g in range(p)]
                assert counted == pytest.approx(held(graph, table, "W" if splits_backward(table) else "B")), (p, V, M)


def test_interleaved_pipelines_hold_no_microbatch_that_there_is_not() -> None:
    """Three microbatches in four groups of two stages: the last group has two whole ones, the others all three."""
    assert [microbatches_held("interleaved", g, 4, 3, 2) for g in range(4)] == [3.0, 3.0, 3.0, 2.0]
