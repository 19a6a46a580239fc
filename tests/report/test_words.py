"""The numbers of a report are those of the plan."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.compiled import Alternative, short_bytes
from autopar.ir.text import time_text
from autopar.passes.account.spent import spent
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.report.answer import why_not

SGD = functools.partial(torch.optim.SGD, lr=0.1)
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}


class Layers(nn.Module):
    """The loss of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()


def program(**options: object) -> autopar.ParallelProgram:
    return autopar.compile(
        Layers(), autopar.ClusterSpec.local(2), (torch.randn(8, 64),), optimizer=SGD, options=autopar.Options(**options)
    )


def near(number: str, unit: str, units: dict[str, float]) -> object:
    """A number as it is read, which has three digits."""
    return pytest.approx(float(number) * units[unit], rel=6e-3)


@pytest.mark.parametrize(
    "options",
    [{"mesh": {"dp": 2}, "strategy": "dp"}, {"mesh": {"dp": 2}, "strategy": "zero3"}, {"pp": 2, "microbatches": 2}],
)
def test_a_report_says_step_communication_and_peak_as_predicted(options: dict[str, object]) -> None:
    made = program(**options)
    text, predicted = made.report(), made.predicted
    amount = r"([\d.e+]+) (\S+)"
    (found,) = re.findall(rf"predicted: step {amount}, of which communication {amount}; peak {amount} per rank", text)
    assert predicted.step_time_s == near(*found[:2], SECONDS)
    assert predicted.comm_time_s == near(*found[2:4], SECONDS)
    assert predicted.peak_bytes == near(*found[4:], BYTES)
    assert len({predicted.step_time_s, predicted.comm_time_s}) == 2
    (kinds,) = re.findall(r" per rank \((.*)\)", text)
    parts = {
        kind: float(number) * BYTES[unit]
        for kind, number, unit in re.findall(rf"([a-z ]+) {amount}", kinds.replace(",", ""))
    }
    assert sum(parts.values()) == pytest.approx(predicted.peak_bytes, rel=1e-2)
    sent = re.findall(rf"  (\w+) over (\w+): (\d+) times, {amount} in all, {amount}", text)
    of_kinds: dict[tuple[str, str], list[float]] = {}
    for one in made.account.collectives:
        row = of_kinds.setdefault((one.kind, one.axis), [0.0, 0.0, 0.0])
        for place, value in enumerate((one.times, one.times * one.nbytes, one.time_s)):
            row[place] += value
    assert {(kind, axis) for kind, axis, *_ in sent} == set(of_kinds)
    for kind, axis, times, nbytes, unit, seconds, second_unit in sent:
        want = of_kinds[kind, axis]
        assert int(times) == want[0]
        assert want[1] == near(nbytes, unit, BYTES)
        assert want[2] == near(seconds, second_unit, SECONDS)


def test_a_faster_plan_that_does_not_fit_lost_for_want_of_room() -> None:
    made = program(mesh={"dp": 2}, strategy="zero3")
    own_s = made.predicted.step_time_s
    other = Alternative("other", made.plan, replace(made.predicted, step_time_s=own_s / 2), short_bytes=3e6)
    assert why_not(other, made).startswith("does not fit: 3 MB more than a rank has room for")
    assert "does not fit" not in why_not(replace(other, short_bytes=0.0), made)
    assert why_not(replace(other, short_bytes=0.0), made).startswith(f"{time_text(own_s / 2)} below the plan's step")
    cluster = made.cluster
    lowered = PricedPlan(made.plan, None, made.lowered, made.account)  # type: ignore[arg-type]
    task: Any = SimpleNamespace(cluster=cluster, short_bytes=lambda plan, counted: 5.0)
    assert short_bytes(task, lowered, 2 * own_s) == 5.0
    assert short_bytes(task, lowered, own_s) == 0.0
    assert short_bytes(task, replace(lowered, account=None), 2 * own_s) == 0.0


def test_plans_that_tie_and_plans_that_are_only_priced_are_told_as_what_they_are() -> None:
    made = program(mesh={"dp": 2}, strategy="zero3")
    own = made.predicted
    tied = Alternative("other", made.plan, replace(own, step_time_s=own.step_time_s * (1 - 1e-12)), spent(made.account))
    assert why_not(tied, made) == "as fast, and it holds as many bytes"
    slower = replace(tied, predicted=replace(own, step_time_s=2 * own.step_time_s), spent=None)
    more = time_text(own.step_time_s)
    assert why_not(slower, made) == f"{more} slower as it is priced before overlap is looked for"
