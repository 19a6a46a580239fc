"""ClusterSpec: which devices there are, and which links join them.

Ranks are numbered so that neighbours are close: consecutive ranks share a node, consecutive nodes a rack.
`cluster.levels` lists the links innermost first; the last level joins all ranks. A cluster file is YAML or JSON:

    preset: dgx-h100          # or, in full:      nodes:
    nodes: 4                                        - {count: 4, device: h100, devices_per_node: 8, bandwidth_GBps: 450}
    tiers: usual                                  network: {bandwidth_GBps: 50, latency_us: 8, oversubscription: 2}
                                                  tiers: {ddr: {capacity_GB: 2000, bandwidth_GBps: 50}, nvme: {…}}

`tiers` is memory beyond the devices' own (`autopar.cluster.tiers`): capacity of a node, bandwidth of each device.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.cluster.device import DeviceSpec, EfficiencyCurve, device_from_dict, device_preset, load_data, usual_tiers
from autopar.cluster.link import LinkLevel, link_from_dict
from autopar.cluster.tiers import Tier, tiers_from_dict
from autopar.errors import ClusterError


@dataclass(frozen=True)
class ClusterSpec:
    """Devices in rank order, as runs (count, device), and the link levels above them, innermost first."""

    name: str
    devices: tuple[tuple[int, DeviceSpec], ...]
    levels: tuple[LinkLevel, ...]

    def __post_init__(self) -> None:
        if not self.devices or any(count < 1 for count, _ in self.devices):
            raise ClusterError(f"cluster {self.name}: needs at least one device in every run")
        sizes = [level.group_size for level in self.levels]
        if sizes != sorted(sizes):
            raise ClusterError(f"cluster {self.name}: levels must go from the innermost outwards, got sizes {sizes}")
        if not self.levels or (self.levels[-1].group_size < self.size):
            raise ClusterError(f"cluster {self.name}: the last level must join all {self.size} devices, got {sizes}")

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(count for count, _ in self.devices)

    @cached_property
    def _starts(self) -> list[int]:
        starts, total = [], 0
        for count, _ in self.devices:
            starts.append(total)
            total += count
        return starts

    def device(self, rank: int) -> DeviceSpec:
        """The device of a rank."""
        if not 0 <= rank < self.size:
            raise ClusterError(f"rank {rank} is outside the cluster of {self.size} devices")
        return self.devices[bisect_right(self._starts, rank) - 1][1]

    @property
    def homogeneous_devices(self) -> bool:
        """Whether all devices are alike."""
        return len({d for _, d in self.devices}) == 1

    def slowest(self, dtype: str = "float32") -> DeviceSpec:
        """The device with the least arithmetic in `dtype`: it sets the pace of a symmetric plan."""
        if len(self.devices) == 1:
            return self.devices[0][1]
        return min((d for _, d in self.devices), key=lambda d: d.peak("float8" if dtype == "mxfp8" else dtype))

    def fingerprint(self) -> str:
        """A short hash of everything a plan depends on; equal descriptions have equal fingerprints."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        return {
            "name": self.name,
            "devices": [{"count": n, "device": d.to_dict()} for n, d in self.devices],
            "levels": [level.to_dict() for level in self.levels],
        }

    def with_profile(self, profile: Mapping[str, Any]) -> ClusterSpec:
        """The same cluster with what `autopar-calibrate` measured in place of the presets' constants."""
        devices = tuple((n, _profiled_device(d, profile.get("device", {}))) for n, d in self.devices)
        measured = profile.get("links", {})
        levels = tuple(replace(lv, **measured[lv.name]) if lv.name in measured else lv for lv in self.levels)
        return replace(self, devices=devices, levels=levels)

    def with_tiers(self, *tiers: Tier) -> ClusterSpec:
        """The same cluster with memory tiers on every rank: the given ones, else those usual for each device."""
        ordered = tuple(sorted(tiers, key=lambda tier: tier.name))  # ddr before nvme
        devices = tuple((n, replace(d, tiers=ordered or usual_tiers(d))) for n, d in self.devices)
        return replace(self, devices=devices)

    @staticmethod
    def local(n: int = 1, *, memory_bytes: float | None = None) -> ClusterSpec:
        """n processes (or threads) of this machine's CPU: what tests and laptops use."""
        device = device_preset("cpu")
        if memory_bytes is not None:
            device = replace(device, memory_bytes=float(memory_bytes))
        link = LinkLevel("node", n, bandwidth_Bps=4e9, latency_s=30e-6)
        return ClusterSpec(f"local-{n}", ((n, device),), (link,))

    @staticmethod
    def preset(name: str, nodes: int = 1) -> ClusterSpec:
        """A known machine, such as `dgx-h100` or `gb200-nvl72` (`nodes` of them). Raises ClusterError."""
        table = load_data("machines.json")["machines"]
        if name not in table:
            raise ClusterError(f"unknown cluster preset {name!r}; known: {', '.join(sorted(table))}")
        return ClusterSpec.from_dict({"name": f"{name}-x{nodes}", **table[name], "nodes": nodes})

    @staticmethod
    def homogeneous(
        *,
        devices: int,
        device: str | Mapping[str, Any] | DeviceSpec,
        devices_per_node: int | None = None,
        intra_bandwidth_Bps: float | None = None,
        inter_bandwidth_Bps: float | None = None,
        intra_latency_s: float | None = None,
        inter_latency_s: float | None = None,
        intra_efficiency: float | None = None,
        inter_efficiency: float | None = None,
        nodes_per_rack: int | None = None,
        rack_bandwidth_Bps: float | None = None,
        oversubscription: float = 1.0,
        in_switch: bool | None = None,
        name: str | None = None,
    ) -> ClusterSpec:
        """`devices` alike devices in nodes of `devices_per_node`; what is left out comes from the device's family.

        With `nodes_per_rack`, nodes of one rack are joined by `rack_bandwidth_Bps` (NVL72: as fast as inside). A given
        latency replaces the family's fitted launch, hop and ramp times: the textbook formulas with that alpha.
        """
        spec = device if isinstance(device, DeviceSpec) else device_from_dict(device)
        family = _link_family(spec)
        per_node = min(devices_per_node or family["devices_per_node"], devices)
        if devices % per_node:
            raise ClusterError(
                f"{devices} devices do not fill nodes of {per_node}; use a multiple of {per_node}, "
                "or set devices_per_node"
            )
        node = _usual_link(family, "node", per_node, intra_bandwidth_Bps)
        if intra_latency_s is not None:
            node = replace(node, latency_s=intra_latency_s, base_s=0.0, ramp_s=0.0)
        if intra_efficiency:
            node = replace(node, efficiency=intra_efficiency, in_switch_efficiency=intra_efficiency)
        if in_switch is not None:
            node = replace(node, in_switch=in_switch)
        levels = [node]
        rack = per_node * nodes_per_rack if nodes_per_rack else 0
        if rack > per_node and devices > per_node:
            rack_rate = float(rack_bandwidth_Bps or node.bandwidth_Bps)
            _add_rack(levels, replace(node, name="rack", group_size=min(rack, devices), bandwidth_Bps=rack_rate))
        if devices > levels[-1].group_size:
            outer = _usual_link(family, "cluster", devices, inter_bandwidth_Bps)
            if inter_latency_s is not None:
                outer = replace(outer, latency_s=inter_latency_s, base_s=0.0, ramp_s=0.0)
            if inter_efficiency:
                outer = replace(outer, efficiency=inter_efficiency)
            levels.append(replace(outer, oversubscription=oversubscription))
        return ClusterSpec(name or f"{spec.name}-x{devices}", ((devices, spec),), tuple(levels))

    @staticmethod
    def from_file(path: str | Path) -> ClusterSpec:
        """Reads a YAML or JSON cluster file. Raises ClusterError, naming the file, for anything wrong in it."""
        path = Path(path)
        try:
            text = path.read_text()
        except OSError as err:
            raise ClusterError(f"{path}: cannot read the cluster file ({err.strerror})") from err
        try:
            data = json.loads(text) if path.suffix == ".json" else _yaml(text)
        except ValueError as err:
            raise ClusterError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {err}") from err
        if not isinstance(data, Mapping):
            raise ClusterError(
                f"{path}: a cluster file is a mapping with `preset:` or `nodes:`, got {type(data).__name__}"
            )
        try:
            cluster = ClusterSpec.from_dict(data)
            profile = data.get("profile")
            if isinstance(profile, str):
                cluster = cluster.with_profile(json.loads((path.parent / profile).read_text()))
            return cluster
        except ClusterError as err:
            raise ClusterError(f"{path}: {err}") from err

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ClusterSpec:
        """Reads `to_dict`'s form, `{preset, nodes}`, or `{nodes: [...], network: {...}}`. Raises ClusterError."""
        if "levels" in data:
            runs = tuple((int(run["count"]), device_from_dict(run["device"])) for run in data["devices"])
            return ClusterSpec(str(data.get("name", "cluster")), runs, tuple(map(link_from_dict, data["levels"])))
        _known(data, {"name", "preset", "nodes", "network", "rack", "profile", "device", *_NODE_KEYS}, "cluster")
        if "tiers" in data:
            rest = {key: value for key, value in data.items() if key != "tiers"}
            return _tiered(ClusterSpec.from_dict(rest), data["tiers"])
        if "preset" in data:
            return ClusterSpec.preset(str(data["preset"]), int(data.get("nodes", 1)))
        nodes = data.get("nodes")
        if isinstance(nodes, int) and "device" in data:
            nodes = [{"count": nodes, **{k: v for k, v in data.items() if k in _NODE_KEYS or k == "device"}}]
        if not isinstance(nodes, Sequence) or isinstance(nodes, str) or not nodes:
            raise ClusterError(
                "needs `preset: <name>` with `nodes: <count>`, or `nodes:` as a list of "
                "{count, device, devices_per_node, bandwidth_GBps}"
            )
        return _from_nodes(str(data.get("name", "cluster")), nodes, data.get("network", {}), data.get("rack"))


