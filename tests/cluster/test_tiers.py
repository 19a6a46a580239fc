"""Memory tiers in cluster files and presets: figures, files that read and write them, and errors that say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import ClusterSpec
from autopar.cluster.device import load_data
from autopar.cluster.tiers import Tier, place
from autopar.errors import ClusterError, InfeasibleError

MACHINES = sorted(load_data("machines.json")["machines"])


def test_clusters_have_no_tiers_unless_asked() -> None:
    assert ClusterSpec.preset("dgx-h100").device(0).tiers == ()
    assert "tiers" not in json.dumps(ClusterSpec.preset("dgx-h100").to_dict())


@pytest.mark.parametrize("name", MACHINES)
def test_usual_tiers_round_trip_and_change_the_fingerprint(name: str) -> None:
    plain = ClusterSpec.preset(name, nodes=36)
    tiered = plain.with_tiers()
    assert [t.name for t in tiered.device(0).tiers] == ["ddr", "nvme"]
    again = ClusterSpec.from_dict(json.loads(json.dumps(tiered.to_dict())))
    assert again == tiered
    assert again.fingerprint() == tiered.fingerprint() != plain.fingerprint()
    ddr, nvme = tiered.device(0).tiers
    assert ddr.bandwidth_Bps == tiered.device(0).host_bandwidth_Bps > nvme.bandwidth_Bps
    assert ddr.capacity_bytes < nvme.capacity_bytes


def test_a_dgx_h100_shares_two_terabytes_among_eight() -> None:
    ddr, nvme = ClusterSpec.preset("dgx-h100").with_tiers().device(3).tiers
    assert ddr == Tier("ddr", 0.25e12, 50e9, 1e-5)
    assert nvme.capacity_bytes == pytest.approx(3.84e12, rel=1e-3)


FORMS: list[dict[str, Any]] = [
    {"preset": "dgx-h100", "nodes": 2, "tiers": {"ddr": {"capacity_GB": 2000, "bandwidth_GBps": 50, "latency_us": 10}}},
    {
        "nodes": 2,
        "device": "h100",
        "devices_per_node": 8,
        "tiers": {"ddr": {"capacity_GB": 2000, "bandwidth_GBps": 50, "latency_us": 10}},
    },
    {
        "nodes": [
            {
                "count": 2,
                "device": "h100",
                "devices_per_node": 8,
                "tiers": {"ddr": {"capacity_GB": 2000, "bandwidth_GBps": 50, "latency_us": 10}},
            }
        ]
    },
    {
        "nodes": [
            {
                "count": 2,
                "devices_per_node": 8,
                "device": {
                    "preset": "h100",
                    "tiers": {"ddr": {"capacity_bytes": 0.25e12, "bandwidth_Bps": 50e9, "latency_s": 1e-5}},
                },
            }
        ]
    },
]


@pytest.mark.parametrize("form", FORMS)
def test_files_say_tiers_for_the_cluster_a_node_or_a_device(form: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(form))
    cluster = ClusterSpec.from_file(tmp_path / "c.json")
    for rank in (0, 15):
        (tier,) = cluster.device(rank).tiers
        assert (tier.name, tier.capacity_bytes, tier.bandwidth_Bps) == ("ddr", 0.25e12, 50e9)
        assert tier.latency_s == pytest.approx(1e-5)


def test_yaml_takes_usual_tiers(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("preset: gb200-nvl72\nnodes: 18\ntiers: usual\n")
    assert ClusterSpec.from_file(tmp_path / "c.yaml") == ClusterSpec.preset("gb200-nvl72", 18).with_tiers()


def test_capacity_of_a_node_in_a_rack_of_one_fabric() -> None:
    """NVL72 is one level of 72 ranks; a node of it has four."""
    tiers = {"ddr": {"capacity_GB": 960, "bandwidth_GBps": 225}}
    cluster = ClusterSpec.from_dict({"preset": "gb200-nvl72", "nodes": 18, "tiers": tiers})
    assert cluster.device(0).tier("ddr").capacity_bytes == 240e9


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ("fast", "a mapping such as"),
        ({"tape": {"capacity_GB": 1, "bandwidth_GBps": 1}}, "unknown memory tier 'tape'; tiers are ddr, nvme"),
        ({"ddr": 5}, "tier ddr must be a mapping with the keys capacity_GB, bandwidth_GBps, got 5"),
        ({"ddr": {"capacity_GB": 5}}, "tier ddr: 'bandwidth_GBps' is missing"),
        ({"ddr": {"bandwidth_GBps": 5}}, "tier ddr: 'capacity_GB' is missing"),
        ({"ddr": {"capacity_GB": "much", "bandwidth_GBps": 5}}, "capacity_GB must be a number, got 'much'"),
        ({"ddr": {"capacity_GB": 0, "bandwidth_GBps": 5}}, "must be a positive number"),
        ({"ddr": {"capacity_GB": 1, "bandwidth_GBps": -5}}, "bandwidth_Bps must be a positive number, got -5"),
        ({"ddr": {"capacity_GB": 1, "bandwidth_GBps": 5, "speed": 1}}, "unknown key 'speed'"),
    ],
)
def test_nonsense_is_refused_by_name(tiers: Any, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        ClusterSpec.from_dict({"preset": "dgx-h100", "tiers": tiers})


def test_a_tier_cannot_be_given_twice() -> None:
    with pytest.raises(ClusterError, match="given twice"):
        ClusterSpec.local(1).with_tiers(Tier("ddr", 1, 1), Tier("ddr", 2, 1))


def test_exercise_25_3_fills_hbm_and_ddr() -> None:
    """400 TB over 2048 devices of 80 GB, 256 nodes of 2 TB and 100 TB of NVMe: 160 TB stay, 240 TB rest in ddr."""
    form = {
        "nodes": 256,
        "device": {"preset": "h100", "memory_bytes": 80e9},
        "devices_per_node": 8,
        "tiers": {
            "ddr": {"capacity_GB": 2000, "bandwidth_GBps": 50},
            "nvme": {"capacity_GB": 100e3 / 256, "bandwidth_GBps": 7},
        },
    }
    cluster = ClusterSpec.from_dict(form)
    assert cluster.size == 2048
    device = cluster.device(0)
    layers = {f"layer {i}": 400e12 / 2048 / 100 for i in range(100)}
    at_home = dict(list(layers.items())[:40])
    assert sum(at_home.values()) <= device.memory_bytes
    away = {n: b for n, b in layers.items() if n not in at_home}
    where = place(away, device.tiers)
    assert sum(away[n] for n, tier in where.items() if tier == "ddr") * 2048 == pytest.approx(240e12)
    with pytest.raises(InfeasibleError, match="short per rank"):
        place({n: 8 * b for n, b in layers.items()}, device.tiers)  # 16 bytes a parameter with Adam
