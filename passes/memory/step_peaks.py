"""The most bytes of a group of ranks over a step, and the moment at which it has them.

Between its actions a stage holds what its microbatches in flight keep (peak.py says how much), so the peak of a group of ranks is
the largest, over its row of the action table, of what is held then and what the action needs beside it; or what the optimizer
needs when all is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.actions import Action, StageGraph, Table
from autopar.ir.lowered import LoweredProgram
from autopar.passes.memory.peak import Moment, StageMemory
from autopar.passes.schedule.held import held_after
from autopar.runtime.step.pipeline import most_sends


@dataclass(frozen=True)
class Worst:
    """The moment at which a group of ranks has most bytes beside what rests.

    place: of its action in the group's row (None: when all actions are over). gradients, waiting, sent, outputs: parts of nbytes,
    those of gradients, of what microbatches left behind that are waiting then, of what was sent before, and of outputs that the
    step is to give. gradients_of: by stage. own: of waiting the bytes of the action's own microbatch. call: as of `Moment`.
    """

    nbytes: float = 0.0
    gradients: float = 0.0
    waiting: float = 0.0
    sent: float = 0.0
    outputs: float = 0.0
    place: int | None = None
    gradients_of: Mapping[int, float] | None = None
    own: float = 0.0
    call: int | None = None


def group_peaks(graph: StageGraph, table: Table, stages: Sequence[StageMemory]) -> tuple[float, ...]:
    """Largest bytes on a rank of every group over a step."""
    rows, sends = zip(graph.groups, table, strict=True), most_sends(len(graph.groups))
    return tuple(
        sum(stages[s].resting_bytes for s in group) + worst_moment(group, row, stages, sends).nbytes
        for group, row in rows
    )


def worst_moment(group: Sequence[int], row: Sequence[Action], stages: Sequence[StageMemory], sends: int) -> Worst:
    """The worst moment of a group over a step. sends: of so many actions at most.

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
    summed = given = 0.0
    worst = Worst()
    under_way: deque[float] = deque(maxlen=sends)
    for i, (action, moment, held) in enumerate(zip(row, moments, held_after(row, after_F, after_B), strict=True)):
        others = held - moment.after
        left = moment.after + moment.sums + moment.given + moment.sent + coming[i + 1]
        need = max(moment.peak, left) + coming[i]
        sent = sum(under_way)
        if others + summed + given + need + sent > worst.nbytes:
            own = min(before[action.kind][action.stage] or moment.after, need)
            more = min(max(moment.sums, 0.0), need - own)
            gradients_of = {**sums, action.stage: sums[action.stage] + more}
            total, waiting = others + summed + given + need + sent, others + own
            call = moment.call if moment.peak >= left else None
            worst = Worst(total, summed + more, waiting, sent, given, i, gradients_of, own, call)
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
    if last > worst.nbytes:
        ends = {s: sums[s] + stages[s].copied for s in group}
        return Worst(last, min(summed + copied, last - given), outputs=given, gradients_of=ends)
    return worst


def peak_kinds(lowered: LoweredProgram, stages: list[StageMemory]) -> dict[str, float]:
    """The largest peak of any group by kind; the kinds add up to the largest of `group_peaks`.

    "held for backward": what microbatches left behind that are waiting then; "gradients": with those that the action adds;
    "for a moment": what the action (or the optimizer's step) that makes the peak needs beside; "sends under way": what actions
    before it sent, where the host runs ahead; "outputs": what earlier actions made that the step gives beside its loss.
    """
    return fullest(lowered, stages)[2]


def fullest(lowered: LoweredProgram, stages: Sequence[StageMemory]) -> tuple[int, Worst, dict[str, float]]:
    """The group of ranks that has the largest peak, its worst moment, and its bytes then as of `peak_kinds`."""
    found = []
    for g, (group, row) in enumerate(zip(lowered.graph.groups, lowered.table, strict=True)):
        resting = {kind: sum(stages[s].resting.get(kind, 0.0) for s in group) for kind in stages[group[0]].resting}
        worst = worst_moment(group, row, stages, most_sends(len(lowered.graph.groups)))
        kinds = {
            **resting,
            "gradients": resting.get("gradients", 0.0) + worst.gradients,
            "held for backward": worst.waiting,
            "for a moment": worst.nbytes - worst.gradients - worst.waiting - worst.sent - worst.outputs,
        }
        kinds |= {"sends under way": worst.sent} if worst.sent else {}
        kinds |= {"outputs": worst.outputs} if worst.outputs else {}
        found.append((g, worst, kinds))
    return max(found, key=lambda one: sum(one[2].values()))


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
