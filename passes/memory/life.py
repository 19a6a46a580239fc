"""The life of every tensor on a rank over a step, as the peak counts them: what is made and freed, one after another.

The actions of a group's row are played in order. In each the storages are those of the walk (walk.py), recorded once per kind
of action; sums of gradients are the levels of the gradient store after each gradient (gradient_store.py); what rests, arrives, is
sent and given is that of the stages' moments (peak.py). So the most that lives at once is the group's peak, by construction:
where a moment's peak is more than what its own storages come to (of ranks that differ, or of microbatches that one stands for),
the rest is a block of its own there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.actions import Action
from autopar.ir.lines import Line, label
from autopar.ir.lowered import LoweredStage
from autopar.ir.resting import resting_rows
from autopar.ir.setting import Setting
from autopar.passes.memory.gradient_store import REPLAYED, StoreBytes, step_bytes
from autopar.passes.memory.peak import Moment, StageMemory
from autopar.passes.memory.probe import Probe
from autopar.passes.memory.recorder import Freed, Handed, Made, Needed, Recorded, results_first
from autopar.passes.memory.step_peaks import moments_of
from autopar.passes.memory.walk import ActionBytes, recorded_actions
from autopar.runtime.step.pipeline import most_sends


@dataclass(frozen=True)
class Block:
    """Bytes that lie together. name: of what they are; source: where in the model that comes from, as `Line.source` says it;
    stage: whose they are; action: in which they were made (None: outside of actions)."""

    number: int
    nbytes: int
    name: str
    source: str
    stage: int
    action: Action | None


@dataclass(frozen=True)
class Change:
    """A block is made, or freed. during: the action that runs then (None: before the first one, or after the last)."""

    block: Block
    is_made: bool
    during: Action | None

    @property
    def nbytes(self) -> int:
        """Bytes that there are more then."""
        return self.block.nbytes if self.is_made else -self.block.nbytes


@dataclass(frozen=True)
class Played:
    """A stage's actions by kind with what happens in them, and what its store holds: after every gradient of an action, by
    (microbatch that is replayed, kind), with what it held before; flushed: in the end."""

    actions: Mapping[str, tuple[ActionBytes, list[Recorded]]]
    taken: Mapping[tuple[int, str], tuple[StoreBytes, Sequence[StoreBytes]]]
    flushed: StoreBytes | None
    replayed: int

    @staticmethod
    def of(stage: LoweredStage, setting: Setting, probe: Probe) -> Played:
        """The actions of a stage on one of its ranks."""
        actions = {k: (a, results_first(happened)) for k, (a, happened) in recorded_actions(stage, probe).items()}
        if not stage.training:
            return Played(actions, {}, None, 1)
        step = step_bytes(stage, [a for a, _ in actions.values()], setting, probe.memo)
        taken, before = dict[tuple[int, str], tuple[StoreBytes, Sequence[StoreBytes]]](), StoreBytes(0, 0, {})
        for number, by_action in enumerate(step.taken):
            for kind, rows in zip(actions, by_action, strict=True):
                taken[number, kind] = before, rows
                before = rows[-1] if rows else before
        return Played(actions, taken, step.flushed, len(step.taken))

    def microbatch(self, memory: StageMemory, kind: str, moment: Moment) -> int:
        """The microbatch that is replayed for an action with such a moment."""
        if moment is memory.last.get(kind):
            return self.replayed - 1
        if moment is memory.first.get(kind):
            return 0
        return self.replayed - 2 if self.replayed > REPLAYED else min(1, self.replayed - 1)


def life_of_group(
    group: Sequence[int],
    row: Sequence[Action],
    stages: Sequence[LoweredStage],
    memories: Sequence[StageMemory],
    setting: Setting,
    probes: Mapping[int, Probe],
    groups: int,
) -> list[Change]:
    """All that a rank of a group makes and frees in a step. stages, memories: of the whole program, by stage; probes: of the
    group's stages; groups: how many there are."""
    life = _Life()
    for s in group:
        life.rest(stages[s], memories[s], setting)
    played = {s: Played.of(stages[s], setting, probes[s]) for s in group}
    moments = moments_of(row, memories)
    row_life = _Row(life, memories, played, moments, row, most_sends(groups))
    row_life.run()
    row_life.end(group, memories)
    return life.changes


