"""ClusterSpec: which devices there are, and which links join them.

Ranks are numbered so that neighbours are close: consecutive ranks share a node, consecutive nodes a rack.
`cluster.levels` lists the links innermost first; the last level joins all ranks. Cluster files are read by
`autopar.cluster.files`; what is usual for a kind of device stands in `data/`.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Annotated, Any

from autopar.cluster.checks import (
    RANKS,
    Oversubscription,
    Ranks,
    Rate,
    Seconds,
    Share,
    check_arguments,
    check_fields,
    checked,
)
from autopar.cluster.device import DeviceSpec, EfficiencyCurve, device_preset, read_device, usual_tiers
from autopar.cluster.family import add_rack, link_family, usual_link
from autopar.cluster.files import Description, described, read_cluster_file
from autopar.cluster.link import PROFILED, LinkLevel
from autopar.cluster.tiers import Tier
from autopar.errors import ClusterError
from autopar.ir.mesh import Mesh
from autopar.runtime.data.datafile import read_json
from autopar.runtime.data.fields import Form, given, to_data
from autopar.runtime.data.schema import anything, choice, number, record, shown, table, text


@dataclass(frozen=True)
class ClusterSpec(Description):
    """A description of a cluster whose parts go together."""

    def __post_init__(self) -> None:
        check_fields(self, "cluster")
        checked(RANKS, self.size, f"cluster {self.name}", "the number of devices")
        sizes = [level.group_size for level in self.levels]
        if sizes != sorted(sizes):
            raise ClusterError(f"cluster {self.name}: levels must go from the innermost outwards, got sizes {sizes}")
        if self.levels[-1].group_size < self.size:
            raise ClusterError(f"cluster {self.name}: the last level must join all {self.size} devices, got {sizes}")
        for level in self.levels:
            groups = len(level.starts) or -(-self.size // level.group_size)
            if len(level.group_bandwidths) not in (0, groups) or any(start >= self.size for start in level.starts):
                raise ClusterError(
                    f"cluster {self.name}: level {level.name} has starts {shown(level.starts)} and "
                    f"{len(level.group_bandwidths)} group_bandwidths; its {groups} groups need one each, or none at all"
                )

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
        """The device of a rank. Raises ClusterError where there is no such rank."""
        if not 0 <= rank < self.size:
            raise ClusterError(f"rank {rank} is outside the cluster of {self.size} devices")
        return self.devices[bisect_right(self._starts, rank) - 1][1]

    def pace(self, first: int, count: int) -> DeviceSpec:
        """The device that sets the pace of so many ranks from one on, which do the same: theirs, or where they are of several
        kinds `DeviceSpec.slowest_of` these."""
        own = self.device(first)
        if len(self.devices) == 1:
            return own
        spans = zip(self._starts, self.devices, strict=True)
        return DeviceSpec.slowest_of(
            {d for start, (n, d) in spans if start < first + count and first < start + n} | {own}
        )

    def paced(self, mesh: Mesh) -> DeviceSpec:
        """The device on which the longest blocks of a mesh take as long as the slowest rank takes for its own (`pace`, where all
        blocks are equal)."""
        if len(self.devices) == 1 or not mesh.uneven:
            return self.pace(mesh.offset, mesh.size)
        found = {
            (self.device(rank), mesh.share_of_longest(rank)) for rank in range(mesh.offset, mesh.offset + mesh.size)
        }
        return DeviceSpec.slowest_of(device.with_share(share) for device, share in found)

    @cached_property
    def kind_starts(self) -> list[int]:
        """The first rank of every run of equal devices."""
        before = (None, *(device for _, device in self.devices))
        return [start for start, was, (_, now) in zip(self._starts, before, self.devices, strict=False) if was != now]

    @property
    def homogeneous_devices(self) -> bool:
        """Whether all devices are alike."""
        return len({d for _, d in self.devices}) == 1

    @property
    def half_dtype(self) -> str:
        """The dtype of fewest bytes, of 16 and 32 bits, that every device computes in: bfloat16 before float16 before float32."""
        shared = self.pace(0, self.size).peak_flops
        return next((dtype for dtype in ("bfloat16", "float16") if dtype in shared), "float32")

    def fingerprint(self) -> str:
        """A short hash of everything a plan depends on; equal descriptions have equal fingerprints."""
        text = json.dumps(replace(self, reliability=None).to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        data: dict[str, Any] = to_data(self)
        return data

    def with_profile(self, profile: Mapping[str, Any]) -> ClusterSpec:
        """The same cluster with what `autopar-calibrate` measured in place of the presets' constants. Raises ClusterError."""
        measured = checked(_PROFILE, profile, "profile")
        devices = tuple((n, _profiled_device(d, measured.get("device", {}))) for n, d in self.devices)
        links = measured.get("links", {})
        levels = tuple(replace(level, **links.get(level.name, {})) for level in self.levels)
        return replace(self, devices=devices, levels=levels)

    def with_tiers(self, *tiers: Tier) -> ClusterSpec:
        """The same cluster with memory tiers on every rank: the given ones, else those usual for each device. Raises
        ClusterError."""
        devices = tuple((n, replace(d, tiers=tiers or usual_tiers(d))) for n, d in self.devices)
        return replace(self, devices=devices)

    def with_tf32(self) -> ClusterSpec:
        """The same cluster, where products of float32 run in TF32 on devices that have it."""

        def of(device: DeviceSpec) -> DeviceSpec:
            peaks = {**device.peak_flops}
            return replace(device, peak_flops=peaks | {"float32": peaks["tfloat32"]}) if "tfloat32" in peaks else device

        return replace(self, devices=tuple((n, of(device)) for n, device in self.devices))

    @staticmethod
    def local(n: Ranks = 1, *, memory_bytes: Rate | None = None) -> ClusterSpec:
        """n processes (or threads) of this machine's CPU: what tests and laptops use. Raises ClusterError."""
        check_arguments(ClusterSpec.local, locals(), "ClusterSpec.local")
        device = device_preset("cpu")
        if memory_bytes is not None:
            device = replace(device, memory_bytes=float(memory_bytes))
        link = LinkLevel("node", n, bandwidth_Bps=4e9, latency_s=30e-6)
        return ClusterSpec(f"local-{n}", ((n, device),), (link,))

    @staticmethod
    def preset(name: str, nodes: int = 1) -> ClusterSpec:
        """A known machine, such as `dgx-h100` or `gb200-nvl72` (`nodes` of them). Raises ClusterError."""
        return ClusterSpec.from_dict({"preset": name, "nodes": nodes})

    @staticmethod
    def homogeneous(
        *,
        devices: Ranks,
        device: Annotated[str | Mapping[str, Any] | DeviceSpec, Form(read_device)],
        devices_per_node: Ranks | None = None,
        intra_bandwidth_Bps: Rate | None = None,
        inter_bandwidth_Bps: Rate | None = None,
        intra_latency_s: Seconds | None = None,
        inter_latency_s: Seconds | None = None,
        intra_efficiency: Share | None = None,
        inter_efficiency: Share | None = None,
        nodes_per_rack: Ranks | None = None,
        rack_bandwidth_Bps: Rate | None = None,
        oversubscription: Oversubscription = 1.0,
        in_switch: bool | None = None,
        name: str | None = None,
    ) -> ClusterSpec:
        """`devices` alike devices in nodes of `devices_per_node`; what is left out comes from the device's family.

        With `nodes_per_rack`, nodes of one rack are joined by `rack_bandwidth_Bps` (NVL72: as fast as inside). A given
        latency replaces the family's fitted launch, hop and ramp times: the textbook formulas with that alpha. Raises
        ClusterError.
        """
        spec: DeviceSpec = check_arguments(ClusterSpec.homogeneous, locals(), "ClusterSpec.homogeneous")["device"]
        family = link_family(spec)
        per_node = min(devices_per_node or family["devices_per_node"], devices)
        if devices % per_node:
            raise ClusterError(
                f"{devices} devices do not fill nodes of {per_node}; use a multiple of {per_node}, "
                "or set devices_per_node"
            )
        node = usual_link(family, "node", per_node, intra_bandwidth_Bps)
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
            add_rack(levels, replace(node, name="rack", group_size=min(rack, devices), bandwidth_Bps=rack_rate))
        if devices > levels[-1].group_size:
            outer = usual_link(family, "cluster", devices, inter_bandwidth_Bps)
            if inter_latency_s is not None:
                outer = replace(outer, latency_s=inter_latency_s, base_s=0.0, ramp_s=0.0)
            if inter_efficiency:
                outer = replace(outer, efficiency=inter_efficiency)
            levels.append(replace(outer, oversubscription=oversubscription))
        return ClusterSpec(name or f"{spec.name}-x{devices}", ((devices, spec),), tuple(levels))

    @staticmethod
    def from_file(path: str | Path) -> ClusterSpec:
        """Reads a YAML or JSON cluster file. Raises ClusterError, naming the file, for anything wrong in it."""
        if not isinstance(path, str | Path):
            raise ClusterError(f"ClusterSpec.from_file takes the path of a file, not {type(path).__name__}")
        path = Path(path)
        data = read_cluster_file(path)
        try:
            return _from_mapping(data, path.parent)
        except ClusterError as err:
            raise ClusterError(f"{path}: {err}") from err

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ClusterSpec:
        """Reads `to_dict`'s form, `{preset, nodes}`, or `{nodes: [...], network: {...}}`; the file of its `profile` is looked for
        from the working directory. Raises ClusterError."""
        return _from_mapping(data, Path())


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
        levels += (usual_link(link_family(cluster.device(0)), "cluster", size * times),)
    else:
        levels = (*levels[:-1], replace(levels[-1], group_size=outer.group_size * times))
    return ClusterSpec(f"{cluster.name}-times-{times}", grown, levels, cluster.reliability)


