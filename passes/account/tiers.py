"""What memory tiers cost a stage in seconds: how long bytes are on their way, and how much of that nothing hides.

Saved values leave after their call of forward, one after another, while the next calls compute; they come back one call
ahead of their use in backward. Optimizer state comes and goes by parts beside the update of the part before. Where the
device is a CPU, copies and computation share it, and every transfer is exposed. Costs are per rank; what a transfer of n
bytes takes is `Tier.move_s` (`autopar.cluster.tiers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cluster.tiers import backward_exposed_s, exposed_s, forward_exposed_s, parts_exposed_s
from autopar.ir.lowered import Function, LoweredStage, LoweredTemplate
from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.passes.memory.peak import step_parts
from autopar.passes.memory.sizes import roots, value_bytes
from autopar.passes.price.pricer import Pricer


@dataclass(frozen=True)
class TierMove:
    """Bytes of one kind that a rank moves to a tier and back per step, seconds in all, and of these what adds to the step."""

    kind: str
    tier: str
    nbytes: float
    time_s: float
    exposed_s: float
    stage: int = 0


class _Traffic:
    """Bytes and seconds to move them, by tier."""

    def __init__(self) -> None:
        self.by_tier: dict[str, tuple[float, float]] = {}

    def add(self, tier: str, nbytes: float, seconds: float) -> None:
        before = self.by_tier.get(tier, (0.0, 0.0))
        self.by_tier[tier] = before[0] + nbytes, before[1] + seconds

    def moves(self, kind: str, times: int, exposed_s: float, stage: LoweredStage) -> list[TierMove]:
        """All of it so many times per step; what is exposed is shared out among tiers by their seconds."""
        whole_s = sum(seconds for _, seconds in self.by_tier.values()) or 1.0
        return [
            TierMove(kind, tier, nbytes * times, seconds * times, exposed_s * seconds / whole_s, stage.index)
            for tier, (nbytes, seconds) in self.by_tier.items()
        ]


def parked_bytes(template: LoweredTemplate, mesh: Mesh, places: Sequence[int] | None = None) -> float:
    """Bytes of the storages that a call's parked values (or those at `places`) lie in, on one rank."""
    function = template.forward
    root = roots(function.lines, (*function.args, *function.arg_types))
    size = {n: value_bytes(t, s, mesh) for n, (t, s) in function.arg_types.items()}
    for line in function.lines:
        size |= {n: value_bytes(t, s, mesh) for n, t, s in zip(line.outs, line.types, line.specs, strict=False)}
    chosen = (template.saved[place] for place in (template.offload if places is None else places))
    return sum(size.get(name, 0.0) for name in {root.get(name, name) for name in chosen})


def move_s(pricer: Pricer, tier: str, nbytes: float, pieces: int = 1) -> float:
    """Seconds to move bytes between the device of a mesh and one of its tiers, one way."""
    return pricer.device.tier(tier).move_s(nbytes, pieces)


def hides(pricer: Pricer) -> bool:
    """Whether transfers run beside computation."""
    return pricer.device.kind != "cpu"


def saved_moves(
    stage: LoweredStage, inside: dict[str, tuple[float, float, float]], pricer: Pricer
) -> tuple[dict[str, float], list[TierMove]]:
    """Seconds that parking and fetching saved values add to one action, by kind of action; and per step what moves.
    inside: seconds of the templates' forward, backward and weights."""
    parked = {n: (parked_bytes(t, stage.mesh), len(t.offload)) for n, t in stage.templates.items() if t.offload}
    added: dict[str, float] = {}
    traffic = _Traffic()
    directions = (
        ("F", "call.forward", stage.forward, forward_exposed_s),
        ("B", "call.backward", stage.backward, backward_exposed_s),
    )
    for place, (kind, op, function, exposed) in enumerate(directions):
        calls = _calls(function, op, stage)
        moves = [
            move_s(pricer, stage.templates[n].offload_tier, *parked[n]) if n in parked and keeps else 0.0
            for n, keeps in calls
        ]
        if not any(moves):
            continue
        added[kind] = exposed([inside[n][place] for n, _ in calls], moves) if hides(pricer) else sum(moves)
        for (name, keeps), seconds in zip(calls, moves, strict=True):
            if name in parked and keeps:
                traffic.add(stage.templates[name].offload_tier, parked[name][0], seconds)
    times = stage.microbatches
    return added, traffic.moves("activations", times, sum(added.values()) * times, stage)


