"""Descriptions of clusters, as files hold them: YAML or JSON, read into devices and link levels.

    preset: dgx-h100          # or, in full:      nodes:
    nodes: 4                                        - {count: 4, device: h100, devices_per_node: 8, bandwidth_GBps: 450}
    tiers: usual                                  network: {bandwidth_GBps: 50, latency_us: 8, oversubscription: 2}
                                                  tiers: {ddr: {capacity_GB: 2000, bandwidth_GBps: 50}, nvme: {…}}

`tiers` is memory beyond the devices' own (`autopar.cluster.tiers`): capacity of a node, bandwidth of each device;
`reliability` how often devices fail and what that takes (`autopar.cluster.reliability`). A new
device or machine is data: a row of `data/devices.json`, or of `data/machines.json`, or all its figures in such a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from autopar.cluster.checks import MOST_SECONDS, OVERSUBSCRIPTION, RANKS, RATE, SHARE, checked
from autopar.cluster.device import DeviceSpec, load_data, read_device, usual_tiers
from autopar.cluster.family import add_rack, link_family, usual_link
from autopar.cluster.link import LinkLevel
from autopar.cluster.reliability import Reliability
from autopar.cluster.tiers import tiers_from_dict
from autopar.cluster.yaml_text import parse_yaml
from autopar.errors import ClusterError
from autopar.runtime.data.datafile import parse_json, read_text
from autopar.runtime.data.fields import Form, Length, from_data, kept, to_data
from autopar.runtime.data.schema import Schema, anything, flag, listed, number, record, row, shown, text, where

MOST_BYTES = {"JSON": 1 << 26, "YAML": 1 << 16}
"""The most bytes of a cluster file."""
_MOST_RUNS = 1 << 10
"""Entries of `nodes:` and runs of alike devices."""

_TIERS: Schema[Any] = where(
    lambda value: value == "usual" or isinstance(value, Mapping),
    "`usual`, or a mapping such as {ddr: {capacity_GB: 2000, bandwidth_GBps: 50}}",
)
_LINKS: dict[str, Schema[Any]] = {
    "bandwidth_GBps": RATE,
    "latency_us": number(0, MOST_SECONDS * 1e6),
    "efficiency": SHARE,
}
_NETWORK: dict[str, Schema[Any]] = {**_LINKS, "oversubscription": OVERSUBSCRIPTION, "shared": flag()}
_NODE: dict[str, Schema[Any]] = {
    **_LINKS,
    "count": RANKS,
    "devices_per_node": RANKS,
    "in_switch": flag(),
    "tiers": _TIERS,
}
_CLUSTER = record(
    {},
    {
        **_NODE,
        "name": text(),
        "preset": text(),
        "nodes": anything,
        "device": read_device,
        "network": record({}, _NETWORK),
        "rack": record({"nodes": RANKS}, _NETWORK),
        "profile": text(),
        "reliability": partial(from_data, Reliability),
    },
)
_ROWS = listed(row(RANKS, read_device), least=1)
_RECORDS = listed(record({"count": RANKS, "device": read_device}), least=1, most=_MOST_RUNS)


def _runs(value: object, path: str) -> Runs:
    """Raises SchemaError, ClusterError."""
    if isinstance(value, tuple):
        return tuple(_ROWS(value, path))
    return tuple((run["count"], run["device"]) for run in _RECORDS(value, path))


def _runs_data(runs: Runs) -> list[dict[str, Any]]:
    return [{"count": count, "device": to_data(device)} for count, device in runs]


Runs = tuple[tuple[int, DeviceSpec], ...]


@dataclass(frozen=True)
class Description:
    """A description of a cluster: devices in rank order, as runs (count, device), and the link levels above them, innermost
    first. reliability: how often they fail, where that is known."""

    name: str
    devices: Annotated[Runs, Form(_runs, _runs_data)]
    levels: Annotated[tuple[LinkLevel, ...], Length(1, 16)]
    reliability: Reliability | None = field(default=None, metadata=kept(sparse=True))


def read_cluster_file(path: Path) -> Mapping[str, Any]:
    """The content of a YAML or JSON cluster file. Raises ClusterError, naming the file, where it holds no description."""
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        content = read_text(path, MOST_BYTES[kind])
        data = parse_json(content) if kind == "JSON" else parse_yaml(content)
    except OSError as err:
        raise ClusterError(f"{path}: cannot read the cluster file ({err.strerror})") from err
    except ValueError as err:
        raise ClusterError(f"{path}: not valid {kind}: {err}") from err
    if not isinstance(data, Mapping):
        raise ClusterError(f"{path}: a cluster file is a mapping with `preset:` or `nodes:`, got {type(data).__name__}")
    return data


def described(data: Mapping[str, Any]) -> Description:
    """Reads `ClusterSpec.to_dict`'s form, `{preset, nodes}`, or `{nodes: [...], network: {...}}`. Raises ClusterError."""
    if not isinstance(data, Mapping):
        raise ClusterError(f"a cluster is described by a mapping with `preset:` or `nodes:`, got {shown(data)}")
    if "levels" in data:
        checked(record({}, {"profile": text()}, others=True), data, "")
        full = {key: value for key, value in data.items() if key != "profile"}
        return checked(partial(from_data, Description), {"name": "cluster", **full}, "")
    given = checked(_CLUSTER, data, "")
    if "reliability" in given:
        rest = described({key: value for key, value in data.items() if key != "reliability"})
        return replace(rest, reliability=given["reliability"])
    if "tiers" in given:
        return _tiered(described({key: value for key, value in data.items() if key != "tiers"}), given["tiers"])
    if "preset" in given:
        return _preset(given["preset"], checked(RANKS, given.get("nodes", 1), "", "nodes"))
    nodes = given.get("nodes")
    if isinstance(nodes, int) and "device" in given:
        count = checked(RANKS, nodes, "", "nodes")
        nodes = [{**{k: v for k, v in given.items() if k in _NODE or k == "device"}, "count": count}]
    if not isinstance(nodes, list | tuple) or not nodes or len(nodes) > _MOST_RUNS:
        raise ClusterError(
            "needs `preset: <name>` with `nodes: <count>`, or `nodes:` as a list of "
            f"{{count, device, devices_per_node, bandwidth_GBps}} with at most {_MOST_RUNS} entries"
        )
    return _from_nodes(given.get("name", "cluster"), nodes, given.get("network", {}), given.get("rack"))


