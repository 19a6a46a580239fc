"""Ranks of several kinds that do the same go at the pace of the slowest, whatever the order in which machines are listed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, device_preset
from autopar.costmodel.collective import collective_time_s, message_time_s
from autopar.costmodel.estimator.search import search
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.step import estimate
from autopar.costmodel.estimator.workload import StepPlan
from autopar.costmodel.software import Software

GPT = TransformerShape(layers=12, hidden=768, heads=12, ffn=3072, vocab=50304, seq_len=1024, name="GPT-2")
KINDS = {name: device_preset(name) for name in ("h100", "a100", "v100")}


def cluster_of(*names: str) -> ClusterSpec:
    levels = ClusterSpec.homogeneous(devices=4 * len(names), device="a100", devices_per_node=4).levels
    return ClusterSpec("mixed", tuple((4, KINDS[name]) for name in names), levels)


def test_the_slowest_has_the_least_of_each() -> None:
    one = DeviceSpec.slowest_of(KINDS.values())
    assert one.peak_flops == {
        dtype: min(d.peak_flops[dtype] for d in KINDS.values()) for dtype in ("float64", "float32", "float16")
    }
    for field in ("memory_bytes", "memory_bandwidth_Bps", "host_bandwidth_Bps"):
        assert getattr(one, field) == min(getattr(d, field) for d in KINDS.values())
    assert one.launch_overhead_s == max(d.launch_overhead_s for d in KINDS.values())
    assert {DeviceSpec.slowest_of(order) for order in itertools.permutations(KINDS.values())} == {one}
    assert DeviceSpec.slowest_of([KINDS["a100"]] * 2) == KINDS["a100"]


def test_the_pace_is_that_of_the_ranks_that_are_meant() -> None:
    cluster = cluster_of("h100", "v100", "h100")
    assert cluster.pace(0, 4) == cluster.pace(8, 4) == KINDS["h100"]
    assert cluster.pace(4, 2) == KINDS["v100"]
    assert cluster.pace(2, 4) == cluster.pace(0, 12) == DeviceSpec.slowest_of([KINDS["h100"], KINDS["v100"]])


def test_a_dtype_that_all_kinds_have_is_chosen_where_none_is_named() -> None:
    plan = StepPlan(ParallelConfig(dp=8), 1)
    for names, dtype in ((("h100", "a100"), "bfloat16"), (("h100", "v100"), "float16"), (("v100", "v100"), "float16")):
        cluster = cluster_of(*names)
        assert cluster.half_dtype == dtype
        chosen = estimate(GPT, cluster, plan, batch=8)
        assert chosen == estimate(GPT, cluster, plan, batch=8, software=Software(dtype))
        assert chosen == estimate(GPT, cluster_of(*names[::-1]), plan, batch=8)
        assert search(GPT, cluster, batch=8, top=1).best
    only_32 = DeviceSpec("plain", {"float32": 1e13}, 1e10, 1e11)
    assert ClusterSpec.homogeneous(devices=2, device=only_32).half_dtype == "float32"


@pytest.mark.slow
def test_the_order_of_machines_changes_no_plan_on_one_mesh_and_no_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
        batch = torch.empty(4096, 2048), torch.empty(4096, 2048)

    def step(*names: str) -> tuple[float, float, str]:
        options = autopar.Options(pp=1, microbatches=1)
        made = autopar.compile(
            model,
            cluster_of(*names),
            batch,
            loss_fn=nn.functional.mse_loss,
            optimizer=torch.optim.Adam,
            options=options,
        )
        return made.predicted.step_time_s, made.predicted.peak_bytes, str(made.plan.stages[0].mesh)

    orders = {step(*names) for names in itertools.permutations(("h100", "a100"))}
    assert len(orders) == 1
    ((mixed_s, _, _),) = orders
    assert step("h100", "h100")[0] < mixed_s < step("a100", "a100")[0], "rows follow the speed of devices"


def test_a_ring_crosses_the_link_that_a_node_shares_once() -> None:
    """A node's card carries 2 (n - 1)/n of the bytes of an all-reduce over n ranks, however many of them the node has."""
    nodes = [{"count": 4, "device": "t4", "devices_per_node": 4, "bandwidth_GBps": 1000}]
    network = {"bandwidth_GBps": 1.5, "latency_us": 0, "efficiency": 1}
    rails, card = (ClusterSpec.from_dict({"nodes": nodes, "network": {**network, "shared": b}}) for b in (False, True))
    assert ClusterSpec.from_dict(card.to_dict()) == card
    assert rails.levels[-1] != card.levels[-1]
    nbytes = 1e9
    for ranks in (tuple(range(8)), tuple(range(16)), (0, 4, 8, 12)):
        n, nodes_of = len(ranks), len(ranks) // 4 if len(ranks) > 4 else len(ranks)
        inside = n // nodes_of
        flat_s = 2 * (n - 1) / n * nbytes / inside / 1.5e9
        assert collective_time_s(card, "all_reduce", nbytes, ranks) == pytest.approx(flat_s, rel=0.02)
        parts_s = 2 * (nodes_of - 1) / nodes_of * nbytes / inside / 1.5e9
        assert collective_time_s(rails, "all_reduce", nbytes, ranks) == pytest.approx(parts_s, rel=0.02)
    for senders in (1, 2, 4):
        assert message_time_s(card, nbytes, (3, 4), senders) == pytest.approx(nbytes / 1.5e9 * senders / 4, rel=0.02)
        assert message_time_s(rails, nbytes, (3, 4), senders) == pytest.approx(nbytes / 1.5e9, rel=0.02)
        assert message_time_s(card, nbytes, (2, 3), senders) == message_time_s(rails, nbytes, (2, 3), 4)
