"""Bytes that a process takes of its device beside tensors, by cause."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.cluster.device import device_from_dict, device_preset, load_data
from autopar.cluster.process import fragmentation, process_bytes, tensor_room

MIB = 2**20
H100 = ClusterSpec.preset("dgx-h100", 2)
CARD_24_GB = device_from_dict(
    {
        "name": "card",
        "peak_flops": {"float32": 80e12, "bfloat16": 160e12},
        "memory_bytes": 25.3e9,
        "memory_bandwidth_Bps": 1e12,
        "architecture": "sm89",
    }
)


def rows(cluster: ClusterSpec, **axes: int) -> dict[str, float]:
    return process_bytes(cluster, axes, cluster.device(0))


def test_a_cpu_is_charged_nothing_and_a_tenth_of_it_is_left_free() -> None:
    cluster = ClusterSpec.local(4)
    device = cluster.device(0)
    assert rows(cluster, dp=2, tp=2) == {}
    assert fragmentation(device) == 0
    assert tensor_room(cluster, {"dp": 4}, device, 1e9) == 0.9e9


def test_one_device_has_no_communicators() -> None:
    cluster = ClusterSpec.homogeneous(devices=1, device=CARD_24_GB)
    taken = rows(cluster, dp=1)
    assert taken["communicators"] == taken["peers"] == 0
    assert taken["cuBLAS workspace"] == 8_519_680
    assert rows(H100, dp=16)["cuBLAS workspace"] == 32 * MIB


def test_every_axis_has_a_communicator_and_so_have_all_ranks() -> None:
    inside, outside = 24 * 24 * MIB, 16 * 24 * MIB
    assert rows(H100, dp=16)["communicators"] == 2 * outside, "dp, and all ranks"
    assert rows(H100, dp=2, tp=8)["communicators"] == inside + 3 * outside, "tp, dp, both, and all ranks"


def test_stages_and_experts_are_peers() -> None:
    peer = 32 * 12 * MIB
    pool = load_data("process.json")["network_pool_bytes"]
    assert rows(H100, dp=2, tp=8)["peers"] == 0
    assert rows(H100, tp=4)["peers"] == peer + pool, "one neighbour on the node, one behind the network"
    assert rows(H100, tp=8)["peers"] == pool
    assert rows(H100, dp=2, ep=8)["peers"] == 7 * peer
    assert rows(H100, ep=16)["peers"] == 7 * peer + pool


def test_a_communicator_takes_what_was_measured_on_machines_with_nvlink() -> None:
    """NVIDIA/nccl#964: 544 MiB for two of four A100, 688 MiB for more; #1685: 1.06 GB of 8 H100 with the context, 3.28 GB more
    after an all-to-all."""
    a100, h100 = (ClusterSpec.preset(name) for name in ("dgx-a100", "dgx-h100"))
    one = rows(a100, dp=8)["communicators"] / 2
    assert one > 0.9 * 544 * MIB
    assert one < 688 * MIB
    taken = process_bytes(h100, None, h100.device(0))
    assert taken["CUDA context"] + taken["communicators"] == pytest.approx(1.06e9, rel=0.05)
    assert rows(h100, ep=8)["peers"] == pytest.approx(3.28e9, rel=0.15)


def test_a_card_of_24_gb_is_planned_as_what_it_can_hold() -> None:
    """A single card gives tensors 24.3 of 25.3 GB, where a tenth of it was left free before; a model in between compiles."""
    cluster = ClusterSpec.homogeneous(devices=1, device=CARD_24_GB)
    room = tensor_room(cluster, {"dp": 1}, CARD_24_GB, CARD_24_GB.memory_bytes)
    assert 0.95 < room / CARD_24_GB.memory_bytes < 0.97
    width = int((0.94 * CARD_24_GB.memory_bytes / 16) ** 0.5)
    with torch.device("meta"):
        model, x = nn.Linear(width, width, bias=False), torch.zeros(4, width)
    program = autopar.compile(model, cluster, (x, x), loss_fn=nn.functional.mse_loss, optimizer=torch.optim.Adam)
    assert 0.9 * CARD_24_GB.memory_bytes < program.predicted.peak_bytes <= room
    assert "CUDA context 447 MB" in program.report()


def test_devices_of_a_known_architecture_have_their_workspace() -> None:
    for name in ("v100", "a100", "mi300x"):
        cluster = ClusterSpec.homogeneous(devices=1, device=device_preset(name))
        assert rows(cluster, dp=1)["cuBLAS workspace"] < 9e6
