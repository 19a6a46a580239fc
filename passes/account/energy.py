"""The energy of a step: what its devices draw while they compute, and while they wait.

    joules = sum over devices of busy seconds × busy watts + (step − busy seconds) × idle watts

A device is busy for as long as the account says that its group computes (`Account.busy_s`); messages, memory tiers and the
bubble are waiting. Where no idle watts are known a device that waits is counted at its busy watts, the most that it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from autopar.cluster import ClusterSpec
from autopar.cluster.device import DeviceSpec
from autopar.ir.mesh import Mesh
from autopar.passes.account.program import Account
from autopar.plan import Plan


def step_energy_J(plan: Plan, counted: Account, cluster: ClusterSpec) -> float | None:
    """Joules of a step on all devices that the plan has ranks on; None where the watts of one of them are not known.

    cluster: in the order of the plan's ranks.
    """
    joules, step_s = 0.0, counted.step_time_s
    for group, computing_s in zip(counted.graph.groups, counted.busy_s, strict=True):
        busy_s = min(computing_s, step_s)
        for count, device in _devices(plan.stages[group[0]].mesh, cluster):
            if device.busy_watts is None:
                return None
            joules += count * (busy_s * device.busy_watts + (step_s - busy_s) * waiting_watts(device))
    return joules


def least_energy_J(plan: Plan, least_s: float, cluster: ClusterSpec) -> float | None:
    """Joules that a step of at least so many seconds takes at least: those of devices that wait throughout."""
    joules = 0.0
    for mesh in {(stage.mesh.offset, stage.mesh.size): stage.mesh for stage in plan.stages}.values():
        for count, device in _devices(mesh, cluster):
            if device.busy_watts is None:
                return None
            joules += count * least_s * min(waiting_watts(device), device.busy_watts)
    return joules


def waiting_watts(device: DeviceSpec) -> float:
    """Watts of a device that waits."""
    assert device.busy_watts is not None
    return device.busy_watts if device.idle_watts is None else device.idle_watts


def _devices(mesh: Mesh, cluster: ClusterSpec) -> Iterator[tuple[int, DeviceSpec]]:
    """The devices of a mesh's ranks by their runs in the cluster."""
    starts = accumulate((count for count, _ in cluster.devices), initial=0)
    for first, (count, device) in zip(starts, cluster.devices, strict=False):
        own = min(first + count, mesh.offset + mesh.size) - max(first, mesh.offset)
        if own > 0:
            yield own, device