def resized(cluster: ClusterSpec, ranks: int) -> ClusterSpec:
    """The first devices of a cluster, or of so many times its nodes that there are enough, linked as these are. Raises
    ClusterError."""
    checked(RANKS, ranks, f"cluster {cluster.name}", "the number of devices")
    grown = cluster if ranks <= cluster.size else scaled(cluster, -(-ranks // cluster.size))
    ends = list(accumulate(count for count, _ in grown.devices))
    kept = tuple((min(n, ranks - end + n), device) for end, (n, device) in zip(ends, grown.devices, strict=True))
    joining = next(i for i, one in enumerate(grown.levels) if one.group_size >= ranks and one.group_of(ranks - 1) == 0)
    levels = []
    for level in grown.levels[: joining + 1]:
        size, starts = min(level.group_size, ranks), tuple(start for start in level.starts if start < ranks)
        rates = level.group_bandwidths[: len(starts) or -(-ranks // size)]
        levels.append(replace(level, group_size=size, starts=starts, group_bandwidths=rates))
    name = f"{cluster.name}-of-{ranks}"
    return ClusterSpec(name, tuple(run for run in kept if run[0] > 0), tuple(levels), cluster.reliability)


def with_slower(cluster: ClusterSpec, ranks: Collection[int], factor: float) -> ClusterSpec:
    """The same cluster where these ranks take so many times as long for whatever they compute."""
    devices = [cluster.device(rank) for rank in range(cluster.size)]
    slower = [device.slower(factor) if rank in ranks else device for rank, device in enumerate(devices)]
    runs = tuple((len(list(run)), device) for device, run in groupby(slower))
    return replace(cluster, name=f"{cluster.name}-slower", devices=runs)


def with_memory(cluster: ClusterSpec, memory_bytes: float) -> ClusterSpec:
    """The same cluster with devices that have so much memory."""
    devices = tuple((count, replace(device, memory_bytes=float(memory_bytes))) for count, device in cluster.devices)
    return replace(cluster, name=f"{cluster.name}-of-{memory_bytes / 1e9:g}GB", devices=devices)


_PROFILE = record(
    {},
    {
        "device": partial(
            given,
            DeviceSpec,
            only=("memory_bandwidth_Bps", "launch_overhead_s", "memory_bytes", "peak_flops", "kernels"),
            also={"curve": table(choice(tuple(to_data(EfficiencyCurve()))), number())},
        ),
        "links": table(text(), partial(given, LinkLevel, only=PROFILED)),
        **dict.fromkeys(("base", "residuals", "samples"), anything),
    },
)


def _from_mapping(data: Mapping[str, Any], folder: Path) -> ClusterSpec:
    """The cluster of a description. folder: where its profile is looked for. Raises ClusterError."""
    cluster = ClusterSpec(**vars(described(data)))
    return cluster.with_profile(_read_profile(folder / data["profile"])) if "profile" in data else cluster


def _read_profile(path: Path) -> Mapping[str, Any]:
    """The profile that `autopar-calibrate` wrote. Raises ClusterError."""
    try:
        return checked(_PROFILE, read_json(path), "")
    except OSError as error:
        raise ClusterError(
            f"profile {path}: cannot read it ({error.strerror}); write it with autopar-calibrate"
        ) from error
    except (ValueError, ClusterError) as error:
        raise ClusterError(f"profile {path}: {error}; measure again with autopar-calibrate") from error


def _profiled_device(device: DeviceSpec, measured: Mapping[str, Any]) -> DeviceSpec:
    flops = {**device.peak_flops, **measured.get("peak_flops", {})}
    curve = replace(device.curve, **measured.get("curve", {}))
    return replace(device, **{**measured, "peak_flops": flops, "curve": curve})
