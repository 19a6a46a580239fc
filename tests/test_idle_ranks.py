"""Plans that leave ranks idle where a step is faster so: which numbers are looked at, what is said, and that all ranks end."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import resized
from autopar.errors import PlanError
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.search import best_plans
from autopar.passes.search.idle import fewer_ranks
from autopar.passes.search.task import Task
from autopar.runtime.errors import RuntimeProgramError
from autopar.runtime.program.worlds import manifest_for
from tests.warm import torchrun

ROWS = 16
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


class Net(nn.Module):
    """Blocks whose dims are powers of two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x - y).square().mean()


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, 128, generator=draw, dtype=torch.float64) for _ in range(2))
    return x, y


@functools.cache
def compiled(ranks: int, rows: int = ROWS, **options: Any) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    cluster = autopar.ClusterSpec.local(ranks)
    return autopar.compile(Net().double(), cluster, batch(rows), optimizer=ADAMW, options=autopar.Options(**options))


def numbers(cluster: autopar.ClusterSpec, rows: int, **options: Any) -> list[int]:
    """The smaller numbers of ranks that are looked at."""
    program = compiled(1, rows)
    batches = Microbatches(program.captured, program.rules)
    options = autopar.Options(**options)
    return fewer_ranks(Task(program.ir, cluster, program.rules, program.setting, options, batches))


def h100(ranks: int) -> autopar.ClusterSpec:
    return resized(autopar.ClusterSpec.preset("dgx-h100", nodes=-(-ranks // 8)), ranks)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("ranks", "rows", "looked_at"),
    [
        (1, 24, []),
        (2, 24, []),
        (4, 24, []),  # a power of two that shares the rows
        (5, 24, [4, 3]),
        (6, 24, [5, 4, 3]),
        (7, 24, [6, 4]),
        (9, 24, [8, 6]),  # the ninth is on another node
        (16, 32, [8]),  # two nodes
        (24, 48, [16, 8]),
        (3, 7, [2, 1]),
    ],
)
def test_few_smaller_numbers_are_looked_at(ranks: int, rows: int, looked_at: list[int]) -> None:
    assert numbers(h100(ranks), rows) == looked_at


@pytest.mark.parametrize("options", [{"strategy": "zero3"}, {"mesh": {"dp": 5}}, {"pp": 2}, {"idle_ranks": False}])
def test_options_that_speak_of_ranks_have_work_for_all(options: dict[str, Any]) -> None:
    assert numbers(h100(5), 24, **options) == []


def test_a_rank_that_does_not_help_is_idle_and_the_report_says_why() -> None:
    program, on_all = compiled(5), compiled(5, idle_ranks=False)
    assert (program.plan.ranks, on_all.plan.ranks, program.cluster.size) == (4, 5, 5)
    assert program.predicted.step_time_s < on_all.predicted.step_time_s
    (line,) = (line for line in program.report().splitlines() if line.startswith("idle: "))
    assert line.startswith("idle: rank 4 of 5: the best plan found for all of them takes ")
    assert "idle: " not in on_all.report()
    result = autopar.verify(program, Net().double(), batch())
    assert result.ok
    assert result.max_error <= 1e-9


@pytest.mark.parametrize("rows", [ROWS, pytest.param(7, marks=pytest.mark.slow)])
def test_a_rank_more_never_makes_a_step_slower(rows: int) -> None:
    steps_s = [compiled(ranks, rows).predicted.step_time_s for ranks in (1, 3, 4, 5)]
    assert steps_s == sorted(steps_s, reverse=True)


def test_the_best_plan_on_all_ranks_bounds_those_on_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []
    program = compiled(1, 24)

    def on_all(task: Task, batch: int, rankings: dict[str, Any]) -> Any:
        def search(best_s: float) -> Any:
            asked.append((task.cluster.size, best_s))
            best: Any = SimpleNamespace(step_s=1.0)
            yield [(task, best)]

        return [("plans", search)]

    monkeypatch.setattr(best_plans, "_on_all", on_all)
    batches = Microbatches(program.captured, program.rules)
    task = Task(program.ir, h100(5), program.rules, program.setting, autopar.Options(), batches)
    best_plans.search_plans(task, 24)
    assert asked == [(5, math.inf), (4, best_plans.NEAR), (3, best_plans.NEAR)]


def test_plans_with_idle_ranks_are_replayed_on_their_cluster_alone() -> None:
    program = compiled(5)
    again = autopar.compile(
        Net().double(), program.cluster, batch(), optimizer=ADAMW, plan=autopar.Plan.from_dict(program.plan.to_dict())
    )
    assert (again.plan, again.predicted) == (program.plan, program.predicted)
    assert program.with_plan(program.plan).predicted == program.predicted
    with pytest.raises(PlanError, match="this plan is for 4 ranks, the cluster has 6"):
        autopar.compile(
            Net().double(), autopar.ClusterSpec.local(6), batch(), optimizer=ADAMW, plan=replace(program.plan)
        )


def test_buckets_have_the_same_ranks() -> None:
    sizes = {"0": {0: (ROWS, ROWS // 2)}, "1": {0: (ROWS, ROWS // 2)}}
    program = autopar.compile(Net().double(), autopar.ClusterSpec.local(5), batch(), optimizer=ADAMW, buckets=sizes)
    assert [one.plan.ranks for one in program.of_buckets] == [4, 4]
    assert len(program.run([batch(), batch(ROWS // 2)]).losses) == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "last"), [(5, 1), pytest.param(5, 3, marks=pytest.mark.slow), pytest.param(4, 3, marks=pytest.mark.slow)]
)
def test_all_ranks_that_are_started_end_well(ranks: int, last: int, tmp_path: Path) -> None:
    """last: how many of the runs, the last of which have a run directory."""
    out = compiled(5).save(tmp_path / "out", also=[2])
    assert manifest_for(out, 2).started == 2
    with pytest.raises(RuntimeProgramError, match=r"compiled for 4 ranks .* but WORLD_SIZE is 5"):
        manifest_for(out, 5)  # a loop of one's own has no idle ranks
    run = ["--run-dir", tmp_path / "run"]
    for options in ([], run, run)[-last:]:
        steps = 2 if not options else 4 if not (tmp_path / "run").exists() else 6
        done = torchrun(ranks, out / "run.py", "--steps", steps, *options)
        assert done.returncode == 0, done.stderr
        assert ("rank 4 is idle: this run has a plan for 4 ranks" in done.stdout) is (ranks == 5)
        assert f"step {steps}  loss" in done.stdout
