"""What a lowered program costs: seconds of every action, the collectives with their bytes, peak bytes of every group.

Seconds of an action are those of its ops on their blocks and of its conversions, line by line; a stage's step adds the
gradient reductions, the optimizer and the gathers of updated parameters once. The schedule turns them into a step time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autopar.costmodel.simulate import Timeline, makespan_s, simulate
from autopar.ir.actions import StageGraph, Table
from autopar.ir.lowered import Function, Line, LoweredProgram, LoweredStage, LoweredTemplate, Ref, StoredParameter
from autopar.ir.program import Template
from autopar.ir.setting import Setting
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.account.tiers import TierMove, gather_moves, gradient_moves, optimizer_moves, saved_moves
from autopar.passes.memory.peak import StageMemory, group_peaks, stage_memory, tier_peaks
from autopar.passes.memory.sizes import value_bytes
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.rules.book import RuleBook
from autopar.plan import StagePlan, TemplatePlan

Add = Callable[[str, str, str, float, int], None]


@dataclass(frozen=True)
class Collective:
    """One kind of communication in the program: nbytes of one (full array), times per step, seconds in all."""

    kind: str
    axis: str
    what: str
    nbytes: float
    times: int
    time_s: float
    stage: int = 0


@dataclass(frozen=True)
class StageAccount:
    """One stage on one of its ranks. seconds: of one action by kind, communication and exposed transfers to memory tiers
    included; step_s: once per step; moves: what goes to memory tiers and back per step."""

    memory: StageMemory
    seconds: dict[str, float]
    step_s: float
    collectives: tuple[Collective, ...]
    moves: tuple[TierMove, ...] = ()

    @property
    def comm_time_s(self) -> float:
        return sum(c.time_s for c in self.collectives)

    @property
    def exposed_s(self) -> float:
        """Seconds that memory tiers add to a step."""
        return sum(move.exposed_s for move in self.moves)


@dataclass(frozen=True)
class Account:
    """A whole program per step. peaks: bytes of a rank of every group. hand_over: seconds from stage to stage.
    tier_peaks: bytes in memory tiers of a rank of every group, by tier."""

    stages: tuple[StageAccount, ...]
    peaks: tuple[float, ...]
    step_time_s: float
    comm_time_s: float
    table: Table
    graph: StageGraph
    hand_over: dict[tuple[int, int], float]
    tier_peaks: tuple[dict[str, float], ...] = ()

    @property
    def moves(self) -> tuple[TierMove, ...]:
        """What goes to memory tiers and back, of all stages."""
        return tuple(move for s in self.stages for move in s.moves)

    @property
    def seconds(self) -> dict[tuple[int, str], float]:
        """Of one action, by (stage, kind)."""
        return {(i, kind): s for i, stage in enumerate(self.stages) for kind, s in stage.seconds.items()}

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, without what comes once at its end."""
        return simulate(self.table, self.graph, self.seconds, self.hand_over)

    @property
    def peak_bytes(self) -> float:
        return max(self.peaks)

    @property
    def resting_bytes(self) -> dict[str, float]:
        """Of the stage that rests most."""
        return max((s.memory for s in self.stages), key=lambda m: m.resting_bytes).resting

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(c for s in self.stages for c in s.collectives)


def account(
    lowered: LoweredProgram,
    plans: tuple[StagePlan, ...],
    templates: dict[str, Template],
    pricers: Pricers,
    setting: Setting,
    rules: RuleBook,
) -> Account:
    """Bytes, communication and time of a lowered program."""
    stages = tuple(
        account_stage(stage, plan, templates, pricers[stage.mesh], setting, rules)
        for stage, plan in zip(lowered.stages, plans, strict=True)
    )
    peaks = group_peaks(lowered, [s.memory for s in stages])
    between = hand_over(lowered, pricers)
    found = Account(
        stages,
        peaks,
        0.0,
        max(s.comm_time_s for s in stages),
        lowered.table,
        lowered.graph,
        between,
        tier_peaks(lowered, [s.memory for s in stages]),
    )
    return replace(found, step_time_s=step_seconds(found, lowered.table))


