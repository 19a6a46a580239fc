"""The manifest's facts about the machines that a program is for (`autopar.runtime.program.machines`)."""

from __future__ import annotations

from collections import Counter

from autopar.cluster.device import DeviceSpec, device_preset
from autopar.compiled import Compiled
from autopar.ir.mesh import Mesh
from autopar.ops.registry import find
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.hubs import phase_is_late
from autopar.report.long_run import state_bytes
from autopar.runtime.program.machines import LinkRate, Machines


def machine_facts(program: Compiled) -> Machines:
    """The facts of the machines as the manifest has them."""
    cluster = program.cluster
    slowest = cluster.pace(0, cluster.size)
    step_flops, device_s = step_work(program)
    known = all(has_known_peak(device) for _, device in cluster.devices)
    links = tuple(LinkRate(level.name, level.group_size, level.rate_Bps(), level.latency_s) for level in cluster.levels)
    return Machines(
        min(cluster.levels[0].group_size, cluster.size),
        slowest.name,
        slowest.kind == "gpu",
        links,
        step_flops,
        device_s / program.plan.ranks if known else None,
        state_bytes(program),
    )


def has_known_peak(device: DeviceSpec) -> bool:
    """Whether its peak was published or measured. That of the preset CPU is an order of magnitude."""
    return device.kind != "cpu" or dict(device.peak_flops) != dict(device_preset("cpu").peak_flops)


def step_work(program: Compiled) -> tuple[float, float]:
    """FLOPs of the products of a step on one device, each op counted once, and the seconds that they take at its peak."""
    ir, pricer = program.ir, Pricers(program.cluster)[Mesh.of(dp=1)]
    kinds = Counter((call.template, i in ir.backward_calls) for i, call in enumerate(ir.calls))
    flops = seconds = 0.0
    for (name, has_backward), times in kinds.items():
        template = ir.templates[name]
        for op in (template.op_calls[n.name] for n in template.ops if has_backward or not phase_is_late(n)):
            definition, rule = find(op.op), program.rules.rule(op)
            if definition is not None and definition.work is not None and not definition.free:
                flops += times * definition.work(op, rule)[0]
                seconds += times * pricer.work_s(op, rule)
    return program.plan.microbatches * flops, program.plan.microbatches * seconds  # the program is of one of them
