"""What memory tiers cost a stage in seconds: how long bytes are on their way, and how much of that nothing hides.

Saved values leave after their call of forward, one after another, while the next calls compute; they come back one call
ahead of their use in backward. Optimizer state comes and goes by parts beside the update of the part before. Where the
device is a CPU, copies and computation share it, and every transfer is exposed. Costs are per rank; what a transfer of n
bytes takes is `Tier.move_s` (`autopar.cluster.tiers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster.tiers import backward_exposed_s, exposed_s, forward_exposed_s, parts_exposed_s
from autopar.ir.lines import CallForward, Prefetch, TemplateCall
from autopar.ir.lowered import LoweredStage, LoweredTemplate
from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.ir.steps import LOCAL_KINDS, RuntimeStep, bytes_before_per_byte
from autopar.passes.memory.peak import step_parts
from autopar.passes.price.lines import TemplateSeconds
from autopar.passes.price.pricer import Pricer
from autopar.passes.price.storages import storage_owners


@dataclass(frozen=True)
class TierMove:
    """Bytes of one kind that a rank moves to a tier and back per step, seconds in all, and of these what adds to the step."""

    kind: str
    tier: str
    nbytes: float
    time_s: float
    exposed_s: float
    stage: int = 0


def parked_bytes(template: LoweredTemplate, mesh: Mesh, places: Sequence[int] | None = None) -> float:
    """Bytes of the storages that a call's parked values (or those at `places`) lie in, on one rank."""
    owner, size = storage_owners(template.forward), template.forward.local_bytes(mesh)
    chosen = (template.saved[place] for place in (template.offload if places is None else places))
    return sum(size.get(name, 0.0) for name in {owner.get(name, name) for name in chosen})


def move_s(pricer: Pricer, tier: str, nbytes: float, pieces: int = 1) -> float:
    """Seconds to move bytes between the device of a mesh and one of its tiers, one way."""
    return pricer.device.tier(tier).move_s(nbytes, pieces)


def hides(pricer: Pricer) -> bool:
    """Whether transfers run beside computation."""
    return pricer.device.kind != "cpu"


def saved_moves(
    stage: LoweredStage, per_call: TemplateSeconds, pricer: Pricer
) -> tuple[dict[str, float], list[TierMove]]:
    """Seconds that parking and fetching saved values add to one action, by kind of action; and per step what moves.
    per_call: seconds of the templates' functions."""
    parked = {n: (parked_bytes(t, stage.mesh), len(t.offload)) for n, t in stage.templates.items() if t.offload}
    added: dict[str, float] = {}
    totals: dict[str, list[float]] = {}
    rows = (("F", stage.forward, forward_exposed_s), ("B", stage.backward, backward_exposed_s))
    for action, function, exposed in rows:
        lines = function.lines if function is not None else ()
        calls = [
            (line.template, not isinstance(line, CallForward) or line.keeps)
            for line in lines
            if isinstance(line, TemplateCall)
        ]
        moves = [
            move_s(pricer, stage.templates[n].offload_tier, *parked[n]) if n in parked and keeps else 0.0
            for n, keeps in calls
        ]
        if not any(moves):
            continue
        added[action] = exposed([per_call[n][action] for n, _ in calls], moves) if hides(pricer) else sum(moves)
        for (name, keeps), seconds in zip(calls, moves, strict=True):
            if name in parked and keeps:
                total = totals.setdefault(stage.templates[name].offload_tier, [0.0, 0.0])
                total[0] += parked[name][0]
                total[1] += seconds
    times, exposed_s = stage.microbatches, sum(added.values()) * stage.microbatches
    whole = sum(seconds for _, seconds in totals.values())
    return added, [
        TierMove("activations", tier, nbytes * times, seconds * times, exposed_s * seconds / whole, stage.index)
        for tier, (nbytes, seconds) in totals.items()
    ]


