"""The worked example of the docs: a schedule is added by registering one row, and everybody who is asked knows it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError, PlanError
from autopar.ir.actions import Action, StageGraph, Table, show_row
from autopar.passes.schedule import SCHEDULES, Schedule, build, in_flight, register
from autopar.passes.schedule.proof import check_table

# --- all that it takes


def eager_one_f_one_b(graph: StageGraph, m: int) -> Table:
    """1F1B with twice the warm-up, so that a late message does not stall the stage that waits for it."""
    table = []
    for (stage,) in graph.groups:
        warmup = min(2 * graph.depth[stage], m)
        row = [Action("F", mb, stage) for mb in range(warmup)]
        for b in range(m):
            if b + warmup < m:
                row.append(Action("F", b + warmup, stage))
            row.append(Action("B", b, stage))
        table.append(tuple(row))
    return tuple(table)


EAGER = Schedule("eager-1f1b", "1F1B with twice the warm-up: hides late messages", eager_one_f_one_b, tried=6)

# --- and what it gives


@pytest.fixture
def eager() -> Iterator[str]:
    register(EAGER)
    yield EAGER.name
    del SCHEDULES[EAGER.name]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(
    model: nn.Module, schedule: str, **options: int
) -> tuple[autopar.ParallelProgram, tuple[torch.Tensor, torch.Tensor]]:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(2),
        batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=autopar.Options(schedule=schedule, pp=2, microbatches=4, **options),
    )
    return program, batch


def test_a_new_schedule_is_a_proven_step(eager: str) -> None:
    graph = StageGraph.chain(3)
    table = build(eager, graph, 6)
    check_table(table, graph, 6)
    assert in_flight(table, graph) == (5, 3, 1)


def test_a_new_schedule_compiles_computes_the_same_and_is_reported(eager: str) -> None:
    model = Tower()
    program, batch = compiled(model, eager)
    assert program.plan.schedule == eager
    assert not program.plan.table, "its table follows from the pipeline's shape, so the plan only names it"
    assert [show_row(row) for row in program.lowered.table] == [
        "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0",
        "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1",
    ]
    assert f"schedule {eager}: " in program.report()
    assert autopar.verify(program, model, batch).max_error < 1e-9


def test_a_new_schedule_that_is_tried_by_default_competes(eager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in [row for row in SCHEDULES.values() if row.name != eager]:
        monkeypatch.setitem(SCHEDULES, row.name, replace(row, tried=0))
    program, _ = compiled(Tower(), "auto", chunks=1)
    assert program.plan.schedule == eager


def test_names_are_taken_once_and_gone_when_they_are_removed(eager: str) -> None:
    with pytest.raises(PlanError, match="a schedule 'eager-1f1b' exists already"):
        register(EAGER)
    row = SCHEDULES.pop(eager)
    with pytest.raises(InputError, match="'eager-1f1b' is unknown; choose auto or one of none, forward, gpipe, 1f1b"):
        compiled(Tower(), eager)
    register(row)
