"""The cluster that a process finds itself in, which users name "here".

Under torchrun it is the ranks that were started, on machines of as many ranks each; outside of it this machine alone: a rank for
each of its GPUs, or one on its processors. Devices are known by their names (data/devices.json), one without a row has the
figures of its kind; how much memory there is the device says itself, or the machine, of which every rank has a part. Links are
those usual for the devices' family: measure them (`autopar-calibrate`) where a plan hangs on them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

import torch

from autopar.cluster.device import DeviceSpec, device_preset, preset_key
from autopar.cluster.spec import ClusterSpec
from autopar.runtime.comm.backends import backend_named, backend_of, present_backend, usual_backend
from autopar.runtime.comm.environment import machine_name, started
from autopar.runtime.data.fields import Bytes
from autopar.runtime.data.schema import text

HERE = "here"
_GIB = 1 << 30


@dataclass(frozen=True)
class Place:
    """The device of one rank. device: a name that `device_preset` knows."""

    machine: Annotated[str, text()]
    device: Annotated[str, text()]
    memory_bytes: Bytes


def base_device(device: torch.device) -> DeviceSpec:
    """The preset nearest to what is here."""
    backend = backend_of(device)
    name = "" if backend.is_host else backend.module.get_device_name(device)
    return device_preset(preset_key(name.replace(" ", "-")) or backend.preset)


def place_here(backend: str | None = None) -> Place:
    """The place of this process. backend: what it is to compute with ("gloo": processors), where that is not the usual one.
    Raises LaunchError, RuntimeProgramError."""
    own = started()
    row = usual_backend(own.local_ranks) if backend is None else backend_named(backend)
    if row.is_host:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / own.local_ranks
        return Place(machine_name(), row.preset, memory_bytes // _GIB * _GIB or memory_bytes)
    device = row.device(own.local_rank)
    memory_bytes = float(row.module.get_device_properties(device).total_memory)
    return Place(machine_name(), base_device(device).name, memory_bytes)


def cluster_of(places: Sequence[Place]) -> ClusterSpec:
    """The cluster of ranks at these places. Devices of one name are taken to have the memory of the one that has least, so that
    machines alike are alike. Raises ClusterError."""
    least = {one.device: min(p.memory_bytes for p in places if p.device == one.device) for one in places}
    machines = []
    for (_, name), ranks in groupby(places, key=lambda one: (one.machine, one.device)):
        machines.append((replace(device_preset(name), memory_bytes=least[name]), len(list(ranks))))
    nodes = [
        {"count": len(list(alike)), "device": device, "devices_per_node": per_node}
        for (device, per_node), alike in groupby(machines)
    ]
    return ClusterSpec.from_dict({"name": HERE, "nodes": nodes})


def cluster_here() -> ClusterSpec:
    """The cluster of this process, whose machines are taken to be as this one is. Raises LaunchError, ClusterError."""
    own, place = started(), place_here()
    if "WORLD_SIZE" in os.environ:
        machines = [rank // own.local_ranks for rank in range(own.ranks)]
    else:
        machines = [0] * max(1, 0 if present_backend().is_host else present_backend().count())
    return cluster_of([replace(place, machine=str(machine)) for machine in machines])
