"""The order in which machines are listed changes nothing: ranks count through them kind after kind, in the best order."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.cluster.arrangement import arranged, arrangements, placement_onto
from autopar.cluster.device import device_preset
from autopar.errors import InputError
from autopar.passes.search import best_plans
from autopar.plan import Plan

PAIRS = [("v100", "h100"), ("a100", "v100-16"), ("mi300x", "a100"), ("h100-500w", "h100")]


def listed(*names: str, per_node: int = 2, **network: object) -> ClusterSpec:
    nodes = [{"device": name, "devices_per_node": per_node} for name in names]
    return ClusterSpec.from_dict({"nodes": nodes, "network": {"bandwidth_GBps": 10, **network}})


def compiled(cluster: ClusterSpec, **options: object) -> autopar.ParallelProgram:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
        model, batch = nn.Sequential(*blocks), (torch.empty(2048, 1024), torch.empty(2048, 1024))
    return autopar.compile(
        model,
        cluster,
        batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        options=autopar.Options(**options),
    )


@pytest.mark.slow
@pytest.mark.parametrize("pair", random.Random(3).sample(PAIRS, 2), ids="-".join)
@pytest.mark.parametrize("pp", [None, 2])
def test_the_four_orders_of_two_kinds_of_nodes_give_one_plan_and_one_time(
    pair: tuple[str, str], pp: int | None
) -> None:
    a, b = pair
    programs = [compiled(listed(*order), pp=pp) for order in ((a, a, b, b), (a, b, a, b), (b, a, b, a), (b, b, a, a))]
    plans = [program.plan.to_dict() | {"placement": None} for program in programs]
    assert all(plan == plans[0] for plan in plans)
    assert len({(p.predicted.step_time_s, p.predicted.peak_bytes) for p in programs}) == 1
    for program in programs:
        for place in range(8):
            rank = program.plan.placement[place] if program.plan.placement else place
            assert program.cluster.device(rank) == program.request.cluster.device(place), "machines are those listed"


@pytest.mark.slow
def test_stages_take_the_kind_first_that_is_faster_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of many classes wants the fast kind last; the plan is the best one of those for either order."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)], nn.Linear(1024, 32768))
        batch = torch.empty(2048, 1024), torch.empty(2048, dtype=torch.long)
    cluster = listed("h100", "v100")

    def step_s() -> float:
        options = autopar.Options(pp=2, microbatches=4)
        made = autopar.compile(model, cluster, batch, loss_fn=nn.functional.cross_entropy, options=options)
        return made.predicted.step_time_s

    best_s, each_s = step_s(), []
    for way in arrangements(cluster):
        monkeypatch.setattr(best_plans, "arrangements", lambda _, way=way: [way])
        each_s.append(step_s())
    assert best_s == min(each_s) < max(each_s)


def test_a_plan_is_read_back_for_the_machines_as_they_were_listed() -> None:
    program = compiled(listed("v100", "h100", "v100", "h100"), pp=2)
    assert program.plan.placement
    again = program.with_plan(Plan.from_dict(program.plan.to_dict()))
    assert again.predicted.step_time_s == pytest.approx(program.predicted.step_time_s)
    assert "ranks count through " in program.report()


@pytest.mark.slow
def test_programs_of_several_shapes_of_batches_lie_on_the_same_machines() -> None:
    cpu = device_preset("cpu")
    slow = replace(cpu.slower(2), name="slow")
    levels = ClusterSpec.homogeneous(devices=4, device="cpu", devices_per_node=2).levels
    model, batch = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), (torch.randn(16, 64), torch.randn(16, 64))
    placements = []
    for order in ((cpu, slow), (slow, cpu)):
        program = autopar.compile(
            model,
            ClusterSpec("mixed", tuple((2, device) for device in order), levels),
            batch,
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.SGD,
            options=autopar.Options(pp=2),
            buckets={"0": {0: (16, 8)}, "1": {0: (16, 8)}},
        )
        one, other = program.of_buckets
        assert one.plan.placement == other.plan.placement
        assert one.cluster == other.cluster
        assert autopar.verify(program, model, batch).max_error <= 1e-9
        placements.append(one.plan.placement)
    assert sorted(placements) == [(), (2, 3, 0, 1)]


def test_groups_of_links_stay_whole_whatever_their_size_and_rate() -> None:
    nodes = [("v100", 4, 150), ("h100", 8, 450), ("v100", 8, 300), ("h100", 4, 450), ("v100", 4, 300)]
    entries = [{"device": d, "devices_per_node": n, "bandwidth_GBps": rate} for d, n, rate in nodes]
    clusters = set()
    for order in itertools.permutations(entries):
        cluster = ClusterSpec.from_dict({"nodes": list(order)})
        for way in arrangements(cluster):
            clusters.add(way.cluster)
            rank = way.placement or range(cluster.size)
            for p, q in itertools.combinations(range(cluster.size), 2):
                assert way.cluster.device(rank[p]) == cluster.device(p)
                together = [c.levels[0].group_of(i) == c.levels[0].group_of(j) for c, i, j in
                            ((cluster, p, q), (way.cluster, rank[p], rank[q]))]  # fmt: skip
                assert together[0] == together[1]
            assert placement_onto(cluster, way.cluster) == way.placement
            assert arranged(cluster, way.placement or range(cluster.size)) == way.cluster
    assert len(clusters) == 2, "fast or slow kind first"
    for cluster in clusters:
        runs = [device.name for _, device in cluster.devices]
        assert len(runs) == 2
        level = cluster.levels[0]
        assert level.starts in ((0, 8, 12, 20, 24), (0, 8, 12, 16, 24))
        rates = sorted(level.rate_Bps((node,)) for node in range(5))
        assert rates == pytest.approx([150e9 * 0.83, 300e9 * 0.83, 300e9 * 0.83, 450e9 * 0.8, 450e9 * 0.8])


@pytest.mark.parametrize("asked", [{"chunks": 2}, {"schedule": "interleaved"}, {"schedule": "zb-v"}], ids=str)
def test_several_stages_per_group_are_refused_by_name_where_devices_differ(asked: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"2 stages per group of ranks.*this cluster has h100 and v100"):
        compiled(listed("h100", "v100"), pp=2, **asked)


def test_one_kind_stays_as_it_is_listed_and_of_many_kinds_two_orders_are_tried() -> None:
    alike = listed("h100", "h100")
    assert arrangements(alike)[0].cluster is alike
    assert arranged(alike, (1, 0, 2, 3)) is alike
    assert len(arrangements(listed("h100", "a100", "v100"))) == 6
    many = [d.name for d in map(device_preset, ("h100", "a100", "v100", "b200"))]
    first, last = arrangements(listed(*many))
    assert [d.name for _, d in first.cluster.devices] == ["b200", "h100", "a100", "v100"]
    assert [d.name for _, d in last.cluster.devices] == ["v100", "a100", "h100", "b200"]
