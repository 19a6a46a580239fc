"""The search puts causal sequences in zigzag order where a plan cuts their rows into blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import ClusterSpec, Options, ParallelProgram
from autopar.passes.search import zigzag
from autopar.passes.search.task import Task
from autopar.passes.search.zigzag import blocks_of_rows
from tests.passes.order.models import Rotary, Sliced, tokens

LONG = 1 << 17
NODE = ClusterSpec.preset("dgx-h100", 1)


def planned(model: nn.Module, cluster: ClusterSpec = NODE, **options: object) -> ParallelProgram:
    """One long sequence, by shapes alone."""
    ids = torch.zeros(1, LONG, dtype=torch.long, device="meta")
    return autopar.compile(model.to("meta"), cluster, (ids, ids), options=Options(**options))  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"mesh": {"cp": 8}}, {"mesh": {"cp": 8}, "recompute": "full"}, {"pp": 2}, {}])
def test_blocks_of_rows_are_planned_once_more_in_order(options: dict[str, object]) -> None:
    natural, best = planned(Rotary(LONG), order=0, **options), planned(Rotary(LONG), **options)
    blocks = blocks_of_rows(best.plan, best.ir)
    assert blocks > 1
    assert best.plan.order == blocks == blocks_of_rows(natural.plan, natural.ir)
    assert best.predicted.step_time_s < 0.75 * natural.predicted.step_time_s
    assert f"zigzag order of {2 * blocks} chunks" in best.report()
    assert any(one.plan == natural.plan for one in best.alternatives)


def test_a_program_that_cannot_be_ordered_keeps_its_plan() -> None:
    natural, best = planned(Sliced(LONG), order=0, mesh={"cp": 8}), planned(Sliced(LONG), mesh={"cp": 8})
    assert best.plan == natural.plan
    assert best.plan.order == 0


def test_whole_rows_are_left_as_they_are() -> None:
    program = autopar.compile(Rotary(), ClusterSpec.local(4), tokens(), options=Options(mesh={"dp": 4}))
    assert blocks_of_rows(program.plan, program.ir) == 1
    assert program.plan.order == 0


@pytest.mark.parametrize(
    ("finest", "blocks", "orders"),
    [(1, (8,), []), (3, (8, 4), [3, 8]), (16, (8, 2), [16]), (4, (8, 1), [8]), (6, (2, 4), [6, 4])],
)
def test_all_meshes_are_planned_in_every_order_that_a_plan_of_them_may_need(
    finest: int, blocks: tuple[int, ...], orders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of 48 ranks share a row of 16, which does not balance the eight blocks of a plan that shares rows unevenly."""
    task = SimpleNamespace(program=None)
    plans: Any = [(task, SimpleNamespace(plan=SimpleNamespace(stages=[0], n=n), step_s=1.0)) for n in blocks]
    plans += [(task, SimpleNamespace(plan=SimpleNamespace(stages=[0, 1], n=5), step_s=1.0))]
    plans += [(task, SimpleNamespace(plan=SimpleNamespace(stages=[0], n=7), step_s=2.0))]
    monkeypatch.setattr(zigzag, "most_ranks_a_row", lambda _: finest)
    monkeypatch.setattr(zigzag, "blocks_of_rows", lambda plan, _: plan.n)
    assert zigzag.orders_for(plans, 1.0) == orders


@pytest.mark.slow
def test_ranks_with_rows_of_their_own_have_no_order_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(task: Task, order: int) -> Task:
        raise AssertionError("every rank has a row")

    monkeypatch.setattr(Task, "in_order", search)
    assert autopar.compile(Rotary(), ClusterSpec.local(4), tokens()).plan.order == 0


@pytest.mark.slow
def test_the_mesh_is_chosen_in_order() -> None:
    """In the natural order eight blocks of rows and two of heads are fastest, in order sixteen blocks of rows."""
    nodes = ClusterSpec.preset("dgx-a100", 2)
    best, of_eight = planned(Rotary(LONG), nodes), planned(Rotary(LONG), nodes, order=8)
    assert best.plan.order == blocks_of_rows(best.plan, best.ir) == 16
    assert best.predicted.step_time_s < of_eight.predicted.step_time_s
