"""The nearest plan that beats a layout changes the fewest decisions, and one capture serves all that are looked at."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.exchange.layout import Layout
from autopar.exchange.to_options import options_of
from autopar.report.answer import over_bytes
from autopar.report.better_plans import better_plans
from autopar.request import Request

CLUSTER = autopar.ClusterSpec.homogeneous(devices=8, device="h100", devices_per_node=8)


def compiled(layout: Layout, width: int, layers: int, rows: int = 16) -> autopar.ParallelProgram:
    """A chain of products under a layout."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.zeros(rows, width)
    return autopar.compile(
        model,
        CLUSTER,
        (x, x),
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        options=options_of(layout),
    )


def test_the_nearest_plan_changes_the_fewest_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(dp=1, tp=8, micro_batch=8192, global_batch=8192)
    program = compiled(layout, 256, 3, 8192)
    captures: list[Any] = []
    capture = Request.capture
    monkeypatch.setattr(Request, "capture", lambda *given: captures.append(given) or capture(*given))
    found = better_plans(program, layout, autopar.Options(), program.compile_again)
    assert not captures
    assert found is not None
    nearest, best = found
    assert (nearest.decisions, nearest.changes) == (1, {"tp": (8, 1), "dp": (1, 8), "micro_batch": (8192, 1024)})
    assert best.step_s <= nearest.step_s < 0.99 * program.predicted.step_time_s
    assert best.decisions >= nearest.decisions
    assert nearest.degrees == {"dp": 8}


@pytest.mark.slow
def test_a_layout_that_does_not_fit_is_beaten_by_what_fits() -> None:
    layout = Layout(dp=8, micro_batch=2, global_batch=16)
    program = compiled(layout, 16384, 24)
    assert over_bytes(program, autopar.Options()) > 0
    found = better_plans(program, layout, autopar.Options(), program.compile_again)
    assert found is not None
    assert all(over_bytes(one.program) <= 0 for one in found)


@pytest.mark.slow
def test_the_best_plan_has_no_better() -> None:
    layout = Layout(dp=8, zero=3, micro_batch=1, global_batch=16)
    program = compiled(layout, 1024, 3)
    best = better_plans(program, layout, autopar.Options(), program.compile_again)
    assert best is not None
    chosen = best[1].program
    assert better_plans(chosen, layout, autopar.Options(), lambda request: replace(chosen)) is None
