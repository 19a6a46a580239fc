"""Bytes alive in a lowered program at every point of its schedule.

The emitted program is played over sizes: one microbatch's actions (walk.py), in which every line makes and needs what
its implementation does (probe.py), and the gradient store over the microbatches of a step (gradient_store.py). Parameters,
optimizer state and buffers rest all the time; the store is empty between steps. Between its actions a stage holds what its
microbatches in flight keep, so the peak of a group of ranks is the largest, over its row of the action table, of what
is held then and what the action needs beside it; or what the optimizer needs when all is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.actions import Action, StageGraph, Table
from autopar.ir.lowered import LoweredProgram, LoweredStage
from autopar.ir.resting import busiest_rank, held_share
from autopar.ir.resting import resting as resting_bytes
from autopar.ir.setting import Setting
from autopar.passes.memory.gradient_store import REPLAYED, StepBytes, StoreBytes, step_bytes
from autopar.passes.memory.probe import GatheredShard, Probe, local
from autopar.passes.memory.walk import ActionBytes, action_bytes
from autopar.passes.price.tiers import step_parts
from autopar.passes.schedule.held import held_after
from autopar.runtime.comm.devices import CPU
from autopar.runtime.step.pipeline import most_sends


@dataclass(frozen=True)
class Moment:
    """The effect of an action on a stage's bytes: the most it needs while it runs, and what it leaves behind.

    `peak` counts what the same microbatch held before; `after` is what that microbatch holds afterwards; `sums` what the
    gradient store holds more then. received: bytes that must be there before; sent: on their way after. parked: what the
    microbatch has in memory tiers afterwards; sums_parked: what the gradient store has there more then; parked_peak: the most
    that the microbatch has there, with what the store has more, while it runs. given: outputs that stay from then on until the
    step is over.
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


def stage_memory(stage: LoweredStage, setting: Setting, probe: Probe | None = None) -> StageMemory:
    """Bytes of a stage on one of its ranks. probe: of the stage's mesh, by default one for a CPU."""
    probe = probe or Probe(stage.mesh)
    tiers = resting_bytes(stage, setting)
    resting = tiers.pop("")
    played = action_bytes(stage, probe)
    if not stage.training:
        actions = {k: Moment(a.peak, a.end, 0.0, a.received, a.sent) for k, a in played.items()}
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
    peak, now = 0, before
    parked_peak: dict[str, int] = {}

    def look_at_tiers(own: Mapping[str, int]) -> None:
        for tier in {*own, *now.parked}:
            more = own.get(tier, 0) + now.parked.get(tier, 0) - before.parked.get(tier, 0)
            parked_peak[tier] = max(parked_peak.get(tier, 0), more)

    for gradient, after in zip(action.gradients, taken, strict=True):
        if not gradient.at_once:  # after the one before, with what both it and the store hold
            peak = max(peak, gradient.top + now.held - before.held)
        now = after
        peak = max(peak, gradient.alive + now.top - before.held)
        look_at_tiers(gradient.parked)
    peak = max(peak, action.top + now.held - before.held)
    if flushed is not None:
        now = flushed
        peak = max(peak, action.end + now.top - before.held)
    look_at_tiers(action.parked)
    sums_parked = {tier: n - before.parked.get(tier, 0) for tier, n in now.parked.items()}
    sums, parked = now.held - before.held, dict(action.parked)
    moment = Moment(
        peak, action.end, sums, action.received, action.sent, parked, sums_parked, parked_peak, action.given
    )
    return moment, now


def group_peaks(graph: StageGraph, table: Table, stages: Sequence[StageMemory]) -> tuple[float, ...]:
    """Largest bytes on a rank of every group over a step."""
    rows, sends = zip(graph.groups, table, strict=True), most_sends(len(graph.groups))
    return tuple(
        sum(stages[s].resting_bytes for s in group) + _worst(group, row, stages, sends)[0] for group, row in rows
    )