_NODE_KEYS = {"count", "devices_per_node", "bandwidth_GBps", "latency_us", "efficiency", "in_switch", "tiers"}
_NETWORK_KEYS = {"bandwidth_GBps", "latency_us", "efficiency", "oversubscription"}


def _from_nodes(
    name: str, nodes: Sequence[Any], network: Mapping[str, Any], rack: Mapping[str, Any] | None
) -> ClusterSpec:
    runs: list[tuple[int, DeviceSpec]] = []
    starts: list[int] = []
    rates: list[float] = []
    inner: list[LinkLevel] = []
    total = 0
    for entry in nodes:
        if not isinstance(entry, Mapping) or "device" not in entry:
            raise ClusterError("nodes: every entry needs `device:` (a preset such as h100, or its figures)")
        _known(entry, _NODE_KEYS | {"device"}, "nodes")
        device = device_from_dict(entry["device"])
        family = _link_family(device)
        count, per_node = int(entry.get("count", 1)), int(entry.get("devices_per_node", family["devices_per_node"]))
        if count < 1 or per_node < 1:
            raise ClusterError(f"nodes: count and devices_per_node must be at least 1, got {count} and {per_node}")
        if "tiers" in entry:
            usual = entry["tiers"] == "usual"
            device = replace(device, tiers=usual_tiers(device) if usual else tiers_from_dict(entry["tiers"], per_node))
        rate = _positive(entry, "bandwidth_GBps", family["intra_bandwidth_Bps"] / 1e9) * 1e9
        inner.append(_described_link(_usual_link(family, "node", per_node, rate), entry))
        runs.append((count * per_node, device))
        for _ in range(count):
            starts.append(total)
            rates.append(rate)
            total += per_node
    _known(network, _NETWORK_KEYS, "network")
    node = replace(
        inner[0],
        group_size=max(level.group_size for level in inner),
        bandwidth_Bps=min(rates),
        latency_s=max(level.latency_s for level in inner),
        base_s=max(level.base_s for level in inner),
        ramp_s=max(level.ramp_s for level in inner),
        efficiency=min(level.efficiency for level in inner),
        in_switch_efficiency=min(level.in_switch_efficiency for level in inner),
        in_switch=all(level.in_switch for level in inner),
    )
    if len({level.group_size for level in inner}) > 1:
        node = replace(node, starts=tuple(starts))
    if len(set(rates)) > 1:
        node = replace(node, group_bandwidths=tuple(rates))
    levels = [node]
    family = _link_family(runs[0][1])
    if rack:
        _known(rack, {"nodes", *_NETWORK_KEYS}, "rack")
        size = min(int(rack["nodes"]) * node.group_size, total)
        if size > node.group_size:
            rate = _positive(rack, "bandwidth_GBps", node.bandwidth_Bps / 1e9) * 1e9
            _add_rack(levels, _described_link(replace(node, name="rack", group_size=size, bandwidth_Bps=rate), rack))
    if total > levels[-1].group_size:
        rate = _positive(network, "bandwidth_GBps", family["inter_bandwidth_Bps"] / 1e9) * 1e9
        levels.append(_described_link(_usual_link(family, "cluster", total, rate), network))
    return ClusterSpec(name, tuple(runs), tuple(levels))


