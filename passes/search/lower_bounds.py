"""Lower bounds of every plan: the fewest bytes and seconds, if all ranks shared everything perfectly.

These are sums over the captured program, made before anything is planned: they rule out requests, microbatch counts and
pipelines that cannot fit or cannot win.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.resting import of_program
from autopar.passes.price.bills import is_kernel
from autopar.passes.price.pricer import Pricer
from autopar.passes.recompute.least_held import least_held_bytes
from autopar.passes.rules.hubs import phase_is_late
from autopar.passes.search.task import Task


def model_bytes(task: Task, away: Collection[str] = ()) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state, each once: what all ranks together must hold at least. away: movable
    state that is left out."""
    nbytes: dict[str, float] = {}
    for row in of_program(task.program, task.setting):
        if row.moves not in away:
            nbytes[row.kind] = nbytes.get(row.kind, 0.0) + row.nbytes
    return nbytes


def least_bytes(task: Task) -> tuple[float, float]:
    """(bytes of parameters, gradients and optimizer state, bytes that one microbatch holds for backward) of all ranks
    together, without what rests in memory tiers."""
    program = task.program
    resting = sum(model_bytes(task, task.setting.offload).values())
    if not program.training or "activations" in task.setting.offload:
        return resting, 0.0
    return resting, least_held_bytes(program, task.options.recompute)


def could_fit(
    task: Task, bytes_at_least: tuple[float, float], room: Sequence[float], in_flight: Sequence[float]
) -> bool:
    """Whether `least_bytes` keep to the limit of groups of ranks, wherever the stages are cut. room: bytes that every group has;
    in_flight: microbatches that it holds at least, before there are gradients.

    What is held takes least room where fewest microbatches are in flight, so what rests lies in the other groups.
    """
    resting, held = bytes_at_least
    if resting > sum(room):
        return False
    rests = resting - model_bytes(task, task.setting.offload).get("gradients", 0.0)
    most_held = 0.0
    for count, nbytes in sorted(zip(in_flight, room, strict=True), reverse=True):
        taken = min(rests, nbytes)
        rests -= taken
        most_held += (nbytes - taken) / count
    return held <= most_held


def template_work_s(task: Task, rank: int = 0) -> dict[str, float]:
    """Device-seconds that one call of every template takes at least, however it is sharded. rank: on whose kind of device."""
    pricer = task.pricers[Mesh((("dp", 1),), rank)]
    return {
        name: sum(pricer.work_s(call, task.rules.rule(call)) for call in template.op_calls.values())
        for name, template in task.program.templates.items()
    }


def least_busy_s(task: Task, mesh: Mesh) -> float:
    """Seconds that a rank is busy with one microbatch of the whole program on one mesh at least: with every call for as long as
    its products take, perfectly shared, or as the host needs to launch its kernels."""
    pricer = task.pricers[mesh]
    busy_s = 0.0
    for ops, times in _ops(task.program):
        products_s = sum(pricer.work_s(op, task.rules.rule(op)) for op in ops) / mesh.size
        busy_s += times * max(products_s, _launched_s(ops, pricer))
    return busy_s


def host_s(task: Task, mesh: Mesh) -> float:
    """Seconds that a host needs to launch the kernels of one microbatch of the whole program."""
    pricer = task.pricers[mesh]
    return sum(times * _launched_s(ops, pricer) for ops, times in _ops(task.program))


def _ops(program: Program) -> Iterator[tuple[list[OpCall], int]]:
    """The ops of every kind of call, and how many calls there are of it."""
    kinds = Counter((call.template, i in program.backward_calls) for i, call in enumerate(program.calls))
    for (name, has_backward), times in kinds.items():
        template = program.templates[name]
        yield [template.op_calls[n.name] for n in template.ops if has_backward or not phase_is_late(n)], times


def _launched_s(ops: list[OpCall], pricer: Pricer) -> float:
    return pricer.software.launch_host_s * sum(is_kernel(op.op) for op in ops)


def least_step_s(task: Task) -> float:
    """Seconds of a step if all products were perfectly shared, by the speeds of the devices: no plan is faster."""
    per_s, firsts = 0.0, task.cluster.kind_starts
    for first, end in pairwise([*firsts, task.cluster.size]):
        work_s = template_work_s(task, first)
        device_s = sum(times * work_s[name] for name, times in task.program.multiplicity.items())
        per_s += (end - first) / max(device_s, 1e-300)
    return task.setting.microbatches / per_s
