"""Every argument of a cluster's constructors, and every figure in a file, is checked: a named error says what may stand there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec, EfficiencyCurve, device_from_dict, device_preset
from autopar.cluster.link import LinkLevel
from autopar.cluster.tiers import Tier
from autopar.errors import ClusterError

WRONG: tuple[Any, ...] = (
    "x",
    b"x",
    [],
    {"a": 1},
    object(),
    True,
    -1,
    float("nan"),
    float("inf"),
    10**400,
    1e200,
    2 + 1j,
)
H100 = device_preset("h100")
LINK = LinkLevel("node", 8, 1e9)


@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize(
    "make",
    [
        lambda v: ClusterSpec.local(v),
        lambda v: ClusterSpec.local(2, memory_bytes=v),
        lambda v: ClusterSpec.preset("dgx-h100", nodes=v),
        lambda v: ClusterSpec.preset(v),
        lambda v: ClusterSpec.homogeneous(devices=v, device="h100"),
        lambda v: ClusterSpec.homogeneous(devices=8, device="h100", intra_bandwidth_Bps=v),
        lambda v: ClusterSpec.homogeneous(devices=8, device="h100", inter_latency_s=v),
        lambda v: ClusterSpec.homogeneous(devices=8, device="h100", devices_per_node=v),
        lambda v: ClusterSpec.homogeneous(devices=8, device="h100", oversubscription=v),
        lambda v: ClusterSpec.homogeneous(devices=8, device=v),
        lambda v: ClusterSpec.from_dict(v),
        lambda v: ClusterSpec.from_dict({"levels": v, "devices": v}),
        lambda v: ClusterSpec.local(2).with_tiers(v),
        lambda v: ClusterSpec.local(2).with_profile({"device": v}),
        lambda v: ClusterSpec.local(2).with_profile({"links": {"node": {"bandwidth_Bps": v}}}),
        lambda v: replace(H100, memory_bytes=v),
        lambda v: replace(H100, peak_flops={"float32": v}),
        lambda v: replace(H100, peak_flops=v),
        lambda v: replace(H100, curve=v),
        lambda v: replace(H100, tiers=(v,)),
        lambda v: replace(LINK, group_size=v),
        lambda v: replace(LINK, bandwidth_Bps=v),
        lambda v: replace(LINK, latency_s=v),
        lambda v: replace(LINK, efficiency=v),
        lambda v: replace(LINK, starts=(0, v)),
        lambda v: EfficiencyCurve(matmul=v),
        lambda v: Tier("ddr", v, 1e9),
        lambda v: Tier("ddr", 1e9, 1e9, v),
        lambda v: Tier(v, 1e9, 1e9),
        lambda v: ClusterSpec("c", ((v, H100),), (LINK,)),
        lambda v: ClusterSpec("c", v, (LINK,)),
        lambda v: ClusterSpec("c", ((8, H100),), v),
        lambda v: device_from_dict({"preset": "h100", "memory_bytes": v}),
    ],
)
def test_figures_that_cannot_be(make: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ClusterError):
        make(value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(levels=5), "levels must be a list of at least 1 and at most 16 entries, got 5"),
        (
            lambda d: d["levels"][1].update(latency_s="fast"),
            "levels[1].latency_s must be a number from 0 to 1e+09, got 'fast'",
        ),
        (lambda d: d["devices"][0].update(count="many"), "devices[0].count must be a whole number from 1 to 1048576"),
        (lambda d: d["devices"][0].update(count=10**9), "devices[0].count must be a whole number from 1 to 1048576"),
        (lambda d: d["levels"][0].pop("group_size"), "levels[0]: 'group_size' is missing"),
        (lambda d: d["levels"][0].update(name="a\nb"), "levels[0].name must be printable text on one line"),
        (lambda d: d["devices"][0]["device"].update(peak_flops={"float7": 1.0}), "unknown dtype 'float7'"),
    ],
)
def test_the_error_names_the_file_and_the_place(change: Callable[[Any], Any], says: str, tmp_path: Path) -> None:
    data = ClusterSpec.preset("dgx-h100", nodes=2).to_dict()
    change(data)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_file(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (None, "cannot read it"),
        ("{", "no JSON"),
        ("[]", "must be a mapping"),
        ('{"device": {"curve": {"a": 1}}}', "one of matmul"),
    ],
)
def test_a_profile_that_is_none(profile: str | None, says: str, tmp_path: Path) -> None:
    if profile is not None:
        (tmp_path / "p.json").write_text(profile)
    (tmp_path / "c.json").write_text('{"preset": "dgx-h100", "profile": "p.json"}')
    with pytest.raises(ClusterError, match=says):
        ClusterSpec.from_file(tmp_path / "c.json")


def test_devices_are_checked_field_by_field() -> None:
    with pytest.raises(ClusterError, match="device d: memory_bytes must be a positive number, got -1"):
        DeviceSpec("d", {"float32": 1e12}, -1, 1e9)
    with pytest.raises(ClusterError, match="name must be printable text"):
        DeviceSpec("d\n", {"float32": 1e12}, 1, 1e9)