class _Life:
    """changes: so far; alive: bytes of blocks now."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.alive = 0
        self.action: Action | None = None
        self._count = 0

    def make(self, nbytes: float, name: str, source: str = "", stage: int = 0) -> Block:
        self._count += 1
        block = Block(self._count, round(nbytes), name, source, stage, self.action)
        if block.nbytes:
            self.changes.append(Change(block, True, self.action))
            self.alive += block.nbytes
        return block

    def free(self, block: Block) -> None:
        if block.nbytes:
            self.changes.append(Change(block, False, self.action))
            self.alive -= block.nbytes

    def for_a_moment(self, nbytes: float, name: str, source: str = "", stage: int = 0) -> None:
        if nbytes > 0:
            self.free(self.make(nbytes, name, source, stage))

    def rest(self, stage: LoweredStage, memory: StageMemory, setting: Setting) -> None:
        """Make the blocks that rest of a stage, by parameter, and the rest of every kind: buffers, what compression lost."""
        left = dict(memory.resting)
        for p, one in resting_rows(stage, setting):
            if one.kind != "gradients" and not p.tiers[one.moves]:
                nbytes = min(int(one.nbytes), int(left.get(one.kind, 0.0)))
                left[one.kind] = left.get(one.kind, 0.0) - nbytes
                self.make(nbytes, f"{p.name} ({one.kind})", stage=stage.index)
        for kind, rest in left.items():
            self.make(rest, kind, stage=stage.index)


class _Store:
    """The level of a stage's gradient store, as blocks that are made where it rises and freed where it falls."""

    def __init__(self, life: _Life, stage: int) -> None:
        self._life, self._stage = life, stage
        self._blocks: list[Block] = []
        self.level = 0

    def to(self, level: int, name: str) -> None:
        while self._blocks and self.level > level:
            block = self._blocks.pop()
            self._life.free(block)
            self.level -= block.nbytes
        if level > self.level:
            self._blocks.append(self._life.make(level - self.level, name, stage=self._stage))
            self.level = level


