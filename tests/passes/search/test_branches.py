"""Branches side by side: found in the program, chosen where they are predicted faster, and equal to one device."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
import autopar.api
from autopar import ClusterSpec, Options, ParallelProgram, Plan
from autopar.capture import capture_program
from autopar.capture.exported import Captured
from autopar.errors import PlanError
from autopar.ir.actions import StageGraph, show_row
from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.branch import SegmentGroup, evaluate, solve_branches
from autopar.passes.lower import lower
from autopar.passes.lower.cut import cut, cut_points
from autopar.passes.lower.pipeline import stage_graph
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.schedule import build
from autopar.passes.schedule.grouped import group_graph, grouped
from autopar.passes.schedule.proof import deadlock
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.stages.branches import search_branches
from autopar.passes.search.stages.segments import branches, calls_beside, segments, work_shares
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import Task
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.plans import stage_plan
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.proof.random_plans import random_choice, random_mesh
from tests.branching import Driving, driving_batch, driving_loss
from tests.passes.branch.test_branch import partitions, random_problem
from tests.passes.schedule.pipelines import dags
from tests.zoo.models import BY_NAME

SGD = functools.partial(torch.optim.SGD, lr=1e-2)


def slow_network() -> ClusterSpec:
    """Four nodes of two: what crosses between them is dear."""
    return ClusterSpec.homogeneous(
        devices=8,
        device="cpu",
        devices_per_node=2,
        intra_bandwidth_Bps=4e9,
        inter_bandwidth_Bps=1e8,
        intra_latency_s=5e-6,
        inter_latency_s=50e-6,
    )


def fast_network() -> ClusterSpec:
    return ClusterSpec.homogeneous(
        devices=8,
        device="cpu",
        devices_per_node=2,
        intra_bandwidth_Bps=1e12,
        inter_bandwidth_Bps=1e12,
        intra_latency_s=1e-9,
        inter_latency_s=1e-9,
    )


def compiled(cluster: ClusterSpec, options: Options | None = None, tied: bool = False) -> ParallelProgram:
    torch.manual_seed(0)
    return autopar.compile(
        Driving(tied=tied), cluster, driving_batch(16), loss_fn=driving_loss, optimizer=SGD, options=options
    )


@functools.cache
def beside_each_other() -> ParallelProgram:
    return compiled(slow_network())


def ranks_of(program: ParallelProgram, module: str) -> set[int]:
    """The ranks that run a call of the module."""
    found: set[int] = set()
    for stage in program.plan.stages:
        if any(c.path.split(".")[0] == module for c in program.ir.calls[slice(*stage.calls)]):
            found |= set(range(stage.mesh.offset, stage.mesh.offset + stage.mesh.size))
    return found


# --- chosen where it pays ---------------------------------------------------------------------------------------------


def test_encoders_get_ranks_of_their_own_where_the_network_is_slow() -> None:
    program = beside_each_other()
    places = [ranks_of(program, name) for name in ("camera", "lidar", "radar")]
    assert all(places)
    assert all(not a & b for a, b in itertools.combinations(places, 2))
    assert len(places[0]) >= len(places[2]), "the heaviest encoder has no fewer ranks than the lightest"
    assert set().union(*places) < set(range(8))
    assert "branch placement" in program.report()
    for other in program.alternatives:
        assert program.predicted.step_time_s < other.predicted.step_time_s
    assert any(len(a.plan.stages) == 1 for a in program.alternatives)


@pytest.mark.slow
def test_side_by_side_is_predicted_faster_than_every_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    program = beside_each_other()
    monkeypatch.setattr(autopar.passes.search.best_plans, "search_branches", lambda *_: [])
    assert program.predicted.step_time_s < compiled(slow_network()).predicted.step_time_s
    chain = compiled(slow_network(), Options(pp=2))
    assert program.predicted.step_time_s < chain.predicted.step_time_s


def test_side_by_side_equals_one_device() -> None:
    program = beside_each_other()
    assert autopar.verify(program, program.model, driving_batch(16)).max_error <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("orders", [1, 2])
def test_groups_of_a_mixed_cluster_have_devices_of_one_kind_each_whatever_the_order_of_machines(orders: int) -> None:
    """The first order of machines mixes the kinds, the second does not."""
    network = slow_network()
    fast, slow = network.device(0), replace(network.device(0).slower(1.5), name="slower")
    listed = ((slow, fast, slow, fast), (fast, fast, slow, slow))[:orders]
    clusters = [replace(network, devices=tuple((2, device) for device in order)) for order in listed]
    programs = [compiled(cluster, Options(microbatches=2)) for cluster in clusters]
    for program in programs:
        assert "branch placement" in program.report()
        for stage in program.plan.stages:
            ranks = range(stage.mesh.offset, stage.mesh.offset + stage.mesh.size)
            assert len({program.cluster.device(rank) for rank in ranks}) == 1
    mixed = programs[0]
    for other in programs:
        assert other.predicted == mixed.predicted
        assert other.plan == replace(mixed.plan, placement=other.plan.placement)
    assert autopar.verify(mixed, mixed.model, driving_batch(16)).max_error <= 1e-9


def test_a_plan_with_branches_is_replayed_from_its_json() -> None:
    program = beside_each_other()
    again = program.with_plan(Plan.from_dict(program.plan.to_dict()))
    assert again.sources == program.sources
    assert again.pipeline == program.pipeline


@pytest.mark.slow
def test_cheap_links_need_no_branches() -> None:
    program = compiled(fast_network())
    assert len(program.plan.stages) == 1


@pytest.mark.slow
def test_less_memory_is_kept_to() -> None:
    def found(**limit: float) -> PricedPlan:
        task = task_of(captured(), slow_network(), Setting(2), Options(microbatches=2, **limit))
        *_, plans = search_branches(SubmeshPlans(TasksByCount(task, 16)), math.inf)
        return plans[0][1]

    free = found().account
    assert free is not None
    tight = found(memory_bytes=0.9 * free.peak_bytes).account
    assert tight is not None
    assert tight.peak_bytes <= 0.9 * free.peak_bytes
    assert tight.step_time_s >= free.step_time_s * (1 - 1e-3)


# --- found in the program ---------------------------------------------------------------------------------------------


@functools.cache
def captured(tied: bool = False) -> Captured:
    torch.manual_seed(0)
    return capture_program(Driving(tied=tied), driving_batch(), driving_loss, 2)


def task_of(step: Captured, cluster: ClusterSpec, setting: Setting, options: Options) -> Task:
    rules = RuleBook()
    return Task(step.program, cluster, rules, setting, options, Microbatches(step, rules))


def plain_task(step: Captured) -> Task:
    return task_of(step, ClusterSpec.local(4), Setting(), Options())


def test_no_call_mixes_two_encoders() -> None:
    program = captured().program
    for call in program.calls:
        names = {p.split(".")[0] for p in call.params}
        assert len(names & {"camera", "lidar", "radar"}) <= 1, call


def test_segments_are_the_branches() -> None:
    program = captured().program
    share = work_shares(plain_task(captured()))
    sides = calls_beside(program, share)
    for first, last in segments(program, share):
        assert len({sides[i] for i in range(first, last)}) == 1
    lidar = next(i for i, c in enumerate(program.calls) if c.path.startswith("lidar.blocks"))
    beside = {program.calls[i].path.split(".")[0] for i in sides[lidar]}
    assert beside == {"camera", "radar"}


def test_segments_cover_the_program_and_start_where_a_stage_may() -> None:
    for step in (captured(), captured(True)):
        program = step.program
        found = segments(program, work_shares(plain_task(step)))
        assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
        assert found[-1][1] == len(program.calls)
        assert {first for first, _ in found[1:]} <= cut_points(program)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mlp", "gpt2", "t5", "vit", "resnet"])
def test_chains_have_no_branches(name: str) -> None:
    zoo = BY_NAME[name]
    assert not branches(plain_task(capture_program(zoo.make(), zoo.batch(), zoo.loss_fn, 1)))


def test_two_towers_without_containers_are_apart() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
            self.right = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.left(x) * self.right(y)).sum(dim=1)

    batch = (torch.randn(8, 16), torch.randn(8, 16), torch.randn(8))
    task = plain_task(capture_program(Towers(), batch, nn.functional.mse_loss, 1))
    assert branches(task)
    assert len(segments(task.program, work_shares(task))) >= 3


# --- any placement of branches ----------------------------------------------------------------------------------------


def random_branches(program: ParallelProgram, seed: int) -> Plan:
    """Segments on random groups, values flowing one way between groups; random meshes and states in each stage."""
    rng = random.Random(seed)
    ir, ranks = program.ir, program.cluster.size
    spans = list(segments(ir, work_shares(plain_task(program.captured))))
    before = [
        {
            k
            for k, (a, b) in enumerate(spans)
            for i in range(*span)
            for r in ir.calls[i].inputs
            if r.kind == "call" and a <= r.index < b
        }
        - {s}
        for s, span in enumerate(spans)
    ]
    group: list[int] = []
    for s in range(len(spans)):
        least = max((group[u] for u in before[s]), default=0)
        group.append(rng.randint(least, max(least, min(3, len(spans) - 1))))
    names = sorted(set(group))
    runs: list[tuple[int, int, int]] = []
    for span, g in zip(spans, map(names.index, group), strict=True):
        if runs and runs[-1][2] == g:
            runs[-1] = (runs[-1][0], span[1], g)
        else:
            runs.append((*span, g))
    firsts = [0, *sorted(rng.sample(range(1, ranks), len(names) - 1)), ranks]
    places = list(itertools.pairwise(firsts))
    rng.shuffle(places)
    ranges = [(a, b) for a, b, _ in runs]
    parts = cut(ir, ranges)
    stages = []
    for part, (a, b, g) in zip(parts, runs, strict=True):
        first, last = places[g]
        mesh = Mesh(random_mesh(last - first, rng).axes, first)
        problem = Problem(part, Pricer(program.cluster, mesh), program.rules, program.setting)
        stages.append(stage_plan(problem, random_choice(problem.graph, rng), (a, b)))
    plan = Plan(ir.fingerprint, program.cluster.fingerprint(), ranks, tuple(stages), program.plan.microbatches, "gpipe")
    graph, name = stage_graph(plan, parts), rng.choice(("gpipe", "1f1b", "zb-h1", "zb-h2"))
    table = grouped(functools.partial(build, name), graph, plan.microbatches)
    return Plan(**{**plan.__dict__, "table": tuple(map(show_row, table)), "origin": f"random {seed}"})


@functools.cache
def microbatched(tied: bool) -> ParallelProgram:
    return compiled(ClusterSpec.local(4), Options(microbatches=2, pp=1, mesh={"dp": 4}, strategy="dp"), tied)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_branches_equal_one_device(seed: int) -> None:
    program = microbatched(tied=seed % 2 == 1)
    other = program.with_plan(random_branches(program, seed))
    assert autopar.verify(other, program.model, driving_batch(16)).max_error <= 1e-9


@pytest.mark.slow
@given(st.integers(0, 10**6))
def test_many_random_branches_equal_one_device(seed: int) -> None:
    program = microbatched(tied=seed % 2 == 1)
    other = program.with_plan(random_branches(program, seed))
    assert autopar.verify(other, program.model, driving_batch(16)).max_error <= 1e-9


# --- schedules of groups ----------------------------------------------------------------------------------------------


@given(dags(names=("gpipe", "1f1b", "zb-h1", "zb-h2")), st.integers(0, 10**6))
def test_schedules_of_groups_never_deadlock(case, seed: int) -> None:
    small, name, m = case
    rng = random.Random(seed)
    size = {g: rng.randint(1, 3) for g in range(small.stages)}
    first = dict(zip(size, itertools.accumulate([0, *size.values()]), strict=False))
    groups = tuple(tuple(range(first[g], first[g] + size[g])) for g in size)
    edges = {(rng.choice(groups[u]), rng.choice(groups[v])) for u, v in small.edges}
    edges |= {(s, s + 1) for group in groups for s in group[:-1]}
    graph = StageGraph(groups, tuple(sorted(edges)))
    table = grouped(functools.partial(build, name), graph, m)
    assert not deadlock(table, graph)
    kinds = {a.kind for row in table for a in row}
    for row, stages in zip(table, groups, strict=True):
        assert sorted(map(str, row)) == sorted(f"{k}{i}.{s}" for k in kinds for i in range(m) for s in stages)


def test_groups_of_one_stage_have_the_schedule_of_their_pipeline() -> None:
    graph = StageGraph.chain(4)
    assert grouped(functools.partial(build, "1f1b"), graph, 6) == build("1f1b", graph, 6)


def test_groups_around_another_are_refused() -> None:
    with pytest.raises(PlanError, match="circle"):
        group_graph(StageGraph(((0, 2), (1,)), ((0, 1), (1, 2))))


# --- every rank has work ----------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
def test_groups_take_every_device_where_they_must(seed: int) -> None:
    problem = random_problem(seed, 3)
    problem = type(problem)(**{**problem.__dict__, "every_device": True})
    best = None
    for blocks in partitions(list(range(3))):
        for choice in itertools.product(*(range(len(o)) for o in problem.segments)):
            groups = [
                SegmentGroup(
                    tuple(sorted(b)), problem.segments[b[0]][choice[b[0]]].devices, tuple(choice[s] for s in sorted(b))
                )
                for b in blocks
            ]
            try:
                found = evaluate(problem, groups)
            except PlanError:
                continue
            if sum(g.devices for g in groups) == problem.devices and max(found.memory) <= problem.limit_bytes:
                best = found.total_s if best is None else min(best, found.total_s)
    if best is None:
        with pytest.raises(autopar.errors.InfeasibleError):
            solve_branches(problem)
    else:
        solved = solve_branches(problem)
        assert sum(g.devices for g in solved.groups) == problem.devices
        assert solved.total_s == pytest.approx(best, rel=1e-6)


def test_lowered_groups_are_all_ranks() -> None:
    program = beside_each_other()
    lowered = lower(program.ir, program.plan, autopar.passes.price.pricer.Pricers(program.cluster), program.rules)
    ranks = [r for s in {(st.mesh.offset, st.mesh.size) for st in lowered.stages} for r in range(s[0], s[0] + s[1])]
    assert sorted(ranks) == list(range(8))
