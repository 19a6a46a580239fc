"""Bytes alive in one stage of a lowered program: what rests, and what every action needs and leaves behind.

The emitted program is played over sizes: one microbatch's actions (walk.py), in which every line makes and needs what
its implementation does (probe.py), and the gradient store over the microbatches of a step (gradient_store.py). Parameters,
optimizer state and buffers rest all the time; the store is empty between steps. What comes of it over a step, whose schedule
says how many microbatches wait, is in step_peaks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.lowered import LoweredStage
from autopar.ir.resting import busiest_rank, held_share
from autopar.ir.resting import resting as resting_bytes
from autopar.ir.setting import Setting
from autopar.passes.memory.gradient_store import REPLAYED, StepBytes, StoreBytes, step_bytes
from autopar.passes.memory.probe import GatheredShard, Probe, local
from autopar.passes.memory.walk import ActionBytes, action_bytes
from autopar.passes.played.gradients import summed_bytes
from autopar.passes.price.tiers import step_parts
from autopar.runtime.comm.devices import CPU


@dataclass(frozen=True)
class Moment:
    """The effect of an action on a stage's bytes: the most it needs while it runs, and what it leaves behind.

    `peak` counts what the same microbatch held before; `after` is what that microbatch holds afterwards; `sums` what the
    gradient store holds more then. received: bytes that must be there before; sent: on their way after. parked: what the
    microbatch has in memory tiers afterwards; sums_parked: what the gradient store has there more then; parked_peak: the most
    that the microbatch has there, with what the store has more, while it runs. given: outputs that stay from then on until the
    step is over. call: number of the stage's call that ran last when it needs most (None: of no call).
    """

    peak: float
    after: float
    sums: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    parked: dict[str, int] = field(default_factory=dict)
    sums_parked: dict[str, int] = field(default_factory=dict)
    parked_peak: dict[str, int] = field(default_factory=dict)
    given: float = 0.0
    call: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StageMemory:
    """resting: bytes by kind that are always there. actions: per kind of action, of a microbatch among others; first and
    last: of a stage's first and last action of a kind, where gradients begin or end. step: the most beside what rests
    when gradients are finished, parameters updated and gathered. tiers: bytes by kind that are always in a memory tier,
    per tier; gradients: bytes of gradients there when the step ends; copied: bytes of gradients that there are more from the time
    when they are changed, each in a tensor of its own. ended: bytes of gradients that there are when the step is
    over; gathered: bytes of what it gives beside its loss while that is put together then, on every rank of all stages.
    runs_ahead: the host starts actions long before the device runs them, so that what was sent stays until the host has waited
    for it."""

    resting: dict[str, float]
    actions: dict[str, Moment]
    first: dict[str, Moment] = field(default_factory=dict)
    last: dict[str, Moment] = field(default_factory=dict)
    step: float = 0.0
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    copied: float = 0.0
    ended: float = 0.0
    gathered: float = 0.0
    runs_ahead: bool = False

    @property
    def resting_bytes(self) -> float:
        return sum(self.resting.values())


def stage_memory(
    stage: LoweredStage,
    setting: Setting,
    probe: Probe | None = None,
    walked: Callable[[], Mapping[str, ActionBytes]] | None = None,
) -> StageMemory:
    """Bytes of a stage on one of its ranks. probe: of the stage's mesh, by default one for a CPU. walked: the actions of one of
    its microbatches, where they may be known."""
    probe = probe or Probe(stage.mesh)
    tiers = resting_bytes(stage, setting)
    resting = tiers.pop("")
    played = walked() if walked is not None else action_bytes(stage, probe)
    if not stage.training:
        actions = {k: Moment(a.peak, a.end, 0.0, a.received, a.sent, call=a.call) for k, a in played.items()}
        return StageMemory(resting, actions, tiers=tiers, runs_ahead=probe.device != CPU)
    step = step_bytes(stage, played.values(), setting, probe.memo)
    order = _moments_of(played, step)
    if len(order) > REPLAYED:
        order = [*_grown_at_once(order[:-1]), order[-1]]
    middle = order[1] if len(order) > 2 else order[0]
    if step.unsent:
        resting["unsent gradients"] = float(step.unsent)
    top = max(step.reduced.top, step.copied.top, step.copied.held + _update_peak(stage, setting, probe))
    gradients, copied = dict(step.copied.parked), step.copied.held - step.reduced.held
    ahead = probe.device != CPU
    ended, gathered = float(step.copied.held), _gathered_bytes(stage)
    return StageMemory(
        resting, middle, order[0], order[-1], float(top), tiers, gradients, copied, ended, gathered, ahead
    )


def least_peak(stage: LoweredStage, setting: Setting, played: Mapping[str, ActionBytes]) -> float:
    """Bytes that a rank has at some moment of a step at least where one stage is the whole program, known before its gradient
    store is played: what rests, the sums of the microbatches before, and the most that a microbatch needs. played: its actions.

    While the last but one runs sums are as they were made, unless they are reduced by microbatch; the last one's backward may
    leave shards of them alone. Where ranks have unequal blocks no one of them has the longest of all, so no sums are counted.
    """
    rests = sum(resting_bytes(stage, setting)[""].values())
    most = float(max(action.peak for action in played.values()))
    if not stage.training or stage.microbatches == 1 or stage.mesh.uneven:
        return rests + most
    made = shards = 0.0
    for p in stage.parameters.values():
        if p.contributions and not p.tier and p.optimizer.owner is None:
            summed = summed_bytes(p, stage.mesh)
            shard = min(summed, p.updated_bytes(stage.mesh))
            made, shards = made + (shard if p.by_microbatch else summed), shards + shard
    beside_all = most if stage.microbatches > 2 else played["F"].peak
    return rests + max(made + beside_all, shards + most)


def _gathered_bytes(stage: LoweredStage) -> float:
    """Bytes of what a training step gives beside its loss, of the whole batch, with the microbatches' of the largest."""
    whole, parts, m = 0.0, 0.0, stage.microbatches
    for row in stage.outputs:
        if row.extra and (m > 1 or row.spec.axes):
            nbytes = float(row.type.nbytes)
            whole += nbytes * m if row.join.how == "cat" else nbytes
            parts = max(parts, 0.0 if m == 1 else nbytes * m * (1 if row.join.how in ("cat", "same") else 2))
    return whole + parts


