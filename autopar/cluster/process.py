"""Bytes that a process takes of its GPU beside the tensors of a program, by cause, and what they leave for tensors.

    room for tensors = (memory of the device - context - workspace - communicators - peers) / (1 + fragmentation)

A rank has a communicator for every axis of its stage's mesh, one for all of them and one for all ranks; each has channels, and a
channel a ring's and a tree's connection. Stages that neighbour it and experts on other ranks are peers, with connections of their
own. Figures and sources are in data/process.json. A CPU's process takes nothing of this kind; a tenth of its memory is left to
Python, libraries and what the heap keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autopar.cluster.device import DeviceSpec, load_data
from autopar.cluster.spec import ClusterSpec

EXPERT_AXIS = "ep"
"""The axis along which every rank sends rows to every other one."""
NEIGHBOURS = 2
"""Stages that a stage receives from or sends to."""


def process_bytes(
    cluster: ClusterSpec, axes: Mapping[str, int] | None, device: DeviceSpec, experts: int = 1
) -> dict[str, float]:
    """Bytes by cause on a rank of a stage. axes: of the stage's mesh, major first; where they have fewer ranks than the cluster,
    there are other stages. None: what every plan takes. experts: ranks side by side that share the experts, where no axis says
    so."""
    if device.kind != "gpu":
        return {}
    figures = load_data("process.json")
    node = cluster.levels[0].group_size
    fast = cluster.levels[0].bandwidth_Bps >= figures["fast_Bps"]
    channels = figures["channels"]

    def communicator(span: int) -> float:
        many = channels["slow"] if not fast else channels["fast"] if span <= node else channels["outside"]
        return float(many * figures["connections"] * figures["connection_bytes"])

    axes, ranks = axes or {}, cluster.size if axes is None else math.prod(axes.values())
    spans = {name: math.prod(list(axes.values())[i:]) for i, name in enumerate(axes) if axes[name] > 1}
    groups = list(spans.values()) + [ranks] * (len(spans) > 1) + [cluster.size] * (cluster.size > 1)
    near, far = 0, False
    if ranks < cluster.size:
        stages_near = min(NEIGHBOURS, max(node // ranks - 1, 0))
        near, far = stages_near, stages_near < min(NEIGHBOURS, cluster.size // ranks - 1)
    experts = axes[EXPERT_AXIS] if EXPERT_AXIS in spans else experts
    if experts > 1:
        here = min(experts, max(node * experts // spans.get(EXPERT_AXIS, experts), 1))
        near, far = near + here - 1, far or here < experts
    peer = figures["peer_channels"]["fast" if fast else "slow"] * figures["connection_bytes"]
    return {
        "CUDA context": float(figures["context_bytes"]),
        "cuBLAS workspace": float(_workspace(device, figures)),
        "communicators": sum(map(communicator, groups)),
        "peers": float(near * peer + far * figures["network_pool_bytes"]),
    }


def tensor_room(cluster: ClusterSpec, axes: Mapping[str, int] | None, device: DeviceSpec, memory_bytes: float) -> float:
    """The bytes that tensors of a stage may take of so much memory of a device. axes: as of `process_bytes`."""
    rows = taken_bytes(cluster, axes, device, memory_bytes)
    return (memory_bytes - sum(rows.values())) / (1 + fragmentation(device))


def taken_bytes(
    cluster: ClusterSpec, axes: Mapping[str, int] | None, device: DeviceSpec, memory_bytes: float
) -> dict[str, float]:
    """Bytes by cause that tensors of a stage cannot take of so much memory of a device, gaps of the allocator aside. axes: as of
    `process_bytes`."""
    if device.kind == "gpu":
        return process_bytes(cluster, axes, device)
    return {"Python, libraries and the heap": (1 - float(load_data("process.json")["host_share"])) * memory_bytes}


def fragmentation(device: DeviceSpec) -> float:
    """Share of tensors' bytes that the allocator loses to gaps and to rounding."""
    return float(load_data("process.json")["fragmentation"]) if device.kind == "gpu" else 0.0


def _workspace(device: DeviceSpec, figures: Mapping[str, Any]) -> int:
    sizes: dict[str, int] = figures["workspace_bytes"]
    architecture = device.architecture.removeprefix("sm")
    return sizes["sm90"] if architecture.isdigit() and int(architecture) >= 90 else sizes["before"]
