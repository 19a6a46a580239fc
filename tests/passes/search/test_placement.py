"""Placement of a plan's ranks: what talks most sits on the fastest links, and nothing that is computed changes."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar import ClusterSpec, Options, ParallelProgram, Plan
from autopar.codegen.pipeline import pipeline_module
from autopar.passes.place import placement_cost
from autopar.passes.search.placement import GAIN, find_placement, placement_gain, program_traffic
from autopar.report import words
from autopar.runtime.program.manifest import Manifest
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def two_nodes() -> ClusterSpec:
    return ClusterSpec.homogeneous(
        devices=8, device="cpu", devices_per_node=4, intra_bandwidth_Bps=8e9, inter_bandwidth_Bps=1e9
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(512, 64), torch.randint(0, 8, (512,))


@functools.cache
def outer(cluster: ClusterSpec) -> ParallelProgram:
    """Tensor-parallel groups lie across nodes when ranks are in order: tp is the outer axis, and speaks most."""
    options = Options(mesh={"tp": 4, "dp": 2}, constraints={"*.weight": "[@tp, .]"})
    return autopar.compile(
        model(), cluster, batch(), loss_fn=nn.functional.cross_entropy, optimizer=SGD, options=options
    )


def test_tensor_parallel_groups_are_brought_into_nodes() -> None:
    program = outer(two_nodes())
    placement = program.plan.placement
    assert sorted(placement) == list(range(8))
    mesh = program.plan.stages[0].mesh
    for node in (placement[:4], placement[4:]):
        assert len({mesh.coordinate(logical)["dp"] for logical in node}) == 1, "one tp group per node"
    assert "placement: nodes run ranks 0, 2, 4, 6 | 1, 3, 5, 7" in program.report()


def test_a_placed_program_computes_the_same() -> None:
    """Sums are in another order where other collectives go by node, which is all that depends on places."""
    program = outer(two_nodes())
    in_order = program.with_plan(replace(program.plan, placement=()))
    for one in (program, in_order):
        assert autopar.verify(one, one.model, batch()).max_error <= 1e-9
    assert in_order.sources == program.sources
    tables, placed_tables = (vars(pipeline_module(one.pipeline)) for one in (in_order, program))
    for name in tables.keys() - {"NODES", "BY_NODE", "__builtins__"}:
        assert tables[name] == placed_tables[name], name


def test_launch_reads_the_placement_as_the_plan_means_it(tmp_path: Path) -> None:
    program = outer(two_nodes())
    out = program.save(tmp_path / "out")
    assert Manifest.read(out).placement == program.plan.placement
    assert Plan.load(out / "plan.json").placement == program.plan.placement
    assert json.loads((out / "manifest.json").read_text())["placement"][1] == 2, "RANK 1 acts as logical rank 2"


def test_ranks_change_places_within_their_kind_and_machines_are_those_listed() -> None:
    fast, slow = (replace(two_nodes().device(0), name=name) for name in ("fast", "slow"))
    fast = fast.slower(0.5)
    node, network = two_nodes().levels
    levels = (node, replace(network, group_size=16))
    cluster = ClusterSpec("mixed", tuple((4, device) for device in (slow, fast, slow, fast)), levels)
    options = Options(mesh={"tp": 4, "dp": 2}, constraints={"*.weight": "[@tp, .]"}, pp=2)
    program = autopar.compile(
        model(), cluster, batch(), loss_fn=nn.functional.cross_entropy, optimizer=SGD, options=options
    )
    for place, rank in enumerate(program.plan.placement):
        assert cluster.device(place) == program.cluster.device(rank)
    for stage in program.plan.stages:
        ranks = range(stage.mesh.offset, stage.mesh.offset + 8)
        assert len({program.cluster.device(rank) for rank in ranks}) == 1, "a kind of its own"
    nodes = [
        {rank // 8 * 2 + rank % 2 for rank in program.plan.placement[first : first + 4]} for first in range(0, 16, 4)
    ]
    assert sorted(map(len, nodes)) == [1] * 4, "one tp group per node"
    assert autopar.verify(program, program.model, batch()).max_error <= 1e-9


def test_gain_is_what_the_cost_of_the_traffic_says() -> None:
    program = outer(two_nodes())
    traffic = program_traffic(program.lowered, program.account, 8)
    physical = np.argsort(program.plan.placement)
    before = placement_cost(traffic, program.cluster, range(8))
    after = placement_cost(traffic, program.cluster, physical.tolist())
    gain = placement_gain(program.plan, program.lowered, program.account, program.cluster)
    assert gain == pytest.approx(1 - after / before)
    assert gain > GAIN


def test_ranks_stay_in_order_where_links_are_alike_or_every_node_is_of_another_kind() -> None:
    assert outer(ClusterSpec.local(8)).plan.placement == ()
    program = outer(two_nodes())
    fast = program.cluster.devices[0][1]
    mixed = replace(program.cluster, devices=((4, fast), (4, replace(fast, name="other"))))
    plan = replace(program.plan, placement=())
    assert find_placement(plan, program.lowered, program.account, mixed)[1] == plan
    found, again = find_placement(plan, program.lowered, program.account, program.cluster)
    assert again == program.plan
    assert found is not None
    assert found.proven
    assert (found.method, found.gap) == (program.solver.placed_by, program.solver.placement_gap)
    assert "(no placement is cheaper)" in program.report()


def test_a_plan_whose_inner_axis_speaks_most_stays_in_order() -> None:
    options = Options(mesh={"dp": 2, "tp": 4}, constraints={"*.weight": "[@tp, .]"})
    program = autopar.compile(
        model(), two_nodes(), batch(), loss_fn=nn.functional.cross_entropy, optimizer=SGD, options=options
    )
    assert program.plan.placement == ()
    assert "placement" not in program.report()


def test_the_report_has_what_ranks_in_order_may_lose() -> None:
    program = outer(ClusterSpec.local(8))
    solver = program.solver
    for gap, wanted in ((0.0, []), (0.052, ["placement: ranks in order (at most 5.2% above the cheapest)"])):
        unsure = SimpleNamespace(plan=program.plan, solver=replace(solver, placed_by="identity", placement_gap=gap))
        assert words._placement(unsure) == wanted


@pytest.mark.slow
def test_traffic_of_a_pipeline_counts_what_crosses_between_stages() -> None:
    zoo = BY_NAME["gpt2"]
    program = compiled_zoo(zoo, two_nodes(), options=Options(pp=2, microbatches=2, schedule="1f1b"))
    traffic = program_traffic(program.lowered, program.account, 8)
    first = {program.group_of(r): r for r in reversed(range(8))}
    across = {
        (int(a), int(b)): w
        for a, b, w in zip(traffic.first, traffic.second, traffic.weight, strict=True)
        if program.group_of(int(a)) != program.group_of(int(b))
    }
    assert len(first) == 2
    arriving = [
        (t.target_spec.local_bytes(t.type, program.stages[t.target].mesh), program.stages[t.target].mesh.size)
        for t in program.lowered.transfers
    ]
    shared = sum(across.values()) - sum(nbytes * ranks for nbytes, ranks in arriving) * 2
    assert across
    assert shared >= -1e-6, "at least what every microbatch brings to every rank"