def step_seconds(counted: Account, table: Table) -> float:
    """Simulated seconds of a step under a table: its actions, then what comes once."""
    span = makespan_s(table, counted.graph, counted.seconds, counted.hand_over)
    return float(span + max(sum(counted.stages[s].step_s for s in group) for group in counted.graph.groups))


def hand_over(lowered: LoweredProgram, pricers: Pricers) -> dict[tuple[int, int], float]:
    """Seconds that what crosses from stage to stage takes for one microbatch."""
    found: dict[tuple[int, int], float] = {}
    for t in lowered.transfers:
        if lowered.graph.group_of[t.source] != lowered.graph.group_of[t.target]:
            mesh = lowered.stages[t.target].mesh
            seconds = pricers[mesh].hand_over_s(t.target_spec.local_bytes(t.type, mesh))
            found[t.source, t.target] = found.get((t.source, t.target), 0.0) + seconds
    return found


def account_stage(
    stage: LoweredStage,
    plan: StagePlan,
    templates: dict[str, Template],
    pricer: Pricer,
    setting: Setting,
    rules: RuleBook,
) -> StageAccount:
    """Bytes, communication and seconds of one stage."""
    found = tuple(_collectives(stage, pricer))
    inside = {
        name: template_seconds(t, plan.templates[name], templates[name], pricer, rules)
        for name, t in stage.templates.items()
    }
    functions = zip("FBW", (stage.forward, stage.backward, stage.weights), strict=True)
    seconds = {kind: _action_seconds(function, inside, stage, pricer) for kind, function in functions}
    once = sum(gradient_work(stage, pricer, setting).values())
    added, moves = saved_moves(stage, inside, pricer)
    more, gathers = gather_moves(stage, inside, pricer)
    computed = stage.microbatches * (seconds["B"] + seconds["W"])
    seconds = {kind: value + added.get(kind, 0.0) + more.get(kind, 0.0) for kind, value in seconds.items()}
    away = [p for p in stage.parameters.values() if p.optimizer_tier or p.tier]
    last = gradient_moves(stage, pricer, computed)
    last += optimizer_moves(stage, setting, pricer, sum(optimizer_s(p, stage, pricer, setting) for p in away))
    moves += [*gathers, *last]
    once += sum(move.exposed_s for move in last)
    once += stage.microbatches * _action_seconds(stage.prepare, inside, stage, pricer)
    return StageAccount(stage_memory(stage, setting), seconds, once, found, tuple(moves))


def _action_seconds(
    function: Function | None, inside: dict[str, tuple[float, float, float]], stage: LoweredStage, pricer: Pricer
) -> float:
    """Seconds of one of a stage's functions; inside: of its templates' forward, backward and weights."""
    if function is None:
        return 0.0
    total = 0.0
    known = {n: value_bytes(*ts, stage.mesh) for n, ts in function.arg_types.items()}
    for line in function.lines:
        if line.op.startswith("call."):
            total += inside[line.args[0]][{"call.forward": 0, "call.backward": 1}.get(line.op, 2)]
        else:
            total += line_seconds(line, known, stage, pricer)
        for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
            known[name] = value_bytes(type_, spec, stage.mesh)
    return total


def line_seconds(line: Line, known: dict[str, float], stage: LoweredStage, pricer: Pricer) -> float:
    """Seconds of what happens between calls: conversions, gathers, the loss's sum. known: bytes of the values so far."""
    if line.op == "params.prefetch":
        rows = ((stage.parameters[name], steps, dtype) for name, steps, dtype in line.args[1])
        return sum(_gather_s(pricer, p, steps, dtype) for p, steps, dtype in rows)
    if line.op == "grads.sum":
        nbytes = float(line.types[0].nbytes) if line.types[0] else 0.0
        return sum(pricer.bucketed_s("all_reduce", nbytes, axis) for axis in line.args[1])
    return _line_s(line, known, pricer) if line.op.startswith("comm.") else 0.0


