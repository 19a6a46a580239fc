"""Seconds of plans on ranks that are slower than described, as the runtime plays them: those of the compiler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.codegen.pipeline import pipeline_module
from autopar.costmodel.simulate import makespan_s
from autopar.runtime.comm.mesh import Shares
from autopar.runtime.program.actions import parse_row
from autopar.runtime.step.paced import PacedPlan, seconds_at
from tests.runtime.step.test_rebalance_stages import compiled


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "zb-h1"}, {"schedule": "zb-v", "blocks": 4}])
def test_seconds_are_those_of_the_compiler_whichever_stage_is_slow(options):
    program = compiled(4, pp=2, **options)
    paced = PacedPlan.of(pipeline_module(program.pipeline))
    assert paced is not None
    assert paced.ranks == 4
    assert paced.seconds([1.0] * 4) == pytest.approx(program.predicted.step_time_s, rel=1e-12)
    counted, graph = program.decision.account, program.lowered.graph
    beside_s = counted.step_time_s - counted.step.span_s
    for group, factor in itertools.product(range(2), (1.5, 3.0)):
        slower = {key: s * (factor if key[0] in graph.groups[group] else 1.0) for key, s in counted.seconds.items()}
        expected = makespan_s(counted.table, graph, slower, counted.hand_over) + beside_s
        slowness = [factor if rank // 2 == group else 1.0 for rank in range(4)]
        assert paced.seconds(slowness) == pytest.approx(expected, rel=1e-12)


def two_stages(*meshes: dict[str, int]) -> PacedPlan:
    """Two stages whose actions take 1 s each, in one microbatch."""
    rows = tuple(map(parse_row, ("F0.0 B0.0", "F0.1 B0.1")))
    sends = (("value", 0, 1), ("gradient", 1, 0))
    placed = tuple(zip(meshes, itertools.accumulate((sum(m.values()) for m in meshes[:-1]), initial=0), strict=True))
    return PacedPlan(rows, ((0,), (1,)), placed, sends, 6.5, ((1.0, 0.5, 0.5),) * 2, {(0, 1): 1.0}, (6, 6))


def test_rows_of_a_group_are_taken_to_follow_its_speeds():
    paced = two_stages({"dp": Shares((2, 2))}, {"dp": 1})
    assert paced.seconds([1.0, 1.0, 1.0]) == pytest.approx(6.5)
    assert paced.seconds([1.0, 3.0, 1.0]) == pytest.approx(6.5 + 2 * 0.5)  # 3 units of 1 s, where 2 were planned
    assert paced.seconds([1.0, 1.0, 3.0]) == pytest.approx(6.5 + 2 * 2.0)
    assert two_stages({"dp": 2}, {"dp": 1}).seconds([1.0, 3.0, 1.0]) == pytest.approx(6.5 + 2 * 2.0)


def test_a_program_whose_rows_stay_says_nothing_of_seconds():
    assert PacedPlan.of(pipeline_module(compiled(2, pp=2, rebalance=False).pipeline)) is None


def test_slow_places_are_the_ranks_that_each_plan_has_there():
    plans = [two_stages({"dp": 1}, {"dp": 1})] * 2
    lopsided = [replace(plan, actions_s=((1.0, 0.5, 0.5), (0.5, 0.25, 0.25))) for plan in plans]
    straight, swapped = seconds_at(lopsided, [(0, 1), (1, 0)], [6.0, 2.0])
    assert straight - swapped == pytest.approx(2.0)  # 3 · 2 + 1 and 2 + 3 · 1 seconds of actions
