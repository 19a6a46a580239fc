"""Bytes alive in a lowered program at every point of its schedule.

The emitted program is played over sizes: one microbatch's actions (walk.py), in which every line makes and needs what
its implementation does (probe.py), and the gradient store over the microbatches of a step (gradients.py). Parameters,
optimizer state, buffers and the store's pooled buckets rest all the time. Between its actions a stage holds what its
microbatches in flight keep, so the peak of a group of ranks is the largest, over its row of the action table, of what
is held then and what the action needs beside it; or what the optimizer needs when all is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.ir.lowered import LoweredProgram, LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.passes.gradients import StoreBytes
from autopar.passes.probe import local, regather_peak
from autopar.passes.shard.problem import Setting
from autopar.passes.walk import Course, courses


@dataclass(frozen=True)
class Moment:
    """What an action does to a stage's bytes: the most it needs while it runs, and what it leaves behind.

    `peak` counts what the same microbatch held before; `after` is what that microbatch holds afterwards; `sums` what the
    gradient store holds more then. received: bytes that must be there before; sent: on their way after.
    """

    peak: float
    after: float
    sums: float = 0.0
    received: float = 0.0
    sent: float = 0.0


@dataclass(frozen=True)
class StageMemory:
    """resting: bytes by kind that are always there. actions: per kind of action, of a microbatch among others; first and
    last: of a stage's first and last action of a kind, where gradients begin or end. step: the most beside what rests
    when gradients are finished, parameters updated and gathered."""

    resting: dict[str, float]
    actions: dict[str, Moment]
    first: dict[str, Moment] = field(default_factory=dict)
    last: dict[str, Moment] = field(default_factory=dict)
    step: float = 0.0

    @property
    def resting_bytes(self) -> float:
        return sum(self.resting.values())


def stage_memory(stage: LoweredStage, setting: Setting) -> StageMemory:
    """Bytes of a stage on one of its ranks."""
    resting = _resting(stage, setting)
    found = courses(stage)
    if not stage.training:
        return StageMemory(resting, {k: Moment(c.peak, c.end, 0.0, c.received, c.sent) for k, c in found.items()})
    store = StoreBytes(stage.parameters, stage.mesh.sizes, stage.microbatches, stage.microbatches > 1)
    rest = ended = 0
    order: list[dict[str, Moment]] = []
    for _ in range(2):  # the second step finds the first one's buckets
        store.forget()
        rest, order = store.hold, []
        for microbatch in range(stage.microbatches):
            last = microbatch == stage.microbatches - 1
            order.append({k: _moment(c, store, last and k == list(found)[-1]) for k, c in found.items()})
        store.top = store.hold
        store.finish()
        ended = store.top - rest
    step = max(ended, store.hold - rest + _update_peak(stage, setting))
    middle = order[1] if len(order) > 2 else order[0]
    return StageMemory(resting | {"gradients": float(rest)}, middle, order[0], order[-1], float(step))


def _moment(course: Course, store: StoreBytes, flush: bool = False) -> Moment:
    """An action of a microbatch, its gradients going to the store; beside what the store holds before."""
    before, peak = store.hold, 0
    for given in course.given:
        peak = max(peak, given.before + store.hold - before)
        store.top = 0
        store.add(given.name, given.nbytes, given.owned)
        peak = max(peak, given.alive + store.top - before)
    peak = max(peak, course.after + store.hold - before)
    if flush:
        store.top = 0
        store.flush()
        peak = max(peak, course.end + store.top - before)
    return Moment(peak, course.end, store.hold - before, course.received, course.sent)


def group_peaks(lowered: LoweredProgram, stages: list[StageMemory]) -> tuple[float, ...]:
    """Largest bytes on a rank of every group over a step."""
    peaks = []
    for group, row in zip(lowered.graph.groups, lowered.table, strict=True):
        resting = sum(stages[s].resting_bytes for s in group)
        held: dict[tuple[int, int], float] = {}
        sums = dict.fromkeys(group, 0.0)
        left: dict[tuple[int, str], int] = {}
        for action in row:
            left[action.stage, action.kind] = left.get((action.stage, action.kind), 0) + 1
        begun: set[tuple[int, str]] = set()
        moments = []
        for action in row:
            kind, memory = (action.stage, action.kind), stages[action.stage]
            left[kind] -= 1
            rows = memory.last if left[kind] == 0 else memory.actions if kind in begun else memory.first
            begun.add(kind)
            moments.append(rows.get(action.kind, memory.actions[action.kind]))
        worst = 0.0
        for i, (action, moment) in enumerate(zip(row, moments, strict=True)):
            key = (action.stage, action.microbatch)
            beside = sum(held.values()) - held.get(key, 0.0) + sum(sums.values())
            coming = moments[i + 1].received if i + 1 < len(moments) else 0.0  # posted an action ahead
            worst = max(worst, beside + moment.peak + coming)
            held[key] = moment.after
            sums[action.stage] += moment.sums
        worst = max(worst, max((stages[s].step + sum(v for t, v in sums.items() if t != s) for s in group), default=0.0))
        peaks.append(resting + worst)
    return tuple(peaks)


def _resting(stage: LoweredStage, setting: Setting) -> dict[str, float]:
    mesh = stage.mesh
    parameters = gradients = optimizer = 0.0
    for p in stage.parameters.values():
        parameters += p.storage.local_bytes(p.type, mesh)
        if p.contributions and stage.training:
            shard = p.optimizer.local_bytes(p.type, mesh)
            if p.owned:
                each = max(setting.state_bytes, p.type.dtype.itemsize)
                optimizer += shard / p.type.dtype.itemsize * setting.state_ratio * each
                optimizer += shard if _apart(p, mesh) else 0.0
    buffers = float(sum(t.nbytes for t in stage.buffers.values()))
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "buffers": buffers}


def _apart(p: StoredParameter, mesh: Mesh) -> bool:
    """Whether the optimizer's shard is a copy: it is no contiguous part of what is stored."""
    stored, shard = p.storage.local_shape(p.type.shape, mesh), p.optimizer.local_shape(p.type.shape, mesh)
    cut = [dim for dim, (a, b) in enumerate(zip(stored, shard, strict=True)) if a != b]
    return bool(cut) and any(math.prod(shard[:dim]) != 1 for dim in cut)


def _update_peak(stage: LoweredStage, setting: Setting) -> float:
    """The most that the optimizer's step, or the gather after it, needs for a moment."""
    mesh = stage.mesh
    owned = [p for p in stage.parameters.values() if p.contributions and p.owned]
    sizes = [p.optimizer.local_bytes(p.type, mesh) for p in owned]
    own, before = setting.scratch
    scratch = max((own * a + before * b for a, b in zip(sizes, [0, *sizes], strict=False)), default=0.0)
    rows = tuple(
        (local(p.type, p.optimizer, mesh), p.regather, local(p.type, p.storage, mesh)) for p in owned if p.regather
    )
    return max(scratch, float(regather_peak(rows, mesh.axes)) if rows else 0.0)
