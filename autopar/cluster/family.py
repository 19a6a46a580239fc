"""Usual figures of a device's family: the links inside a node and between nodes (data/machines.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.cluster.device import DeviceSpec, load_data
from autopar.cluster.link import LinkLevel


def link_family(device: DeviceSpec) -> dict[str, Any]:
    """Link figures usual for a device's family (data/machines.json)."""
    families: dict[str, dict[str, Any]] = load_data("machines.json")["families"]
    for key in sorted(families, key=len, reverse=True):
        if device.name.startswith(key):
            return families[key]
    return families["default"]


def usual_link(family: Mapping[str, Any], level: str, size: int, bandwidth_Bps: float | None = None) -> LinkLevel:
    """A node or cluster level with the family's constants, at a given rate if any."""
    side = "intra" if level == "node" else "inter"
    link = LinkLevel(
        level,
        size,
        float(bandwidth_Bps or family[f"{side}_bandwidth_Bps"]),
        family[f"{side}_latency_s"],
        family[f"{side}_efficiency"],
        base_s=family[f"{side}_base_s"],
        ramp_s=family[f"{side}_ramp_s"],
    )
    if level != "node":
        return link
    switch = {k: family[k] for k in ("in_switch", "in_switch_efficiency", "mesh_links")}
    return replace(link, **switch)


def add_rack(levels: list[LinkLevel], rack: LinkLevel) -> None:
    """A rack whose fabric is as fast as a node's (NVL72) is one level with it; a slower one goes above."""
    if rack.bandwidth_Bps >= levels[-1].bandwidth_Bps and rack.oversubscription == 1:
        levels.pop()
    levels.append(rack)
