"""Plans on one mesh where memory is short: what is found before pipelines are made bounds them, and changes no choice."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import autopar
from autopar import ClusterSpec, Options
from autopar.ir.mesh import Mesh
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.search import best_plans
from autopar.passes.search.best_plans import search_plans
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.one_mesh import short_memory
from autopar.passes.search.one_mesh.joint import JointSearch
from autopar.passes.search.one_mesh.short_memory import ShortMemorySearch
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage
from tests.zoo.models import BY_NAME


@functools.cache
def compiled(name: str) -> autopar.ParallelProgram:
    zoo = BY_NAME[name]
    torch.manual_seed(0)
    return autopar.compile(zoo.make(), ClusterSpec.local(2), zoo.batch(), loss_fn=zoo.loss_fn, optimizer=zoo.optimizer)


def task(name: str, share: float = 2.0) -> Task:
    """A zoo model to be planned in a share of the memory that its plan takes, on prices of its own."""
    program = compiled(name)
    options = Options(memory_bytes=share * program.predicted.peak_bytes, explain_s=0.0)
    batches = Microbatches(program.captured, program.rules)
    return Task(program.ir, program.cluster, program.rules, program.setting, options, batches)


def batch_of(name: str) -> int:
    return len(BY_NAME[name].batch()[0])


def search_of(one: Task, name: str) -> ShortMemorySearch:
    return ShortMemorySearch(TasksByCount(one, batch_of(name)))


def told(ranking: RankedPlans) -> list[tuple[float, object]]:
    return [(plan.step_s, plan.plan) for _, plan in ranking]


@pytest.mark.parametrize("share", [0.9, 2.0])
def test_what_was_found_before_is_found_once_and_changes_nothing(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mesh] = []
    within_limit = short_memory.fastest_within_limit

    def noted(owner: Task, joint: JointSearch, useless_from_s: float) -> PricedPlan | Shortage:
        asked.append(joint.fastest.problem.mesh)
        return within_limit(owner, joint, useless_from_s)

    monkeypatch.setattr(short_memory, "fastest_within_limit", noted)
    one = task("mlp", share)
    *_, alone = [[], *search_of(one, "mlp").plans(math.inf)]
    asked_alone = [asked.pop() for _ in list(asked)]
    search = search_of(one, "mlp")
    first_s = search.first_s(math.inf, math.inf)
    assert len(asked) == 1
    *_, later = [[], *search.plans(math.inf)]
    assert told(later) == told(alone)
    assert asked[::-1] == asked_alone
    assert all(first_s >= step_s for step_s, _ in told(later)[:1])


def test_nothing_is_looked_for_that_a_rival_beats_even_by_the_bound() -> None:
    search = search_of(task("mlp"), "mlp")
    assert search.first_s(0.0, math.inf) == math.inf
    assert not search.faster
    assert search.first_s(math.inf, math.inf) < math.inf
    assert search.first_s(math.inf, math.inf) == math.inf, "what was looked at is not looked at again"


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "moe"))])
def test_the_chosen_plan_is_the_same_where_nothing_bounds_pipelines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_one_mesh = best_plans.search_strategies
    monkeypatch.setattr(best_plans, "MANY_RANKS", 1)
    monkeypatch.setattr(best_plans, "search_strategies", lambda task: (on_one_mesh(task)[0], True))
    monkeypatch.setattr(best_plans, "least_bytes", lambda _: (1.0, 2.0))
    bounded = search_plans(task(name), batch_of(name))
    monkeypatch.setattr(ShortMemorySearch, "first_s", lambda *_: math.inf)
    free = search_plans(task(name), batch_of(name))
    assert told(bounded)[0] == told(free)[0]