def gather_moves(
    stage: LoweredStage, inside: dict[str, tuple[float, float, float]], pricer: Pricer
) -> tuple[dict[str, float], list[TierMove]]:
    """The same for parameters that rest in tiers: their shards are read one call ahead. What is then gathered from other
    ranks must be there when the gather starts, so nothing hides it."""
    added: dict[str, float] = {}
    traffic = _Traffic()
    for place, (kind, function) in enumerate((("F", stage.forward), ("B", stage.backward))):
        early: dict[int, float] = {}
        at_once = 0.0
        for line in function.lines if function is not None else ():
            if line.op != "params.prefetch":
                continue
            key, rows = line.args
            for name, steps, _ in rows:
                p = stage.parameters[name]
                if not p.tier:
                    continue
                nbytes = p.storage.local_bytes(p.type, stage.mesh)
                seconds = move_s(pricer, p.tier, nbytes)
                traffic.add(p.tier, nbytes, seconds)
                if gathered(steps, stage.mesh):
                    at_once += seconds
                else:
                    early[int(key[:-1])] = early.get(int(key[:-1]), 0.0) + seconds
        if not early and not at_once:
            continue
        lines = function.lines if function is not None else ()
        calls = [(line.args[0], line.args[1]) for line in lines if line.op == ("call.forward", "call.backward")[place]]
        work = [inside[name][place] for name, _ in calls]
        ahead = backward_exposed_s(work, [early.get(number, 0.0) for _, number in calls])
        added[kind] = at_once + (ahead if hides(pricer) else sum(early.values()))
    times = stage.microbatches
    return added, traffic.moves("parameters", times, sum(added.values()) * times, stage)


def gathered(steps: Sequence[Any], mesh: Mesh) -> bool:
    """Whether any step moves bytes between ranks."""
    return any(
        kind not in ("shard", "slice", "to_partial") and any(mesh.sizes[axis] > 1 for axis in axes)
        for kind, axes, *_ in steps
    )


def gradient_moves(stage: LoweredStage, pricer: Pricer, backward_s: float) -> list[TierMove]:
    """Per step what gradients in tiers move: sums between microbatches out and back in, reduced ones out. Sums are waited
    for; what leaves does so beside backward (backward_s: its seconds in all)."""
    by_tier: dict[str, list[float]] = {}  # bytes, seconds back in, seconds out
    for p in stage.parameters.values():
        if p.tier and p.contributions:
            shard = float(p.optimizer.local_bytes(p.type, stage.mesh))
            again = p.contributions * stage.microbatches - 1
            row = by_tier.setdefault(p.tier, [0.0, 0.0, 0.0])
            whole = shard * _grown(p.reduce, stage.mesh)
            row[0] += 2 * again * whole + shard
            row[1] += again * move_s(pricer, p.tier, whole)
            row[2] += again * move_s(pricer, p.tier, whole) + move_s(pricer, p.tier, shard)
    return [
        TierMove(
            "gradients",
            tier,
            nbytes,
            back + out,
            back + (exposed_s(out, backward_s) if hides(pricer) else out),
            stage.index,
        )
        for tier, (nbytes, back, out) in by_tier.items()
    ]


def _grown(steps: Sequence[Any], mesh: Mesh) -> float:
    """Bytes before a gradient's reduction per byte after it."""
    scale = 1.0
    for kind, axes, *_ in steps:
        for axis in axes:
            scale *= mesh.sizes[axis] if kind in ("reduce_scatter", "shard") else 1.0
            scale /= mesh.sizes[axis] if kind == "all_gather" else 1.0
    return scale


def optimizer_moves(stage: LoweredStage, setting: Setting, pricer: Pricer, update_s: float) -> list[TierMove]:
    """Per step what the optimizer's step by parts moves (state, and values with gradients of parameters in tiers);
    update_s: seconds that the update of all these parameters takes."""
    traffic = _Traffic()
    parts_s: list[float] = []  # one way, per part
    for names, _ in step_parts(stage, setting):
        parts_s.append(0.0)
        for name in names:
            p = stage.parameters[name]
            shard = float(p.optimizer.local_bytes(p.type, stage.mesh))
            state = setting.optimizer.shard_bytes(p.type, shard, name)
            for tier, nbytes in ((p.optimizer_tier, state), (p.tier, 2 * shard)):
                if tier:
                    seconds = move_s(pricer, tier, nbytes)
                    parts_s[-1] += seconds
                    traffic.add(tier, nbytes, seconds)
    time_s = 2 * sum(parts_s)
    exposed = min(parts_exposed_s(update_s, parts_s, parts_s), time_s) if hides(pricer) else time_s
    return traffic.moves("optimizer", 2, exposed, stage)


def _calls(function: Function | None, op: str, stage: LoweredStage) -> list[tuple[str, bool]]:
    """(template, whether it keeps for backward) of a function's calls in order."""
    lines = function.lines if function is not None else ()
    return [(line.args[0], bool(line.kwargs.get("keep", True))) for line in lines if line.op == op]
