"""Descriptions of clusters, as files hold them: YAML or JSON, read into devices and link levels.

    preset: dgx-h100          # or, in full:      nodes:
    nodes: 4                                        - {count: 4, device: h100, devices_per_node: 8, bandwidth_GBps: 450}
    tiers: usual                                  network: {bandwidth_GBps: 50, latency_us: 8, oversubscription: 2}
                                                  tiers: {ddr: {capacity_GB: 2000, bandwidth_GBps: 50}, nvme: {…}}

`tiers` is memory beyond the devices' own (`autopar.cluster.tiers`): capacity of a node, bandwidth of each device. A new
device or machine is data: a row of `data/devices.json`, or of `data/machines.json`, or all its figures in such a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from autopar.cluster.device import DeviceSpec, device_from_dict, load_data, usual_tiers
from autopar.cluster.family import add_rack, link_family, usual_link
from autopar.cluster.link import LinkLevel, link_from_dict
from autopar.cluster.tiers import tiers_from_dict
from autopar.errors import ClusterError

_NODE_KEYS = {"count", "devices_per_node", "bandwidth_GBps", "latency_us", "efficiency", "in_switch", "tiers"}
_NETWORK_KEYS = {"bandwidth_GBps", "latency_us", "efficiency", "oversubscription"}


@dataclass(frozen=True)
class Description:
    """What a description says: devices in rank order, as runs (count, device), and the link levels above them."""

    name: str
    devices: tuple[tuple[int, DeviceSpec], ...]
    levels: tuple[LinkLevel, ...]


def read_cluster_file(path: Path) -> Mapping[str, Any]:
    """What a YAML or JSON cluster file holds. Raises ClusterError, naming the file, where it holds no description."""
    try:
        text = path.read_text()
    except OSError as err:
        raise ClusterError(f"{path}: cannot read the cluster file ({err.strerror})") from err
    try:
        data = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ValueError as err:
        raise ClusterError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {err}") from err
    if not isinstance(data, Mapping):
        raise ClusterError(f"{path}: a cluster file is a mapping with `preset:` or `nodes:`, got {type(data).__name__}")
    return data


def described(data: Mapping[str, Any]) -> Description:
    """Reads `ClusterSpec.to_dict`'s form, `{preset, nodes}`, or `{nodes: [...], network: {...}}`. Raises ClusterError."""
    if "levels" in data:
        runs = tuple((int(run["count"]), device_from_dict(run["device"])) for run in data["devices"])
        return Description(str(data.get("name", "cluster")), runs, tuple(map(link_from_dict, data["levels"])))
    _known(data, {"name", "preset", "nodes", "network", "rack", "profile", "device", *_NODE_KEYS}, "cluster")
    if "tiers" in data:
        rest = {key: value for key, value in data.items() if key != "tiers"}
        return _tiered(described(rest), data["tiers"])
    if "preset" in data:
        return _preset(str(data["preset"]), int(data.get("nodes", 1)))
    nodes = data.get("nodes")
    if isinstance(nodes, int) and "device" in data:
        nodes = [{"count": nodes, **{k: v for k, v in data.items() if k in _NODE_KEYS or k == "device"}}]
    if not isinstance(nodes, Sequence) or isinstance(nodes, str) or not nodes:
        raise ClusterError(
            "needs `preset: <name>` with `nodes: <count>`, or `nodes:` as a list of "
            "{count, device, devices_per_node, bandwidth_GBps}"
        )
    return _from_nodes(str(data.get("name", "cluster")), nodes, data.get("network", {}), data.get("rack"))


def _preset(name: str, nodes: int) -> Description:
    """So many nodes of a known machine (data/machines.json)."""
    table = load_data("machines.json")["machines"]
    if name not in table:
        raise ClusterError(f"unknown cluster preset {name!r}; known: {', '.join(sorted(table))}")
    return described({"name": f"{name}-x{nodes}", **table[name], "nodes": nodes})


@dataclass(frozen=True)
class _Nodes:
    """An entry of `nodes:`: so many nodes alike. rate_Bps: of the links inside one."""

    count: int
    device: DeviceSpec
    inside: LinkLevel
    rate_Bps: float

    @property
    def per_node(self) -> int:
        return self.inside.group_size