def scaled(cluster: ClusterSpec, times: int) -> ClusterSpec:
    """A cluster of so many times the nodes, linked as these are; several single nodes by their family's usual network."""
    size, outer = cluster.size, cluster.levels[-1]
    grown = tuple((count, device) for _ in range(times) for count, device in cluster.devices)
    if cluster.homogeneous_devices:
        grown = ((size * times, cluster.device(0)),)
    levels = tuple(
        replace(
            level,
            starts=tuple(start + k * size for k in range(times) for start in level.starts),
            group_bandwidths=level.group_bandwidths * times,
        )
        for level in cluster.levels
    )
    if len(levels) == 1 and cluster.device(0).kind != "cpu":
        levels += (_usual_link(_link_family(cluster.device(0)), "cluster", size * times),)
    else:
        levels = (*levels[:-1], replace(levels[-1], group_size=outer.group_size * times))
    return ClusterSpec(f"{cluster.name}-times-{times}", grown, levels)


def _link_family(device: DeviceSpec) -> dict[str, Any]:
    """Link figures usual for a device's family (data/machines.json)."""
    families: dict[str, dict[str, Any]] = load_data("machines.json")["families"]
    for key in sorted(families, key=len, reverse=True):
        if device.name.startswith(key):
            return families[key]
    return families["default"]