def gradient_work(stage: LoweredStage, pricer: Pricer, setting: Setting) -> dict[str, float]:
    """Per trained parameter the seconds once per step: gradient reduction, optimizer, gather of the updated value."""
    found = {}
    for p in stage.parameters.values():
        if p.contributions:
            total: list[float] = []

            def add(kind: str, axis: str, what: str, nbytes: float, times: int, total: list[float] = total) -> None:
                if pricer.mesh.sizes[axis] > 1 and kind not in ("slice", "to_partial", "shard"):
                    total.append(times * pricer.bucketed_s(kind, nbytes, axis))

            _reductions(add, p, pricer)
            _steps(add, "", p.type, p.optimizer, p.regather, pricer, 1)
            found[p.name] = sum(total) + optimizer_s(p, stage, pricer, setting)
    return found


def optimizer_s(p: StoredParameter, stage: LoweredStage, pricer: Pricer, setting: Setting) -> float:
    """Seconds of the optimizer's update of one parameter's shard."""
    if not (p.owned and p.contributions):
        return 0.0
    return setting.optimizer.update_s(p.optimizer.local_bytes(p.type, stage.mesh), pricer.copy_s, p.name)


def template_seconds(
    lowered: LoweredTemplate, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> tuple[float, float, float]:
    """Seconds of one call's forward, backward and weights on a block."""
    return (
        _function_s(lowered.forward, plan, template, pricer, rules),
        _function_s(lowered.backward, plan, template, pricer, rules),
        _function_s(lowered.weights, plan, template, pricer, rules),
    )


def _function_s(
    function: Function | None, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> float:
    if function is None:
        return 0.0
    known = {n: value_bytes(*ts, pricer.mesh) for n, ts in function.arg_types.items()}
    total = 0.0
    for line in function.lines:
        if line.op.startswith("comm."):
            total += _line_s(line, known, pricer)
        elif line.node in template.op_calls:
            call = template.op_calls[line.node]
            total += pricer.op_s(call, rules.rule(call), plan.strategies[line.node])
        for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
            known[name] = value_bytes(type_, spec, pricer.mesh)
    return total


def _line_s(line: Line, known: dict[str, float], pricer: Pricer) -> float:
    kind, axis = line.op.removeprefix("comm."), line.args[1]
    if kind in ("slice", "to_partial"):
        return 0.0
    source = line.args[0]
    held = known.get(source.name, 0.0) if isinstance(source, Ref) else 0.0
    size = pricer.mesh.sizes[axis]
    return pricer.collective_s(kind, held * size if kind == "all_gather" else held, axis) if size > 1 else 0.0


def _used(p: StoredParameter, dtype: torch.dtype | None) -> TensorType:
    """The type in which a parameter is gathered: it is cast before."""
    return p.type if dtype is None else TensorType(p.type.shape, dtype)


def _gather_s(pricer: Pricer, p: StoredParameter, steps: tuple[Any, ...], dtype: torch.dtype | None) -> float:
    """Seconds to cast a stored shard and bring it to where it is used."""
    type_ = _used(p, dtype)
    cast = 0.0 if dtype is None else pricer.cast_s(p.type, type_, p.storage)
    return cast + _steps_s(pricer, type_, p.storage, steps)


def _steps_s(pricer: Pricer, type_: TensorType, start: Spec, steps: tuple[Any, ...]) -> float:
    """Seconds of a parameter's steps from one spec to another."""
    total = 0.0

    def add(kind: str, axis: str, what: str, nbytes: float, times: int) -> None:
        nonlocal total
        if kind not in ("shard", "slice") and pricer.mesh.sizes[axis] > 1:
            total += times * pricer.collective_s(kind, nbytes, axis)

    _steps(add, "", type_, start, steps, pricer, 1)
    return total


def _collectives(stage: LoweredStage, pricer: Pricer) -> list[Collective]:
    mesh, microbatches = stage.mesh, stage.microbatches
    found: dict[tuple[str, str, str, float], int] = {}

    def add(kind: str, axis: str, what: str, nbytes: float, times: int) -> None:
        if mesh.sizes[axis] > 1 and kind not in ("slice", "to_partial", "shard"):
            key = (kind, axis, what, nbytes)
            found[key] = found.get(key, 0) + times

    def count(function: Function, where: str, times: int) -> None:
        known = {n: value_bytes(*ts, mesh) for n, ts in function.arg_types.items()}
        for line in function.lines:
            if line.op.startswith("comm."):
                kind, axis = line.op.removeprefix("comm."), line.args[1]
                source = line.args[0]
                held = known.get(source.name, 0.0) if isinstance(source, Ref) else 0.0
                full = held * mesh.sizes[axis] if kind == "all_gather" else held
                add(kind, axis, f"{where}.{line.node or line.source}", full, times)
            for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
                known[name] = value_bytes(type_, spec, mesh)

    calls = {(op, name): 0 for op in ("call.forward", "call.backward", "call.weights") for name in stage.templates}
    for line in stage.lines:
        if line.op.startswith("call."):
            calls[line.op, line.args[0]] += 1
        elif line.op == "grads.sum":
            for axis in line.args[1]:
                add("all_reduce", axis, "loss", float(line.types[0].nbytes) if line.types[0] else 0.0, microbatches)
        elif line.op == "params.prefetch":
            for name, steps, dtype in line.args[1]:
                p = stage.parameters[name]
                _steps(add, f"gather {name}", _used(p, dtype), p.storage, steps, pricer, microbatches)
    for name, t in stage.templates.items():
        for op, function in (("call.forward", t.forward), ("call.backward", t.backward), ("call.weights", t.weights)):
            if function is not None:
                count(function, name, calls[op, name] * microbatches)
    for function in stage.functions:
        count(function, "step", microbatches)
    for p in stage.parameters.values():
        if p.contributions:
            _reductions(add, p, pricer)
            _steps(add, f"regather {p.name}", p.type, p.optimizer, p.regather, pricer, 1)
    return [
        Collective(kind, axis, what, nbytes, times, times * _price(pricer, what)(kind, nbytes, axis), stage.index)
        for (kind, axis, what, nbytes), times in found.items()
        if times
    ]


def _price(pricer: Pricer, what: str) -> Callable[[str, float, str], float]:
    """Gradients, updated parameters and the loss travel many in one message."""
    together = what.startswith(("regather ", "gradient ")) or what == "loss"
    return pricer.bucketed_s if together else pricer.collective_s


def _steps(
    add: Add, what: str, type_: TensorType, start: Spec, steps: tuple[Any, ...], pricer: Pricer, times: int
) -> None:
    held = float(start.local_bytes(type_, pricer.mesh))
    for kind, axes, *_ in steps:
        for axis in axes:
            size = pricer.mesh.sizes[axis]
            held = held * size if kind == "all_gather" else held
            add(kind, axis, what, held, times)
            held = held / size if kind in ("reduce_scatter", "shard") else held


def _reductions(add: Add, p: StoredParameter, pricer: Pricer) -> None:
    """The reduction steps of one gradient, from the bytes it starts with."""
    sizes, scale = pricer.mesh.sizes, 1.0
    for kind, axes, *_ in p.reduce:
        for axis in axes:
            scale = scale * sizes[axis] if kind in ("reduce_scatter", "shard") else scale
            scale = scale / sizes[axis] if kind == "all_gather" else scale
    held = p.optimizer.local_bytes(p.type, pricer.mesh) * scale
    for kind, axes, *_ in p.reduce:
        for axis in axes:
            full = held * sizes[axis] if kind == "all_gather" else held
            add(kind, axis, f"gradient {p.name}", full, 1)
            held = held / sizes[axis] if kind in ("reduce_scatter", "shard") else full
