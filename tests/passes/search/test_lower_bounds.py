"""No plan takes less than the lower bounds say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.capture.build import capture_program
from autopar.cluster import ClusterSpec, resized
from autopar.ir.mesh import Mesh
from autopar.ir.schedules import SCHEDULES
from autopar.ir.setting import Setting
from autopar.options import Options
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.lower.cut import cut
from autopar.passes.memory.walk import action_bytes
from autopar.passes.recompute.least_held import least_held_bytes
from autopar.passes.rules.book import RuleBook
from autopar.passes.search.lower_bounds import LeastWork, could_fit, least_bytes
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.stages.cuts import CutSearch
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import Task
from tests.passes.memory.test_held import parts
from tests.passes.recompute.recomputed import with_policy
from tests.passes.schedule.pipelines import IN_A_LOOP, IN_A_V
from tests.zoo.models import MODELS, ZooModel
from tests.zoo.pipelined import on_ranks

MESHES = [Mesh.of(dp=1), Mesh.of(dp=4), Mesh.of(dp=2, tp=2)]


@pytest.mark.few(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("width", [16, 4096], ids=["launches decide", "products decide"])
def test_no_rank_is_busy_for_less_than_the_bound(width: int, mesh: Mesh) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))), torch.zeros(2 * width, width)
    captured, rules = capture_program(model, (x, x), nn.functional.mse_loss, 1), RuleBook()
    batches = Microbatches(captured, rules)
    task = Task(captured.program, ClusterSpec.preset("dgx-h100"), rules, Setting(2), Options(microbatches=2), batches)
    plan = SubmeshPlans(TasksByCount(task, 2 * width)).on(2, mesh)
    assert plan is not None
    units, least_s = plan.units, float(LeastWork.of(task).busy_s(mesh.size).sum())
    busy_s = float(sum(seconds.sum() for seconds in (units.forward_s, units.backward_s, units.weights_s)))
    assert 0.2 * busy_s < least_s <= busy_s * (1 + 1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("zoo", MODELS, ids=str)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_no_stage_of_any_plan_holds_less_than_the_bound(zoo: ZooModel, policy: str) -> None:
    for _, program, _, stage in parts(zoo, policy):
        if program.training:
            held = action_bytes(stage)["F"].end * stage.mesh.size
            assert least_held_bytes(program, policy) <= held
            assert least_held_bytes(program, "auto") <= held
            if stage.mesh.size == 1:
                assert least_held_bytes(program, policy) >= 0.9 * held


def test_inputs_that_rest_or_are_shared_cost_nothing() -> None:
    """A first stage keeps the batch alone, a second one what it receives."""
    made = on_ranks("mlp", 2, 1)
    first, second, _ = cut(made.ir, [(0, 1), (1, 2), (2, len(made.ir.calls))])
    assert least_held_bytes(first, "full") == 0.0
    ((_, received),) = second.inputs
    assert 0.99 * received.nbytes < least_held_bytes(second, "full") <= received.nbytes


@pytest.mark.few(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto", *IN_A_LOOP, *IN_A_V])
@pytest.mark.parametrize("seed", range(3))
def test_no_pipeline_peaks_below_the_bound(schedule: str, seed: int) -> None:
    """The bound of random cuts, which in-flight rules say how many microbatches are held, is below the peaks of all groups."""
    base = on_ranks("llama", 4, 4)
    plan = autopar.random_plan(base, seed, pp=2, schedule=schedule, pieces=1)
    made = base.with_plan(with_policy(base, plan, "full"))
    sizes = [made.plan.stages[group[0]].mesh.size for group in made.account.graph.groups]
    room = [n * peak for n, peak in zip(sizes, made.account.peaks, strict=True)]
    row, V, p = SCHEDULES[schedule], len(made.plan.stages) // len(sizes), len(sizes)
    rule, M = row.in_flight(V), made.plan.microbatches
    counts = [1.0] * p if V > 1 else [rule(after, p, M) for after in reversed(range(p))]
    setting = replace(made.setting, microbatches=M)
    task = Task(made.ir, made.cluster, made.rules, setting, Options(recompute="full"), None)  # type: ignore[arg-type]
    bound = least_bytes(task)
    assert could_fit(task, bound, room, counts)
    assert not could_fit(task, bound, [0.1 * nbytes for nbytes in room], counts)


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-auto", *IN_A_LOOP, *IN_A_V])
@pytest.mark.parametrize("seed", range(3))
def test_no_pipeline_takes_less_than_the_bound(schedule: str, seed: int) -> None:
    """Random cuts on random meshes, in one microbatch and in several."""
    cluster = resized(ClusterSpec.preset("dgx-h100"), 4)
    for base in (on_ranks("llama", 4, 1), on_ranks("llama", 4, 4)):
        there = replace(base, request=replace(base.request, cluster=cluster))
        made = there.with_plan(autopar.random_plan(there, seed, pp=2, schedule=schedule, pieces=1))
        M, sizes = made.plan.microbatches, {stage.mesh.size for stage in made.plan.stages}
        task = Task(made.ir, cluster, made.rules, made.setting, Options(), None)  # type: ignore[arg-type]
        work = LeastWork.of(task)
        bounds_s = [work.pipeline_s(M, 4, size, sizes) for size in sizes]
        assert 0 < max(bounds_s) <= made.account.step_time_s


@pytest.mark.parametrize("width", [16, 4096], ids=["launches decide", "products decide"])
def test_good_cuts_take_little_more_than_the_bound(width: int) -> None:
    """Cuts on the best plans of submeshes, in any number of microbatches, of equal or of other sizes."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))), torch.zeros(8, width)
    captured, rules = capture_program(model, (x, x), nn.functional.mse_loss, 1), RuleBook()
    cluster = resized(ClusterSpec.preset("dgx-h100"), 4)
    task = Task(captured.program, cluster, rules, Setting(1), Options(), Microbatches(captured, rules))
    search = CutSearch(SubmeshPlans(TasksByCount(task, 8)), math.inf)
    ratios = []
    for draft in search.rough():
        sizes, work = {mesh.size for mesh in draft.used_meshes()}, search.submeshes.least_work(draft.microbatches)
        ratios += [work.pipeline_s(draft.microbatches, 4, size, sizes) / draft.step_s for size in sizes]
    assert 0.5 < max(ratios) <= 1


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_launches_of_few_microbatches_tell_which_numbers_of_more_are_too_many(name: str) -> None:
    """The launches of one of two microbatches, as often as there are microbatches, are part of the bound of any number; and
    programs are divided no further than they allow."""
    made, cluster = on_ranks(name, 4, 1), resized(ClusterSpec.preset("dgx-h100"), 4)
    batches = Microbatches(made.captured, made.rules)
    task = Task(made.ir, cluster, made.rules, Setting(1), Options(), batches)
    tasks = TasksByCount(task, 8)
    several = [M for M in tasks.counts() if M > 1]
    few = LeastWork.of(tasks.at(several[0]))
    for M in several:
        for least, sizes in ((1, {1, 2}), (2, {2}), (2, {2, 4})):
            assert 0 < few.launches_s(M, 4, least) <= LeastWork.of(tasks.at(M)).pipeline_s(M, 4, max(sizes), sizes)
    asked: list[tuple[int, int]] = []
    assert tasks.counts(lambda *pair: asked.append(pair) or pair[1] <= 2) == [1, 2]
    assert asked == [(2, 4)]


def test_the_bound_is_what_a_pipeline_without_waste_takes() -> None:
    """Products that all ranks share, launches of every group, the longest call, and a microbatch on its way there and back."""
    work = LeastWork(np.array([8.0, 4.0]), np.array([6.0, 3.0]), np.array([1.0, 1.0]))
    assert work.pipeline_s(4, 4, 2, {2}) == 4 * max((8 + 4) / 4, 4), "the longest call, on two ranks"
    assert work.pipeline_s(1, 4, 1, {1}) == 6 + 3, "one microbatch passes one rank after another"
    launched = replace(work, launched_s=np.array([9.0, 9.0]))
    assert launched.pipeline_s(2, 4, 2, {2}) == 2 * 18 * 2 / 4
    assert launched.pipeline_s(2, 4, 2, {1, 2}) == 2 * max((9 + 9 + 9) / 4, 9), "one call at least is on two ranks"
