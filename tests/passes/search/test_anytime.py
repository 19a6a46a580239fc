"""A search that ends early, by its seconds (of a clock that we wind) or by Ctrl-C: the best plan so far, and what is missing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Options
from autopar.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.price.pricer import OutOfTime
from autopar.passes.search import best_plans
from autopar.passes.search.best_plans import search_plans
from autopar.passes.search.clock import Clock
from autopar.passes.search.stages.pipelines import PipelineSearch
from autopar.passes.search.task import RankedPlans, Task

BATCH = 8
LATER = ("pipelines", "branches side by side")
LEAN = "plans on one mesh with microbatches, recompute and offload"


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@functools.cache
def compiled(**options: Any) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    return autopar.compile(Chain(), autopar.ClusterSpec.local(2), (torch.randn(BATCH, 8),), options=Options(**options))


def task(**options: Any) -> Task:
    """The chain to be planned, on prices of its own."""
    program = compiled()
    batches = Microbatches(program.captured, program.rules)
    return Task(program.ir, program.cluster, program.rules, program.setting, Options(**options), batches)


def seconds() -> Any:
    """A clock that goes on by a second whenever it is looked at."""
    return functools.partial(next, itertools.count())


def test_without_a_bound_no_kind_is_left_out() -> None:
    plans = search_plans(task(), BATCH, seconds())
    assert [candidate.left_out for _, candidate in plans] == [()] * len(plans)
    assert compiled().solver.left_out == ()
    assert "ended before" not in compiled().report()


def test_when_time_is_over_the_best_plan_so_far_is_given_and_can_be_used() -> None:
    plans = search_plans(task(search_s=0), BATCH, seconds())
    (found_for, best), *others = plans
    assert best.left_out == LATER
    assert all(candidate.left_out == () for _, candidate in others)
    assert 0 < best.solution.gap < 1, "the bound is one of all kinds of plans"
    assert found_for.finish(replace(best, lowered=None)).account is not None, "prices are given again"


@pytest.mark.parametrize(("resting", "held", "first"), [(1.0, 2.0, "pipelines"), (2.0, 1.0, LEAN)])
def test_on_many_ranks_pipelines_go_first_for_batches_that_hold_more_than_rests(
    resting: float, held: float, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_one_mesh = best_plans.search_strategies
    monkeypatch.setattr(best_plans, "MANY_RANKS", 1)
    monkeypatch.setattr(best_plans, "search_strategies", lambda task: (on_one_mesh(task)[0], True))
    monkeypatch.setattr(best_plans, "least_bytes", lambda _: (resting, held))
    (_, best), *_ = search_plans(task(search_s=0), BATCH, seconds())
    assert best.left_out[0] == first
    assert set(best.left_out) == {*LATER, LEAN}


def test_a_program_says_what_its_search_left_out() -> None:
    program = compiled(search_s=0)
    assert program.solver.left_out == LATER
    assert "the search was ended before it had looked at all pipelines, branches side by side" in program.report()
    assert autopar.verify(program, Chain(), (torch.randn(BATCH, 8),)).ok


def faster_and_then(end: BaseException) -> Any:
    """A search that finds a plan of twice the speed, and then is ended."""

    def search(pipelines: PipelineSearch, best_s: float) -> Iterator[RankedPlans]:
        (_, candidate), *_ = FIRST
        plan = replace(candidate.plan, predicted={"step_time_s": candidate.step_s / 2})
        yield [(pipelines.task, replace(candidate, plan=plan, account=None))]
        raise end

    return search


FIRST: RankedPlans = []


@pytest.mark.parametrize("end", [OutOfTime(), KeyboardInterrupt()], ids=["out of time", "ctrl-c"])
def test_what_an_interrupted_kind_has_found_counts(end: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    FIRST[:] = search_plans(task(pp=1), BATCH)
    monkeypatch.setattr(PipelineSearch, "plans", faster_and_then(end))
    (_, best), (_, second), *_ = search_plans(task(), BATCH)
    assert best.step_s == pytest.approx(FIRST[0][1].step_s / 2)
    assert second.step_s == FIRST[0][1].step_s
    assert best.left_out == LATER


def test_ctrl_c_before_there_is_a_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Task) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(best_plans, "search_strategies", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search_plans(task(), BATCH)


def test_before_there_is_a_plan_time_is_never_over() -> None:
    clock = Clock(0.5, seconds())
    assert [clock.is_over() for _ in range(3)] == [False] * 3
    clock.has_plan = True
    assert clock.is_over()
    clock.stop()
    assert not clock.is_over()


def test_both_deadlines_of_prices_hold() -> None:
    over = {"outer": False, "inner": False}
    timed = task().pricers.until(lambda: over["outer"]).until(lambda: over["inner"])
    assert timed[Mesh.of(dp=2)]
    for which in over:
        over.update(outer=which == "outer", inner=which == "inner")
        with pytest.raises(OutOfTime):
            timed[Mesh.of(dp=2)]


def test_only_a_terminal_is_told_how_far_the_search_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    search_plans(task(), BATCH, seconds())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    search_plans(task(), BATCH, seconds())
    said = capsys.readouterr().err
    assert "pipelines" in said
    assert "best so far" in said
    assert said.endswith("\r\x1b[K"), "nothing is left of it"


@pytest.mark.parametrize("wrong", [-1, float("nan"), "soon", True])
def test_seconds_are_a_number_that_is_not_negative(wrong: Any) -> None:
    with pytest.raises(InputError, match="search_s"):
        Options(search_s=wrong)