def _grown_at_once(order: Sequence[dict[str, Moment]]) -> list[dict[str, Moment]]:
    """The first of some microbatches with all that sums will ever hold, and one after it that needs what any of the others does.

    In the second, sums that lay in one tensor get their own; messages of every microbatch add up until as many are under way as
    may be."""
    first, *growing, steady = order
    grown, neediest = dict[str, Moment](), dict[str, Moment]()
    for kind, moment in steady.items():
        sums = first[kind].sums + sum(one[kind].sums - moment.sums for one in growing)
        parked = dict(first[kind].sums_parked)
        for one in growing:
            for tier in {*one[kind].sums_parked, *moment.sums_parked}:
                more = one[kind].sums_parked.get(tier, 0) - moment.sums_parked.get(tier, 0)
                parked[tier] = parked.get(tier, 0) + more
        grown[kind] = replace(first[kind], sums=sums, sums_parked=parked)
    still = sum(moment.sums - first[kind].sums for kind, moment in grown.items())
    peaks = {kind: moment.peak for kind, moment in steady.items()}
    for one in growing:
        peaks = {kind: max(peak, one[kind].peak - still) for kind, peak in peaks.items()}
        still -= sum(one[kind].sums - moment.sums for kind, moment in steady.items())
    neediest = {kind: replace(moment, peak=peaks[kind]) for kind, moment in steady.items()}
    return [grown, neediest]