def _worst(
    group: Sequence[int], row: Sequence[Action], stages: Sequence[StageMemory], sends: int
) -> tuple[float, float, float, float, float]:
    """The most bytes of a group over a step beside what rests; of these gradients, what microbatches left behind that are
    waiting then, what was sent before, and outputs that the step is to give. sends: of so many actions at most.

    An action needs its moment's peak, or what it leaves; what it receives is posted before the one ahead of it runs, and what it
    sends is there until the receives of the action after the next are posted.
    """
    moments = moments_of(row, stages)
    after_F, after_B = (
        [float(memory.actions[k].after) if k in memory.actions else 0.0 for memory in stages] for k in "FB"
    )
    before = {"F": [0.0] * len(stages), "B": after_F, "W": after_B}
    coming = [*(moment.received for moment in moments[1:]), 0.0, 0.0]
    sums = dict.fromkeys(group, 0.0)
    summed = worst = gradients = waiting = leaving = given = outputs = 0.0
    under_way: deque[float] = deque(maxlen=sends)
    for i, (action, moment, held) in enumerate(zip(row, moments, held_after(row, after_F, after_B), strict=True)):
        others = held - moment.after
        left = moment.after + moment.sums + moment.given + moment.sent + coming[i + 1]
        need = max(moment.peak, left) + coming[i]
        sent = sum(under_way)
        if others + summed + given + need + sent > worst:
            worst, leaving, outputs = others + summed + given + need + sent, sent, given
            own = min(before[action.kind][action.stage] or moment.after, need)
            gradients, waiting = summed + min(max(moment.sums, 0.0), need - own), others + own
        summed += moment.sums
        given += moment.given
        sums[action.stage] += moment.sums
        if moment.sent and stages[action.stage].runs_ahead:
            under_way.append(moment.sent)
    copied = sum(stages[s].copied for s in group)
    last = max(stages[s].step + summed - sums[s] + copied - stages[s].copied for s in group) + given
    gathered = sum(stage.gathered for stage in stages)
    ended = sum(stages[s].ended for s in group)
    if gathered and ended + given + gathered > last:
        last, given = ended + given + gathered, given + gathered
    if last > worst:
        return last, min(summed + copied, last - given), 0.0, 0.0, given
    return worst, gradients, waiting, leaving, outputs


def peak_kinds(lowered: LoweredProgram, stages: list[StageMemory]) -> dict[str, float]:
    """The largest peak of any group by kind; the kinds add up to the largest of `group_peaks`.

    "held for backward": what microbatches left behind that are waiting then; "gradients": with those that the action adds;
    "for a moment": what the action (or the optimizer's step) that makes the peak needs beside; "sends under way": what actions
    before it sent, where the host runs ahead; "outputs": what earlier actions made that the step gives beside its loss.
    """
    largest: dict[str, float] = {}
    for group, row in zip(lowered.graph.groups, lowered.table, strict=True):
        resting = {kind: sum(stages[s].resting.get(kind, 0.0) for s in group) for kind in stages[group[0]].resting}
        worst, gradients, waiting, sent, outputs = _worst(group, row, stages, most_sends(len(lowered.graph.groups)))
        kinds = {
            **resting,
            "gradients": resting.get("gradients", 0.0) + gradients,
            "held for backward": waiting,
            "for a moment": worst - gradients - waiting - sent - outputs,
        }
        kinds |= {"sends under way": sent} if sent else {}
        kinds |= {"outputs": outputs} if outputs else {}
        largest = max(largest, kinds, key=lambda kinds: sum(kinds.values()))
    return largest


def moments_of(row: Sequence[Action], stages: Sequence[StageMemory]) -> list[Moment]:
    """The moment of every action of a group: a stage's first and last of a kind differ from those between."""
    left: dict[tuple[int, str], int] = {}
    for action in row:
        left[action.stage, action.kind] = left.get((action.stage, action.kind), 0) + 1
    begun: set[tuple[int, str]] = set()
    moments = []
    for action in row:
        kind, memory = (action.stage, action.kind), stages[action.stage]
        left[kind] -= 1
        moment_of = memory.last if left[kind] == 0 else memory.actions if kind in begun else memory.first
        begun.add(kind)
        moments.append(moment_of.get(action.kind, memory.actions[action.kind]))
    return moments


def tier_peaks(graph: StageGraph, table: Table, stages: Sequence[StageMemory]) -> tuple[dict[str, float], ...]:
    """Largest bytes in every memory tier on a rank of every group over a step."""
    peaks = []
    for group, row in zip(graph.groups, table, strict=True):
        now: dict[str, float] = {}
        for s in group:
            for tier, kinds in stages[s].tiers.items():
                now[tier] = now.get(tier, 0.0) + sum(kinds.values())
        resting, worst = dict(now), dict(now)
        parked: dict[tuple[int, int], dict[str, int]] = {}
        for action, moment in zip(row, moments_of(row, stages), strict=True):
            before = parked.get((action.stage, action.microbatch), {})
            parked[action.stage, action.microbatch] = moment.parked
            for tier in {*before, *moment.parked, *moment.sums_parked}:
                running = now.get(tier, 0.0) - before.get(tier, 0) + moment.parked_peak.get(tier, 0)
                more = moment.parked.get(tier, 0) - before.get(tier, 0) + moment.sums_parked.get(tier, 0)
                now[tier] = now.get(tier, 0.0) + more
                worst[tier] = max(worst.get(tier, 0.0), running, now[tier])
        for tier in {t for s in group for t in stages[s].gradients}:
            ended = resting.get(tier, 0.0) + sum(stages[s].gradients.get(tier, 0) for s in group)
            worst[tier] = max(worst.get(tier, 0.0), ended)
        peaks.append(worst)
    return tuple(peaks)


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
