"""Clocks are noted where code reads them while it is watched, not where it names them; afterwards all is as it was."""

from __future__ import annotations

import datetime as dates
import time
import uuid
from datetime import datetime
from time import perf_counter
from time import time_ns as now_ns
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.export import export
from autopar.capture.while_traced.clocks import noted_clocks

SCOPE = globals()


def by_module() -> float:
    return time.monotonic()


def by_name() -> float:
    return perf_counter()


def by_another_name() -> int:
    return now_ns()


def by_class() -> bool:
    return isinstance(datetime.now(), datetime) and isinstance(datetime(2020, 1, 1), datetime)


def by_random_name() -> str:
    return uuid.uuid4().hex


def only_sleeps() -> str:
    time.sleep(0)
    return dates.datetime.__name__


def names_one(x: float, late: bool = False) -> float:
    return x * time.time() if late else x


@pytest.mark.parametrize(
    ("function", "noted"),
    [
        (by_module, ["time.monotonic in by_module"]),
        (by_name, ["time.perf_counter in by_name"]),
        (by_another_name, ["time.now_ns in by_another_name"]),
        (by_class, ["datetime.now in by_class"]),
        (by_random_name, ["uuid.uuid4 in by_random_name"]),
        (only_sleeps, []),
        (lambda: names_one(1.0), []),
    ],
)
def test_what_is_read_is_noted(function: FunctionType, noted: list[str]) -> None:
    before = dict(SCOPE)
    with noted_clocks([function, names_one]) as clocks:
        assert function()
    assert clocks == noted
    assert all(SCOPE[name] is value for name, value in before.items())


class Late(nn.Module):
    """Reads a clock in a branch that is not taken, or only to time itself."""

    def __init__(self, times_itself: bool) -> None:
        super().__init__()
        self.first, self.times_itself = nn.Linear(4, 4), times_itself

    def forward(self, x: Tensor) -> Tensor:
        if self.times_itself:
            perf_counter()
        return self.first(x) * names_one(2.0)


@pytest.mark.parametrize(("times_itself", "traces"), [(False, 1), (True, 2)])
def test_a_model_is_traced_again_only_where_it_reads_a_clock(
    times_itself: bool, traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, traced_step = [], export.traced_step
    monkeypatch.setattr(export, "traced_step", lambda *args: seen.append(1) or traced_step(*args))
    program = autopar.compile(Late(times_itself), autopar.ClusterSpec.local(1), (torch.randn(2, 4),))
    assert program.predicted.step_time_s > 0
    assert len(seen) == traces