def _preset(name: str, nodes: int) -> Description:
    """A cluster of so many nodes of a known machine (data/machines.json)."""
    machines = load_data("machines.json")["machines"]
    if name not in machines:
        raise ClusterError(f"unknown cluster preset {name!r}; known: {', '.join(sorted(machines))}")
    return described({"name": f"{name}-x{nodes}", **machines[name], "nodes": nodes})


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
    nodes = [_nodes(entry, f"nodes[{i}]") for i, entry in enumerate(entries)]
    total = checked(RANKS, sum(run.count * run.per_node for run in nodes), "", "the number of devices")
    node = _node_level(nodes)
    levels = [node]
    if rack:
        size = min(rack["nodes"] * node.group_size, total)
        if size > node.group_size:
            rate = rack.get("bandwidth_GBps", node.bandwidth_Bps / 1e9) * 1e9
            add_rack(levels, _described_link(replace(node, name="rack", group_size=size, bandwidth_Bps=rate), rack))
    if total > levels[-1].group_size:
        rate = network["bandwidth_GBps"] * 1e9 if "bandwidth_GBps" in network else None
        families = [link_family(run.device) for run in nodes]
        outer = _weakest([usual_link(family, "cluster", total, rate) for family in families])
        levels.append(_described_link(outer, network))
    return Description(name, tuple((run.count * run.per_node, run.device) for run in nodes), tuple(levels))


def _nodes(data: Any, path: str) -> _Nodes:
    """One entry of `nodes:`, what it leaves out from its device's family."""
    if not isinstance(data, Mapping) or "device" not in data:
        raise ClusterError("nodes: every entry needs `device:` (a preset such as h100, or its figures)")
    entry = checked(record({"device": read_device}, _NODE), data, "", path)
    device: DeviceSpec = entry["device"]
    family = link_family(device)
    count, per_node = entry.get("count", 1), entry.get("devices_per_node", family["devices_per_node"])
    if "tiers" in entry:
        usual = entry["tiers"] == "usual"
        device = replace(device, tiers=usual_tiers(device) if usual else tiers_from_dict(entry["tiers"], per_node))
    rate = entry.get("bandwidth_GBps", family["intra_bandwidth_Bps"] / 1e9) * 1e9
    return _Nodes(count, device, _described_link(usual_link(family, "node", per_node, rate), entry), rate)


def _node_level(nodes: Sequence[_Nodes]) -> LinkLevel:
    """The links inside nodes as one level: what the weakest of them can, and per node where sizes or rates differ."""
    inside = [run.inside for run in nodes]
    level = replace(_weakest(inside), bandwidth_Bps=min(run.rate_Bps for run in nodes))
    each = [run for run in nodes for _ in range(run.count)]
    if len({link.group_size for link in inside}) > 1:
        level = replace(level, starts=tuple(accumulate((run.per_node for run in each[:-1]), initial=0)))
    rates = [run.rate_Bps * run.inside.efficiency / level.efficiency for run in each]
    if len(set(rates)) > 1:
        level = replace(level, group_bandwidths=tuple(rates))
    return level


def _weakest(links: Sequence[LinkLevel]) -> LinkLevel:
    """A level that can what the weakest of these can, whatever their order; its direct links are those of the link with fewest,
    as a rate that is split where nothing splits it would be far too low."""
    return replace(
        links[0],
        group_size=max(link.group_size for link in links),
        bandwidth_Bps=min(link.bandwidth_Bps for link in links),
        latency_s=max(link.latency_s for link in links),
        base_s=max(link.base_s for link in links),
        ramp_s=max(link.ramp_s for link in links),
        efficiency=min(link.efficiency for link in links),
        in_switch_efficiency=min(link.in_switch_efficiency for link in links),
        in_switch=all(link.in_switch for link in links),
        mesh_links=min(link.mesh_links for link in links),
    )


def _described_link(link: LinkLevel, entry: Mapping[str, Any]) -> LinkLevel:
    """`link` with what a cluster file says about it; a given latency replaces launch, hop and ramp times."""
    if "latency_us" in entry:
        link = replace(link, latency_s=entry["latency_us"] * 1e-6, base_s=0.0, ramp_s=0.0)
    if "efficiency" in entry:
        link = replace(link, efficiency=entry["efficiency"], in_switch_efficiency=entry["efficiency"])
    return replace(link, **{name: entry[name] for name in ("in_switch", "shared", "oversubscription") if name in entry})


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