class _Row:
    """The actions of a row, one after another."""

    def __init__(
        self,
        life: _Life,
        memories: Sequence[StageMemory],
        played: Mapping[int, Played],
        moments: Sequence[Moment],
        row: Sequence[Action],
        sends: int,
    ) -> None:
        self.life, self.memories, self.played, self.moments, self.row = life, memories, played, moments, row
        self.sends = sends
        self.stores = {s: _Store(life, s) for s in played}
        self.held: dict[tuple[int, int], dict[int, Block]] = {}
        self.given: dict[tuple[int, int], float] = {}
        self.posted: dict[int, Block] = {}
        self.under_way: deque[Block] = deque()

    def run(self) -> None:
        last = {(action.stage, action.microbatch): i for i, action in enumerate(self.row)}
        self._post(1)
        for i, (action, moment) in enumerate(zip(self.row, self.moments, strict=True)):
            life, microbatch = self.life, (action.stage, action.microbatch)
            life.action = action
            if i in self.posted:
                life.free(self.posted.pop(i))
            self._act(action, moment)
            self.given[microbatch] = self.given.get(microbatch, 0.0) + moment.given
            sent = life.make(moment.sent, "sent to another stage", stage=action.stage)
            self._post(i + 2)
            if moment.sent and self.memories[action.stage].runs_ahead and self.sends:
                self.under_way.append(sent)
                if len(self.under_way) > self.sends:
                    life.free(self.under_way.popleft())
            else:
                life.free(sent)
            if last[microbatch] == i:
                self._finish(microbatch)
        self.life.action = None

    def _post(self, i: int) -> None:
        """Receives of an action that are posted ahead of it."""
        if i < len(self.row) and self.moments[i].received:
            self.posted[i] = self.life.make(self.moments[i].received, "received", stage=self.row[i].stage)

    def _finish(self, microbatch: tuple[int, int]) -> None:
        """A microbatch is over: of what it held there are the outputs that the step gives."""
        blocks, given = self.held.pop(microbatch, {}), round(self.given[microbatch])
        if sum(block.nbytes for block in blocks.values()) != given:
            for block in blocks.values():
                self.life.free(block)
            self.life.make(given, "outputs", stage=microbatch[0])

    def _act(self, action: Action, moment: Moment) -> None:
        """An action's storages, its gradients, and what its peak has beside them."""
        life, memory, played = self.life, self.memories[action.stage], self.played[action.stage]
        microbatch, store = (action.stage, action.microbatch), self.stores[action.stage]
        held, base = self.held.setdefault(microbatch, {}), store.level
        number = played.microbatch(memory, action.kind, moment)
        own = sum(block.nbytes for block in held.values()) - self.given.get(microbatch, 0.0)
        elsewhere = life.alive - own
        first = len(life.changes)
        for one in self._with_levels(played, action.kind, number):
            match one:
                case Made(storage, nbytes, line):
                    held[storage] = life.make(nbytes, *_said(line), action.stage)
                case Freed(storage):
                    life.free(held.pop(storage))
                case Needed(nbytes, line):
                    name, source = _said(line)
                    life.for_a_moment(nbytes, f"{name}, for a moment", source, action.stage)
                case (int(level), str(name)):
                    store.to(base + level, name)
        self._up_to(moment.peak, first, elsewhere, action.stage)
        store.to(base + round(moment.sums), "sums of gradients")

    def _with_levels(self, played: Played, kind: str, number: int) -> Iterator[Recorded | tuple[int, str]]:
        """All that happens in an action; where gradients are handed over, levels of the store above that before the action."""
        action, happened = played.actions[kind]
        before, taken = played.taken.get((number, kind), (StoreBytes(0, 0, {}), ()))
        for one in happened:
            if not isinstance(one, Handed):
                yield one
                continue
            name, after = f"gradient of {action.gradients[one.gradient].name}", taken[one.gradient]
            yield after.top - before.held, name
            following = action.gradients[one.gradient + 1 : one.gradient + 2]
            if not (following and following[0].at_once):
                yield after.held - before.held, name
        if played.flushed is not None and number == played.replayed - 1 and kind == [*played.actions][-1]:
            yield played.flushed.top - before.held, "gradients under way"
            yield played.flushed.held - before.held, "sums of gradients"

    def _up_to(self, peak: float, first: int, elsewhere: float, stage: int) -> None:
        """Add where most is alive since a change what the peak has more. elsewhere: bytes that do not count in it."""
        changes = self.life.changes
        alive = self.life.alive - sum(change.nbytes for change in changes[first:])
        most, place = alive, first
        for i in range(first, len(changes)):
            alive += changes[i].nbytes
            if alive > most:
                most, place = alive, i + 1
        if (more := round(peak - (most - elsewhere))) > 0:
            tail = changes[place:]
            del changes[place:]
            self.life.for_a_moment(more, "for a moment", stage=stage)
            changes += tail

    def end(self, group: Sequence[int], memories: Sequence[StageMemory]) -> None:
        """The end of the step: gradients are finished, parameters updated, and what the step gives is put together."""
        life = self.life
        while self.under_way:
            life.free(self.under_way.popleft())
        sums = {s: float(store.level) for s, store in self.stores.items()}
        summed, copied = sum(sums.values()), sum(memories[s].copied for s in group)
        last, busiest = max((memories[s].step + summed - sums[s] + copied - memories[s].copied, s) for s in group)
        life.for_a_moment(last - summed, "gradients finished, parameters updated", stage=busiest)
        gathered, ended = sum(one.gathered for one in memories), sum(memories[s].ended for s in group)
        if gathered:
            life.for_a_moment(ended + gathered - summed, "outputs put together", stage=group[0])
        for store in self.stores.values():
            store.to(0, "")


def _said(line: Line | None) -> tuple[str, str]:
    """The name of what a line makes, and its source."""
    if line is None:
        return "received", ""
    made = ", ".join(name for name in line.outs if name != "_")
    return (f"{made} = {label(line)}" if made else label(line)), line.source