def _moments_of(played: Mapping[str, ActionBytes], step: StepBytes) -> list[dict[str, Moment]]:
    """Per microbatch that is replayed what its actions do."""
    order: list[dict[str, Moment]] = []
    before = StoreBytes(0, 0, {})
    for number, taken in enumerate(step.taken, 1):
        order.append({})
        for count, (kind, action) in enumerate(played.items(), 1):
            flushed = step.flushed if number == len(step.taken) and count == len(played) else None
            order[-1][kind], before = _moment(action, before, taken[count - 1], flushed)
    return order


def _moment(
    action: ActionBytes, before: StoreBytes, taken: Sequence[StoreBytes], flushed: StoreBytes | None
) -> tuple[Moment, StoreBytes]:
    """An action of a microbatch, beside what the store holds before; what it holds afterwards. taken: after each of the action's
    gradients; flushed: after what is open was sent, where nothing comes after the action."""
    peak, now, call = 0, before, action.call
    parked_peak: dict[str, int] = {}

    def look_at_tiers(own: Mapping[str, int]) -> None:
        for tier in {*own, *now.parked}:
            more = own.get(tier, 0) + now.parked.get(tier, 0) - before.parked.get(tier, 0)
            parked_peak[tier] = max(parked_peak.get(tier, 0), more)

    for gradient, after in zip(action.gradients, taken, strict=True):
        most = peak
        if not gradient.at_once:  # after the one before, with what both it and the store hold
            peak = max(peak, gradient.top + now.held - before.held)
        now = after
        peak = max(peak, gradient.alive + now.top - before.held)
        call = gradient.call if peak > most else call
        look_at_tiers(gradient.parked)
    if action.top + now.held - before.held >= peak:
        peak, call = action.top + now.held - before.held, action.call
    if flushed is not None:
        now = flushed
        peak = max(peak, action.end + now.top - before.held)
    look_at_tiers(action.parked)
    sums_parked = {tier: n - before.parked.get(tier, 0) for tier, n in now.parked.items()}
    sums, parked = now.held - before.held, dict(action.parked)
    moment = Moment(
        peak, action.end, sums, action.received, action.sent, parked, sums_parked, parked_peak, action.given, call
    )
    return moment, now


def _parts_peak(stage: LoweredStage, setting: Setting, probe: Probe) -> float:
    """The most that a step by parts needs: a part's state, the next one's on its way, and the optimizer's scratch."""
    parts = step_parts(stage, setting)
    worst = 0.0
    for (names, state), (_, coming) in zip(parts, [*parts[1:], ([], 0.0)], strict=False):
        updated = [stage.parameters[n] for n in names]
        scratch = setting.optimizer.scratch_bytes([p.updated_bytes(stage.mesh) for p in updated], probe.device)
        shards = tuple(
            GatheredShard(local(p.type, p.optimizer, stage.mesh), p.regather) for p in updated if p.tier and p.regather
        )
        grown = probe.gathered(shards).ending_peak if shards else 0
        gone = sum(p.updated_bytes(stage.mesh) for p in updated if p.tier)
        worst = max(worst, state + coming + scratch, state - gone + coming + grown)
    return worst


def _update_peak(stage: LoweredStage, setting: Setting, probe: Probe) -> float:
    """The most that the optimizer's step, or the gather after it, needs for a moment."""
    mesh = stage.mesh
    owned = {name: p for name, p in stage.parameters.items() if p.contributions and p.owned}
    rank = busiest_rank(stage.parameters.values(), mesh)
    groups: dict[int, list[float]] = {}
    for name, p in owned.items():
        if not (p.optimizer_tier or p.tier) and held_share(p.optimizer, mesh, rank):
            groups.setdefault(setting.optimizer.group_of.get(name, 0), []).append(p.updated_bytes(mesh))
    scratch = max((setting.optimizer.scratch_bytes(sizes, probe.device) for sizes in groups.values()), default=0.0)
    scratch = max(scratch, _parts_peak(stage, setting, probe))
    shards = tuple(
        (local(p.type, p.optimizer, mesh), p.regather, local(p.type, p.storage, mesh))
        for p in owned.values()
        if p.regather and not p.tier
    )
    return max(scratch, float(probe.regather_peak(shards)) if shards else 0.0)
