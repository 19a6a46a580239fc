"""The seconds that memory tiers cost a stage: how long bytes are on their way, and how much of that nothing hides.

Saved values leave after their call of forward, one after another, while the next calls compute; they come back one call
ahead of their use in backward. Optimizer state comes and goes by parts beside the update of the part before. Where the
device is a CPU, copies and computation share it, and every transfer is exposed. Costs are per rank; what a transfer of n
bytes takes is `Tier.move_s` (`autopar.cluster.tiers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster.tiers import (
    backward_non_overlapped_s,
    forward_non_overlapped_s,
    non_overlapped_s,
    parts_non_overlapped_s,
)
from autopar.ir.lines import CallForward, Prefetch
from autopar.ir.lowered import LoweredStage, LoweredTemplate, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.resting import on_rank
from autopar.ir.setting import Setting
from autopar.ir.steps import RuntimeStep
from autopar.passes.played.gradients import unreduced_bytes
from autopar.passes.price.lines import TemplateSeconds, sent_times
from autopar.passes.price.pricer import Pricer
from autopar.passes.price.storages import storage_owners
from autopar.runtime.update.optimizer_parts import divide


@dataclass(frozen=True)
class TierMove:
    """Bytes of one kind that a rank moves to a tier and back per step, seconds in all, and of these what adds to the step."""

    kind: str
    tier: str
    nbytes: float
    time_s: float
    non_overlapped_s: float
    stage: int = 0


class _Traffic:
    """Bytes and seconds to move them, by tier."""

    def __init__(self) -> None:
        self.by_tier: dict[str, tuple[float, float]] = {}

    def add(self, tier: str, nbytes: float, seconds: float) -> None:
        before = self.by_tier.get(tier, (0.0, 0.0))
        self.by_tier[tier] = before[0] + nbytes, before[1] + seconds

    def moves(self, kind: str, times: int, non_overlapped_s: float, stage: LoweredStage) -> list[TierMove]:
        """All of it so many times per step; what is exposed is shared out among tiers by their seconds."""
        whole_s = sum(seconds for _, seconds in self.by_tier.values()) or 1.0
        return [
            TierMove(kind, tier, nbytes * times, seconds * times, non_overlapped_s * seconds / whole_s, stage.index)
            for tier, (nbytes, seconds) in self.by_tier.items()
        ]


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
    traffic = _Traffic()
    for (action, function), exposed in zip(
        stage.by_action, (forward_non_overlapped_s, backward_non_overlapped_s), strict=False
    ):
        calls = [
            (call.template, call.template in parked and (not isinstance(call, CallForward) or call.keeps))
            for call in function.calls
        ]
        moves = [move_s(pricer, stage.templates[n].offload_tier, *parked[n]) if leaves else 0.0 for n, leaves in calls]
        if not any(moves):
            continue
        added[action] = exposed([per_call[n][action] for n, _ in calls], moves) if hides(pricer) else sum(moves)
        for (name, leaves), seconds in zip(calls, moves, strict=True):
            if leaves:
                traffic.add(stage.templates[name].offload_tier, parked[name][0], seconds)
    times = stage.microbatches
    return added, traffic.moves("activations", times, sum(added.values()) * times, stage)


def gather_moves(
    stage: LoweredStage, per_call: TemplateSeconds, pricer: Pricer
) -> tuple[dict[str, float], list[TierMove]]:
    """The same for parameters that rest in tiers: their shards are read one call ahead. What is then gathered from other
    ranks must be there when the gather starts, so nothing hides it."""
    added: dict[str, float] = {}
    traffic = _Traffic()
    for action, function in stage.by_action:
        early: dict[int, float] = {}
        at_once = 0.0
        gathers = [(line.key.call, g) for line in function.lines if isinstance(line, Prefetch) for g in line.gathers]
        for call, gather in gathers:
            p = stage.parameters[gather.name]
            if not p.tier:
                continue
            nbytes = p.stored_bytes(stage.mesh)
            seconds = move_s(pricer, p.tier, nbytes)
            traffic.add(p.tier, nbytes, seconds)
            if gathered(gather.steps, stage.mesh):
                at_once += seconds
            else:
                early[call] = early.get(call, 0.0) + seconds
        if not early and not at_once:
            continue
        work = [per_call[call.template][action] for call in function.calls]
        ahead = backward_non_overlapped_s(work, [early.get(call.number, 0.0) for call in function.calls])
        added[action] = at_once + (ahead if hides(pricer) else sum(early.values()))
    times = stage.microbatches
    return added, traffic.moves("parameters", times, sum(added.values()) * times, stage)


def gathered(steps: Sequence[RuntimeStep], mesh: Mesh) -> bool:
    """Whether any step moves bytes between ranks."""
    return any(step.facts.sends and mesh.product(step.axes) > 1 for step in steps)


def gradient_moves(stage: LoweredStage, pricer: Pricer, backward_s: float) -> list[TierMove]:
    """Per step what gradients in tiers move: sums between microbatches out and back in, reduced ones out. Sums are waited
    for; what leaves does so beside backward (backward_s: its seconds in all)."""
    by_tier: dict[str, list[float]] = {}  # bytes, seconds back in, seconds out
    for p in stage.parameters.values():
        if p.tier and p.contributions:
            reduced, whole = on_rank(p, stage.mesh).gradient, unreduced_bytes(p, stage.mesh)
            times = sent_times(p, stage)
            row = by_tier.setdefault(p.tier, [0.0, 0.0, 0.0])
            row[0] += reduced
            row[2] += move_s(pricer, p.tier, reduced)
            for nbytes, again in ((whole, p.contributions * stage.microbatches - times), (reduced, times - 1)):
                moved_s = again * move_s(pricer, p.tier, nbytes)
                row[0] += 2 * again * nbytes
                row[1] += moved_s
                row[2] += moved_s
    return [
        TierMove(
            "gradients",
            tier,
            nbytes,
            back + out,
            back + (non_overlapped_s(out, backward_s) if hides(pricer) else out),
            stage.index,
        )
        for tier, (nbytes, back, out) in by_tier.items()
    ]


def step_parts(stage: LoweredStage, setting: Setting) -> list[tuple[list[str], float]]:
    """The parts that the optimizer's step is divided into where its state rests in tiers: names, and the bytes that come
    for them: state, values and gradients."""
    mesh = stage.mesh
    owned = {n: p for n, p in stage.parameters.items() if p.contributions and p.owned and (p.optimizer_tier or p.tier)}
    sizes = {n: int(p.updated_bytes(mesh)) for n, p in owned.items()}
    return [
        (names, sum(n for name in names for tier, n in _coming(owned[name], mesh, setting) if tier))
        for names in divide(sizes)
    ]


def _coming(p: StoredParameter, mesh: Mesh, setting: Setting) -> tuple[tuple[str, float], ...]:
    """The bytes that a parameter's update needs, each with the tier ("": none) from which they come: state, then value and
    gradient."""
    held = on_rank(p, mesh)
    return (p.optimizer_tier, held.state_bytes(setting)), (p.tier, held.updated + held.gradient)


def optimizer_moves(stage: LoweredStage, setting: Setting, pricer: Pricer, update_s: float) -> list[TierMove]:
    """Per step what the optimizer's step by parts moves (state, and values with gradients of parameters in tiers);
    update_s: seconds that the update of all these parameters takes."""
    traffic = _Traffic()
    parts_s: list[float] = []  # one way, per part
    for names, _ in step_parts(stage, setting):
        parts_s.append(0.0)
        for name in names:
            for tier, nbytes in _coming(stage.parameters[name], stage.mesh, setting):
                if tier:
                    seconds = move_s(pricer, tier, nbytes)
                    parts_s[-1] += seconds
                    traffic.add(tier, nbytes, seconds)
    time_s = 2 * sum(parts_s)
    exposed = min(parts_non_overlapped_s(update_s, parts_s, parts_s), time_s) if hides(pricer) else time_s
    return traffic.moves("optimizer", 2, exposed, stage)
