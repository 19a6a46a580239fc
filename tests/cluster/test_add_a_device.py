"""Adding a device or a machine is adding data: rows of `data/`, or all its figures in a cluster file; no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import ClusterSpec
from autopar.cluster.device import load_data
from autopar.errors import ClusterError
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

FIGURES: dict[str, Any] = {
    "peak_flops": {"float32": 60e12, "bfloat16": 500e12},
    "memory_bytes": 64e9,
    "memory_bandwidth_Bps": 2e12,
    "launch_overhead_s": 4e-6,
    "host_bandwidth_Bps": 50e9,
    "curve": "a100",
}
ZOO = BY_NAME["mlp"]


def compiled(cluster: ClusterSpec) -> autopar.ParallelProgram:
    return compiled_zoo(ZOO, cluster)


def assert_right(program: autopar.ParallelProgram) -> None:
    found = autopar.verify(program, ZOO.make(), ZOO.batch(1))
    assert found.ok
    assert found.max_error <= 1e-9


def test_a_device_and_a_machine_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="unknown cluster preset 'box-n1'"):
        ClusterSpec.preset("box-n1")
    monkeypatch.setitem(load_data("devices.json")["devices"], "n1-accelerator", FIGURES)
    machine = {"device": "n1-accelerator", "devices_per_node": 2, "bandwidth_GBps": 200}
    monkeypatch.setitem(load_data("machines.json")["machines"], "box-n1", machine)
    cluster = ClusterSpec.preset("box-n1", nodes=2)
    assert (cluster.size, cluster.device(3).name) == (4, "n1-accelerator")
    assert [(level.name, level.group_size) for level in cluster.levels] == [("node", 2), ("cluster", 4)]
    assert_right(compiled(cluster))


def test_a_device_may_be_described_in_a_cluster_file_alone(tmp_path: Path) -> None:
    nodes = [{"count": 1, "device": {"name": "n2", **FIGURES}, "devices_per_node": 2, "bandwidth_GBps": 200}]
    slow = [{**nodes[0], "device": {**nodes[0]["device"], "peak_flops": {"float32": 1e9}, "memory_bandwidth_Bps": 1e9}}]
    (tmp_path / "fast.json").write_text(json.dumps({"nodes": nodes}))
    (tmp_path / "slow.json").write_text(json.dumps({"nodes": slow}))
    fast, slowed = (compiled(ClusterSpec.from_file(tmp_path / f"{name}.json")) for name in ("fast", "slow"))
    assert fast.predicted.step_time_s < slowed.predicted.step_time_s
    assert_right(fast)