def _usual_link(family: Mapping[str, Any], level: str, size: int, bandwidth_Bps: float | None = None) -> LinkLevel:
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


def _add_rack(levels: list[LinkLevel], rack: LinkLevel) -> None:
    """A rack whose fabric is as fast as a node's (NVL72) is one level with it; a slower one goes above."""
    if rack.bandwidth_Bps >= levels[-1].bandwidth_Bps and rack.oversubscription == 1:
        levels.pop()
    levels.append(rack)


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


def _tiered(cluster: ClusterSpec, tiers: Any) -> ClusterSpec:
    """The cluster with what its file says about every node's tiers."""
    if tiers == "usual":
        return cluster.with_tiers()
    per_node = min(cluster.levels[0].group_size, cluster.size)
    if cluster.levels[0].name != "node":  # nodes of a rack that is one level (NVL72)
        per_node = int(_link_family(cluster.devices[0][1])["devices_per_node"])
    found = tiers_from_dict(tiers, per_node)
    return cluster.with_tiers(*found) if found else cluster


def _profiled_device(device: DeviceSpec, measured: Mapping[str, Any]) -> DeviceSpec:
    fields = {k: v for k, v in measured.items() if k in ("memory_bandwidth_Bps", "launch_overhead_s", "memory_bytes")}
    if "peak_flops" in measured:
        fields["peak_flops"] = {**device.peak_flops, **measured["peak_flops"]}
    if "curve" in measured:
        fields["curve"] = EfficiencyCurve(**{**device.curve.to_dict(), **measured["curve"]})
    return replace(device, **fields)


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
