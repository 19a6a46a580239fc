"""Lower bounds of every plan: the fewest bytes and seconds, if all ranks shared everything perfectly.

These are sums over the captured program, made before anything is planned: they rule out requests, microbatch counts and
pipelines that cannot fit or cannot win.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.ir.mesh import Mesh
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


@dataclass(frozen=True, eq=False)
class LeastWork:
    """The least that the calls of one microbatch take on devices of a kind, (calls,) arrays.

    products_s: device-seconds of their products, however these are sharded. passed_s: those of them that the next call waits
    for, or the one before it in backward. launched_s: seconds that a host needs to launch their kernels.
    """

    products_s: np.ndarray
    passed_s: np.ndarray
    launched_s: np.ndarray

    @classmethod
    def of(cls, task: Task, rank: int = 0) -> LeastWork:
        """The work of a task's calls. rank: on whose kind of device."""
        pricer, program = task.pricers[Mesh((("dp", 1),), rank)], task.program
        kinds = [(call.template, i in program.backward_calls) for i, call in enumerate(program.calls)]
        of_kind = {kind: _least_work(task, pricer, *kind) for kind in dict.fromkeys(kinds)}
        return cls(*np.array([of_kind[kind] for kind in kinds]).T)

    def busy_s(self, ranks: int) -> np.ndarray:
        """(calls,) seconds that every one of so many ranks is busy with a call at least: as long as its products take, perfectly
        shared, or as the host needs to launch its kernels."""
        return np.asarray(np.maximum(self.products_s / ranks, self.launched_s))

    def launches_s(self, microbatches: int, ranks: int, least: int) -> float:
        """Seconds of a step of stages on submeshes of so many ranks or more at least, for what their hosts launch alone. It holds
        for the program of fewer microbatches too, of which each has as many kernels."""
        return float(microbatches * max(least * self.launched_s.sum() / ranks, self.launched_s.max()))

    def pipeline_s(self, microbatches: int, ranks: int, size: int, sizes: Collection[int]) -> float:
        """Seconds of a step of stages on submeshes of these sizes at least, one of them on `size` ranks, under any schedule.

        All groups together have so many ranks. Some group computes the longest call for every microbatch, and a microbatch passes
        all calls, one after another, forth and back.
        """
        least, most = min(sizes), max(sizes)
        least_ranks_s = least * self.busy_s(least)
        more_on_size_s = size * self.busy_s(size) - least_ranks_s
        shared_s = (least_ranks_s.sum() + more_on_size_s.min()) / ranks
        longest_s = self.busy_s(most).max()
        return float(max(microbatches * max(shared_s, longest_s), self.passed_s.sum() / most))


def _least_work(task: Task, pricer: Pricer, template: str, has_backward: bool) -> tuple[float, float, float]:
    """products_s, passed_s and launched_s of one call."""
    of = task.program.templates[template]
    ops = [(n.meta["phase"], of.op_calls[n.name]) for n in of.ops if has_backward or not phase_is_late(n)]
    by_phase: dict[str, float] = {}
    for phase, op in ops:
        by_phase[phase] = by_phase.get(phase, 0.0) + pricer.work_s(op, task.rules.rule(op))
    launched_s = pricer.software.launch_host_s * sum(is_kernel(op.op) for _, op in ops)
    return sum(by_phase.values()), by_phase.get("F", 0.0) + by_phase.get("B", 0.0), launched_s


def least_step_s(task: Task) -> float:
    """Seconds of a step if all products were perfectly shared, by the speeds of the devices: no plan is faster."""
    per_s, firsts = 0.0, task.cluster.kind_starts
    for first, end in pairwise([*firsts, task.cluster.size]):
        work_s = template_work_s(task, first)
        device_s = sum(times * work_s[name] for name, times in task.program.multiplicity.items())
        per_s += (end - first) / max(device_s, 1e-300)
    return task.setting.microbatches / per_s