def _from_nodes(
    name: str, entries: Sequence[Any], network: Mapping[str, Any], rack: Mapping[str, Any] | None
) -> Description:
    nodes = [_nodes(entry) for entry in entries]
    total = sum(run.count * run.per_node for run in nodes)
    _known(network, _NETWORK_KEYS, "network")
    node = _node_level(nodes)
    levels = [node]
    family = link_family(nodes[0].device)
    if rack:
        _known(rack, {"nodes", *_NETWORK_KEYS}, "rack")
        size = min(int(rack["nodes"]) * node.group_size, total)
        if size > node.group_size:
            rate = _positive(rack, "bandwidth_GBps", node.bandwidth_Bps / 1e9) * 1e9
            add_rack(levels, _described_link(replace(node, name="rack", group_size=size, bandwidth_Bps=rate), rack))
    if total > levels[-1].group_size:
        rate = _positive(network, "bandwidth_GBps", family["inter_bandwidth_Bps"] / 1e9) * 1e9
        levels.append(_described_link(usual_link(family, "cluster", total, rate), network))
    return Description(name, tuple((run.count * run.per_node, run.device) for run in nodes), tuple(levels))


def _nodes(entry: Any) -> _Nodes:
    """One entry of `nodes:`, what it leaves out from its device's family."""
    if not isinstance(entry, Mapping) or "device" not in entry:
        raise ClusterError("nodes: every entry needs `device:` (a preset such as h100, or its figures)")
    _known(entry, _NODE_KEYS | {"device"}, "nodes")
    device = device_from_dict(entry["device"])
    family = link_family(device)
    count, per_node = int(entry.get("count", 1)), int(entry.get("devices_per_node", family["devices_per_node"]))
    if count < 1 or per_node < 1:
        raise ClusterError(f"nodes: count and devices_per_node must be at least 1, got {count} and {per_node}")
    if "tiers" in entry:
        usual = entry["tiers"] == "usual"
        device = replace(device, tiers=usual_tiers(device) if usual else tiers_from_dict(entry["tiers"], per_node))
    rate = _positive(entry, "bandwidth_GBps", family["intra_bandwidth_Bps"] / 1e9) * 1e9
    return _Nodes(count, device, _described_link(usual_link(family, "node", per_node, rate), entry), rate)


def _node_level(nodes: Sequence[_Nodes]) -> LinkLevel:
    """The links inside nodes as one level: what the weakest of them can, and per node where sizes or rates differ."""
    inside = [run.inside for run in nodes]
    level = replace(
        inside[0],
        group_size=max(link.group_size for link in inside),
        bandwidth_Bps=min(run.rate_Bps for run in nodes),
        latency_s=max(link.latency_s for link in inside),
        base_s=max(link.base_s for link in inside),
        ramp_s=max(link.ramp_s for link in inside),
        efficiency=min(link.efficiency for link in inside),
        in_switch_efficiency=min(link.in_switch_efficiency for link in inside),
        in_switch=all(link.in_switch for link in inside),
    )
    each = [run for run in nodes for _ in range(run.count)]
    if len({link.group_size for link in inside}) > 1:
        level = replace(level, starts=tuple(accumulate((run.per_node for run in each[:-1]), initial=0)))
    if len({run.rate_Bps for run in nodes}) > 1:
        level = replace(level, group_bandwidths=tuple(run.rate_Bps for run in each))
    return level


def _described_link(link: LinkLevel, entry: Mapping[str, Any]) -> LinkLevel:
    """`link` with what a cluster file says about it; a given latency replaces launch, hop and ramp times."""
    if "latency_us" in entry:
        link = replace(link, latency_s=float(entry["latency_us"]) * 1e-6, base_s=0.0, ramp_s=0.0)
    if "efficiency" in entry:
        link = replace(link, efficiency=float(entry["efficiency"]), in_switch_efficiency=float(entry["efficiency"]))
    if "oversubscription" in entry:
        link = replace(link, oversubscription=float(entry["oversubscription"]))
    if "in_switch" in entry:
        link = replace(link, in_switch=bool(entry["in_switch"]))
    return link


def _tiered(cluster: Description, tiers: Any) -> Description:
    """The cluster with what its file says about every node's tiers."""
    per_node = min(cluster.levels[0].group_size, sum(count for count, _ in cluster.devices))
    if cluster.levels[0].name != "node":  # nodes of a rack that is one level (NVL72)
        per_node = int(link_family(cluster.devices[0][1])["devices_per_node"])
    node_tiers = tiers_from_dict(tiers, per_node) if tiers != "usual" else ()
    if tiers != "usual" and not node_tiers:
        return cluster
    return replace(
        cluster, devices=tuple((n, replace(d, tiers=node_tiers or usual_tiers(d))) for n, d in cluster.devices)
    )


def _known(data: Mapping[str, Any], allowed: set[str], where: str) -> None:
    for key in data:
        if key not in allowed:
            raise ClusterError(f"{where}: unknown key {key!r}; allowed: {', '.join(sorted(allowed))}")


def _positive(data: Mapping[str, Any], key: str, default: float) -> float:
    value = data.get(key, default)
    if not isinstance(value, int | float) or value <= 0:
        raise ClusterError(f"{key} must be a positive number, got {value!r}")
    return float(value)


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as err:
        raise ValueError(err) from err