def gather_moves(
    stage: LoweredStage, per_call: TemplateSeconds, pricer: Pricer
) -> tuple[dict[str, float], list[TierMove]]:
    """The same for parameters that rest in tiers: their shards are read one call ahead. What is then gathered from other
    ranks must be there when the gather starts, so nothing hides it."""
    added: dict[str, float] = {}
    total: dict[str, list[float]] = {}
    for action, function in (("F", stage.forward), ("B", stage.backward)):
        early: dict[int, float] = {}
        at_once = 0.0
        lines = function.lines if function is not None else ()
        for line in lines:
            if not isinstance(line, Prefetch):
                continue
            for gather in line.gathers:
                p = stage.parameters[gather.name]
                if not p.tier:
                    continue
                nbytes = p.storage.local_bytes(p.type, stage.mesh)
                seconds = move_s(pricer, p.tier, nbytes)
                row = total.setdefault(p.tier, [0.0, 0.0])
                row[0] += nbytes
                row[1] += seconds
                if gathered(gather.steps, stage.mesh):
                    at_once += seconds
                else:
                    early[line.key.call] = early.get(line.key.call, 0.0) + seconds
        if not early and not at_once:
            continue
        calls = [line for line in lines if isinstance(line, TemplateCall)]
        work = [per_call[line.template][action] for line in calls]
        ahead = backward_exposed_s(work, [early.get(line.number, 0.0) for line in calls])
        added[action] = at_once + (ahead if hides(pricer) else sum(early.values()))
    times, whole = stage.microbatches, sum(seconds for _, seconds in total.values())
    exposed = times * sum(added.values())
    return added, [
        TierMove("parameters", tier, nbytes * times, seconds * times, exposed * seconds / whole, stage.index)
        for tier, (nbytes, seconds) in total.items()
    ]


def gathered(steps: Sequence[RuntimeStep], mesh: Mesh) -> bool:
    """Whether any step moves bytes between ranks."""
    return any(step.kind not in LOCAL_KINDS and any(mesh.sizes[axis] > 1 for axis in step.axes) for step in steps)


def gradient_moves(stage: LoweredStage, pricer: Pricer, backward_s: float) -> list[TierMove]:
    """Per step what gradients in tiers move: sums between microbatches out and back in, reduced ones out. Sums are waited
    for; what leaves does so beside backward (backward_s: its seconds in all)."""
    found: dict[str, list[float]] = {}
    for p in stage.parameters.values():
        if p.tier and p.contributions:
            shard = float(p.optimizer.local_bytes(p.type, stage.mesh))
            again = p.contributions * stage.microbatches - 1
            row = found.setdefault(p.tier, [0.0, 0.0, 0.0])
            whole = shard * bytes_before_per_byte(p.reduce, stage.mesh.sizes)
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
        for tier, (nbytes, back, out) in found.items()
    ]


def optimizer_moves(stage: LoweredStage, setting: Setting, pricer: Pricer, update_s: float) -> list[TierMove]:
    """Per step what the optimizer's step by parts moves (state, and values with gradients of parameters in tiers);
    update_s: seconds that the update of all these parameters takes."""
    ways: list[float] = []
    total: dict[str, list[float]] = {}
    for names, _ in step_parts(stage, setting):
        ways.append(0.0)
        for name in names:
            p = stage.parameters[name]
            shard = float(p.optimizer.local_bytes(p.type, stage.mesh))
            itemsize = p.type.dtype.itemsize
            state = shard / itemsize * setting.state_ratio * max(setting.state_bytes, itemsize)
            for tier, nbytes in ((p.optimizer_tier, state), (p.tier, 2 * shard)):
                if tier:
                    seconds = move_s(pricer, tier, nbytes)
                    ways[-1] += seconds
                    row = total.setdefault(tier, [0.0, 0.0])
                    row[0] += nbytes
                    row[1] += seconds
    if not ways:
        return []
    time_s = 2 * sum(ways)
    exposed = min(parts_exposed_s(update_s, ways, ways), time_s) if hides(pricer) else time_s
    whole = sum(seconds for _, seconds in total.values()) or 1.0
    return [
        TierMove("optimizer", tier, 2 * nbytes, 2 * seconds, exposed * seconds / whole, stage.index)
        for tier, (nbytes, seconds) in total.items()
    ]
