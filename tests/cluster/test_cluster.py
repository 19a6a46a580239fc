"""ClusterSpec: presets, files, heterogeneous clusters, and errors that name what is wrong."""

import json

import pytest

from autopar.cluster import ClusterSpec, resized
from autopar.cluster.device import load_data
from autopar.costmodel.collective import collective_time_s
from autopar.errors import ClusterError


@pytest.mark.parametrize("name", sorted(load_data("machines.json")["machines"]))
def test_every_preset_builds_and_round_trips(name):
    cluster = ClusterSpec.preset(name, nodes=36)
    assert cluster.levels[-1].group_size == cluster.size
    again = ClusterSpec.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster
    assert again.fingerprint() == cluster.fingerprint()


def test_local_has_one_level_and_stable_fingerprints():
    cluster = ClusterSpec.local(4)
    assert (cluster.size, len(cluster.levels), cluster.device(3).name) == (4, 1, "cpu")
    assert cluster.fingerprint() == ClusterSpec.local(4).fingerprint() != ClusterSpec.local(8).fingerprint()


def test_a_rack_of_one_fabric_is_one_level():
    cluster = ClusterSpec.preset("gb200-nvl72", nodes=36)
    assert [(lv.name, lv.group_size) for lv in cluster.levels] == [("rack", 72), ("cluster", 144)]


def test_yaml_and_json_files_agree(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "nodes:\n- {count: 2, device: h100, devices_per_node: 8, bandwidth_GBps: 450}\n"
        "network: {bandwidth_GBps: 50, latency_us: 8, oversubscription: 2}\n"
    )
    data = {
        "nodes": [{"count": 2, "device": "h100", "devices_per_node": 8, "bandwidth_GBps": 450}],
        "network": {"bandwidth_GBps": 50, "latency_us": 8, "oversubscription": 2},
    }
    (tmp_path / "c.json").write_text(json.dumps(data))
    cluster = ClusterSpec.from_file(tmp_path / "c.yaml")
    assert cluster == ClusterSpec.from_file(tmp_path / "c.json")
    assert cluster.levels[1].rate_Bps() == pytest.approx(25e9 * cluster.levels[1].efficiency)
    assert cluster.levels[1].latency_s == pytest.approx(8e-6)


def test_different_devices_and_links_in_one_cluster():
    cluster = ClusterSpec.from_dict(
        {
            "nodes": [
                {"count": 1, "device": "h100", "devices_per_node": 8},
                {"count": 2, "device": {"preset": "a100", "memory_bytes": 40e9}, "devices_per_node": 4},
            ],
            "network": {"bandwidth_GBps": 25},
        }
    )
    assert cluster.size == 16
    assert not cluster.homogeneous_devices
    assert [cluster.device(r).name for r in (0, 7, 8, 15)] == ["h100", "h100", "a100", "a100"]
    assert cluster.device(15).memory_bytes == 40e9
    node = cluster.levels[0]
    assert [node.group_of(r) for r in (0, 7, 8, 11, 12)] == [0, 0, 1, 1, 2]
    fast = collective_time_s(cluster, "all_gather", 1e9, (0, 1, 2, 3))
    assert fast < collective_time_s(cluster, "all_gather", 1e9, (8, 9, 10, 11))
    assert ClusterSpec.from_dict(cluster.to_dict()) == cluster


def test_a_profile_beside_the_file_is_loaded(tmp_path):
    profile = {"device": {"peak_flops": {"float32": 1e12}}, "links": {"node": {"bandwidth_Bps": 7e9}}}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    (tmp_path / "c.yaml").write_text("nodes: [{count: 1, device: cpu, devices_per_node: 4}]\nprofile: p.json\n")
    cluster = ClusterSpec.from_file(tmp_path / "c.yaml")
    assert cluster.device(0).peak("float32") == 1e12
    assert cluster.levels[0].bandwidth_Bps == 7e9
    described = {"nodes": [{"count": 1, "device": "cpu", "devices_per_node": 4}], "profile": str(tmp_path / "p.json")}
    assert ClusterSpec.from_dict(described) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 3", "needs `preset: <name>`"),
        ("preset: dgx-z9", "unknown cluster preset 'dgx-z9'; known: "),
        ("nodes: [{count: 1}]", "every entry needs `device:`"),
        ("nodes: [{count: 1, device: h100, gpus: 8}]", "nodes[0]: unknown key 'gpus'; allowed"),
        ("nodes: [{count: 1, device: h100, bandwidth_GBps: -5}]", "bandwidth_GBps must be a positive number, got -5"),
        ("nodes: [{count: 0, device: h100}]", "nodes[0].count must be a whole number from 1 to 1048576, got 0"),
        ("- 1", "a cluster file is a mapping"),
        ("{a: [", "not valid YAML"),
        ("preset: dgx-h100\nnodez: 2", "unknown key 'nodez'"),
    ],
)
def test_wrong_files_are_explained(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=r"bad\.yaml") as err:
        ClusterSpec.from_file(path)
    assert message in str(err.value)


def test_missing_files_and_ranks_are_explained(tmp_path):
    with pytest.raises(ClusterError, match="cannot read the cluster file"):
        ClusterSpec.from_file(tmp_path / "none.yaml")
    with pytest.raises(ClusterError, match="rank 8 is outside"):
        ClusterSpec.preset("dgx-h100").device(8)
    with pytest.raises(ClusterError, match="12 devices do not fill nodes of 8"):
        ClusterSpec.homogeneous(devices=12, device="h100")


def test_a_cluster_of_another_size_is_of_the_same_machines():
    nodes = ClusterSpec.preset("dgx-h100", nodes=4)
    assert [level.group_size for level in resized(nodes, 16).levels] == [8, 16]
    assert [level.group_size for level in resized(nodes, 8).levels] == [8]
    assert [level.group_size for level in resized(nodes, 6).levels] == [6]
    assert [level.group_size for level in resized(nodes, 50).levels] == [8, 50]
    for ranks in (6, 16, 50):
        assert resized(nodes, ranks).devices == ((ranks, nodes.device(0)),)
        assert resized(nodes, ranks).levels[0].bandwidth_Bps == nodes.levels[0].bandwidth_Bps
    local = resized(ClusterSpec.local(4), 3)
    assert (local.devices, local.levels) == (ClusterSpec.local(3).devices, ClusterSpec.local(3).levels)


def test_the_first_machines_of_a_mixed_cluster_keep_their_kinds():
    nodes = [{"count": 1, "device": "a100"}, {"count": 2, "device": "h100"}]
    mixed = ClusterSpec.from_dict({"nodes": nodes})
    one = mixed.levels[0].group_size
    part = resized(mixed, 2 * one)
    assert [(count, device.name) for count, device in part.devices] == [
        (one, mixed.device(0).name),
        (one, mixed.device(one).name),
    ]
    assert resized(mixed, one).homogeneous_devices
    with pytest.raises(ClusterError, match="the number of devices"):
        resized(mixed, 0)
