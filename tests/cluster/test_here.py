"""The cluster that ranks find themselves in."""

from __future__ import annotations

import pytest

import autopar
from autopar.cluster.given import as_cluster
from autopar.cluster.here import Place, cluster_here, cluster_of, place_here

GIB = float(1 << 30)


def test_ranks_of_one_machine_are_a_node() -> None:
    cluster = cluster_of([Place("a", "cpu", 8 * GIB)] * 3)
    assert [(n, d.name, d.memory_bytes) for n, d in cluster.devices] == [(3, "cpu", 8 * GIB)]
    assert [(level.name, level.group_size) for level in cluster.levels] == [("node", 3)]
    assert cluster.levels == autopar.ClusterSpec.local(3).levels


def test_machines_alike_are_alike_and_joined_by_a_network() -> None:
    places = [
        Place(machine, "h100", bytes_) for machine, bytes_ in (("a", 79 * GIB), ("b", 80 * GIB)) for _ in range(4)
    ]
    cluster = cluster_of(places)
    assert [(n, d.memory_bytes) for n, d in cluster.devices] == [(8, 79 * GIB)]
    assert [(level.name, level.group_size) for level in cluster.levels] == [("node", 4), ("cluster", 8)]


def test_machines_of_several_kinds_and_sizes_keep_their_order() -> None:
    cluster = cluster_of([*[Place("a", "h100", 80 * GIB)] * 2, *[Place("b", "a100", 40 * GIB)] * 3])
    assert [(n, d.name) for n, d in cluster.devices] == [(2, "h100"), (3, "a100")]
    assert (cluster.levels[0].starts, cluster.levels[0].group_size) == ((0, 2), 3)


def test_here_is_what_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": 4, "RANK": 1, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    cluster = as_cluster("here")
    assert (cluster.size, [level.group_size for level in cluster.levels]) == (4, [2, 4])
    assert cluster.device(0).memory_bytes == place_here().memory_bytes


def test_here_is_this_machine_where_nobody_started_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    cluster = cluster_here()
    assert (cluster.size, cluster.device(0).name) == (1, "cpu")
    assert cluster.fingerprint() == cluster_here().fingerprint()
