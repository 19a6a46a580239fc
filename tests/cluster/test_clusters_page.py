"""The cluster files of docs/clusters.md are clusters, of what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autopar import ClusterSpec
from autopar.cluster.device import device_names, device_preset
from tests.test_house import ROOT

FILES = dict(re.findall(r"```yaml\n# (\S+\.yaml).*\n((?:.*\n)*?)```", (ROOT / "docs" / "clusters.md").read_text()))
DEVICES = {
    "dgx.yaml": ["h100"] * 32,
    "a100-pcie.yaml": ["a100"] * 8,
    "rtx4090.yaml": ["rtx4090"] * 4,
    "l4.yaml": ["l4"] * 16,
    "l40s.yaml": ["l40s"] * 4,
    "a10.yaml": ["a10"] * 4,
    "watts.yaml": ["h100"] * 8,
    "mixed.yaml": ["a100"] * 4 + ["v100"] * 4,
    "uneven.yaml": ["h100"] * 8 + ["a100"] * 4,
    "measured.yaml": ["a100"] * 4,
    "cpus.yaml": ["cpu"] * 8,
    "long.yaml": ["h100"] * 128,
}
MEASURED_BPS = 123e9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    measured = {"device": {"memory_bandwidth_Bps": MEASURED_BPS}, "links": {"node": {"latency_s": 1e-5}}}
    (tmp_path / "profile.json").write_text(json.dumps(measured))
    return tmp_path


def test_every_file_of_the_page_is_read() -> None:
    assert FILES.keys() == DEVICES.keys()


@pytest.mark.parametrize("name", DEVICES)
def test_a_file_describes_the_devices_that_it_names(name: str, folder: Path) -> None:
    cluster = ClusterSpec.from_file(folder / name)
    assert [cluster.device(rank).name for rank in range(cluster.size)] == DEVICES[name]
    assert cluster.levels[-1].group_size >= cluster.size


def test_the_watts_of_the_page_are_those_of_the_devices() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    said = dict(re.findall(r"\| ([a-z0-9, -]+) \| ([0-9]+ W|not known) (?=\|)", page))
    on_page = {name: watts for names, watts in said.items() for name in names.split(", ")}
    known = {name: device_preset(name).busy_watts for name in device_names()}
    assert on_page == {name: "not known" if watts is None else f"{watts:g} W" for name, watts in known.items()}


def test_figures_of_a_file_are_the_clusters(folder: Path) -> None:
    card = ClusterSpec.from_file(folder / "rtx4090.yaml")
    assert card.device(0).peak_flops["bfloat16"] == 165e12
    assert (card.levels[0].bandwidth_Bps, card.levels[0].efficiency) == (25e9, 0.5)
    assert [tier.name for tier in card.device(0).tiers] == ["ddr"]
    watts = ClusterSpec.from_file(folder / "watts.yaml").device(7)
    assert (watts.busy_watts, watts.idle_watts) == (610, 75)
    measured = ClusterSpec.from_file(folder / "measured.yaml")
    assert measured.device(0).memory_bandwidth_Bps == MEASURED_BPS
    assert measured.levels[0].latency_s == 1e-5
    assert ClusterSpec.from_file(folder / "long.yaml").reliability is not None
    assert ClusterSpec.from_file(folder / "a100-pcie.yaml").levels[1].oversubscription == 2
