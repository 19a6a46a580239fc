"""A function's memory as a tape of events, and the machine that plays tapes.

Playing follows the emitted program: names hold storages, a storage lives as long as any name, list or caller holds it,
and names go where the printer puts a `del`. A template's function is taped once per layout of its arguments and played
for every call, so that what a call frees depends on what its caller still holds, as it does when it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from autopar.ir.lines import Function, GoOn, Line, Start, Wait
from autopar.passes.memory.probe import Probe
from autopar.passes.played.tensors import Effect, Layout


@dataclass(frozen=True)
class LiveValue:
    """A value at run time: its storage on the machine, and how it lies there."""

    block: int
    layout: Layout | None


NOTHING = LiveValue(-1, None)


class Machine:
    """Storages with their bytes and how many hold each. alive: bytes now; top: the most since it was set; parked: bytes
    now in memory tiers, by tier; tier: which storages are there; line: that is run now."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self.refs: list[int] = []
        self.alive = 0
        self.top = 0
        self.parked: dict[str, int] = {}
        self.tier: dict[int, str] = {}
        self.line: Line | None = None

    def new(self, nbytes: int) -> int:
        """A storage that nobody holds yet."""
        self.size.append(nbytes)
        self.refs.append(0)
        self.alive += nbytes
        return len(self.size) - 1

    def park(self, nbytes: int, tier: str) -> int:
        """A storage in a tier that nobody holds yet."""
        block = Machine.new(self, nbytes)
        self.alive -= nbytes
        self.parked[tier] = self.parked.get(tier, 0) + nbytes
        self.tier[block] = tier
        return block

    def hold(self, block: int) -> None:
        if block >= 0:
            self.refs[block] += 1

    def drop(self, block: int) -> None:
        if block >= 0:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if block in self.tier:
                    self.parked[self.tier[block]] -= self.size[block]
                else:
                    self.alive -= self.size[block]

    def peak(self, nbytes: int) -> None:
        """Note so many bytes beside what is alive, for a moment."""
        self.top = max(self.top, self.alive + nbytes)

    def bind(self, effect: Effect, operands: Sequence[int]) -> list[LiveValue]:
        """The results of a line, each held once."""
        self.peak(effect.peak)
        fresh = [self.new(n) for n in effect.fresh]
        results = []
        for out in effect.outs:
            block = operands[out.alias] if out.alias >= 0 else fresh[out.fresh] if out.fresh >= 0 else -1
            self.hold(block)
            results.append(LiveValue(block, out.layout))
        return results


@dataclass(frozen=True)
class Event:
    """A line: the most new bytes, fresh storages, outs as (slot, slot of the operand or -1, fresh), slots dropped after."""

    peak: int
    fresh: tuple[int, ...]
    outs: tuple[tuple[int, int, int], ...]
    dropped: tuple[int, ...]
    line: Line


@dataclass(frozen=True)
class Tape:
    """Events over slots, arguments first. returns: slots (-1: nothing); layouts of what is returned. effects: of the whole tape,
    by how the storages of its arguments are held."""

    slots: int
    events: tuple[Event, ...]
    returns: tuple[int, ...]
    layouts: tuple[Layout | None, ...]
    effects: dict[Hashable, TapeEffect] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class TapeEffect:
    """The effect of a tape as a whole: the most above what is alive before it (None: nothing is asked for), bytes that are alive
    more afterwards, the sizes of fresh storages among its results, and each result as its storage: of an argument by number,
    fresh ones after these (-1: none)."""

    peak: int | None
    grown: int
    fresh: tuple[int, ...]
    results: tuple[int, ...]


def dropped_after(function: Function, kept: set[str]) -> list[tuple[str, ...]]:
    """The names that the printer deletes after every line."""
    last: dict[str, int] = {}
    for i, line in enumerate(function.lines):
        for name in (*line.reads(), *line.outs):
            last[name] = i
    return [
        tuple(dict.fromkeys(n for n in (*line.reads(), *line.outs) if last[n] == i and n not in kept and n != "_"))
        for i, line in enumerate(function.lines)
    ]


def tape(function: Function, returned: Sequence[str | None], layouts: Sequence[Layout | None], probe: Probe) -> Tape:
    """The tape of a template's function; layouts: of its arguments, returned: names in the order they are given back."""
    slots = {name: i for i, name in enumerate(function.args)}
    layout_of: dict[str, Layout | None] = dict(zip(function.args, layouts, strict=True))
    drops = dropped_after(function, {n for n in returned if n})
    events = []
    for line, dropped in zip(function.lines, drops, strict=True):
        names, effect = probe.effect(line, layout_of)
        made = line.outs
        match line:
            case Start(outs=(handle,)):
                made = (handle, *(f"{handle} holds {name}" for name in names))
            case GoOn(handle):
                made = (handle,)
            case Wait(handle, started):
                dropped = (*dropped, *(f"{handle} holds {name}" for name in started.reads()))
        outs = []
        for name, out in zip(made, effect.outs, strict=False):
            slot = slots.setdefault(name, len(slots))
            layout_of[name] = out.layout
            outs.append((slot, slots[names[out.alias]] if out.alias >= 0 else -1, out.fresh))
        events.append(
            Event(effect.peak, effect.fresh, tuple(outs), tuple(slots[n] for n in dropped if n in slots), line)
        )
    ends = tuple(slots.get(n, -1) if n else -1 for n in returned)
    return Tape(len(slots), tuple(events), ends, tuple(layout_of.get(n) if n else None for n in returned))


def play(machine: Machine, played: Tape, arguments: Sequence[int], taken: Sequence[int] = ()) -> list[LiveValue]:
    """Run a tape over the caller's storages; what it returns is held for the caller. Arguments are held meanwhile.

    taken: what a list held for the caller and holds no longer once the function has its arguments. A tape does the same wherever
    the storages of its arguments are as large, shared alike, and held by others alike, so it is run once for all such calls.
    """
    if type(machine) is not Machine or machine.tier:
        return _run(machine, played, arguments, taken)
    number = {block: i for i, block in enumerate(dict.fromkeys(block for block in arguments if block >= 0))}
    blocks, places = list(number), tuple(number.get(block, -1) for block in arguments)
    times = Counter(number[block] for block in taken if block >= 0)
    storages = tuple((machine.size[b], times[i], machine.refs[b] > times[i]) for i, b in enumerate(blocks))
    key = places, storages
    effect = played.effects.get(key)
    if effect is None:
        effect = played.effects[key] = _effect(played, places, storages)
    if effect.peak is not None:
        machine.peak(effect.peak)
    alive = machine.alive + effect.grown
    blocks += [machine.new(nbytes) for nbytes in effect.fresh]
    machine.alive = alive
    values = []
    for place, layout in zip(effect.results, played.layouts, strict=True):
        block = blocks[place] if place >= 0 else -1
        machine.hold(block)
        values.append(LiveValue(block, layout))
    for place, count in times.items():
        machine.refs[blocks[place]] -= count
    return values


def _effect(played: Tape, places: Sequence[int], storages: Sequence[tuple[int, int, bool]]) -> TapeEffect:
    """The effect of a tape on arguments in these storages: each with its bytes, how often a list held it that holds it no
    longer, and whether others do."""
    machine = Machine()
    for nbytes, times, is_held in storages:
        machine.refs[machine.new(nbytes)] = times + is_held
    machine.top = -1
    before = machine.alive
    taken = [i for i, (_, times, _) in enumerate(storages) for _ in range(times)]
    values = _run(machine, played, places, taken)
    fresh = dict.fromkeys(value.block for value in values if value.block >= len(storages))
    number = {block: len(storages) + i for i, block in enumerate(fresh)}
    return TapeEffect(
        machine.top - before if machine.top >= 0 else None,
        machine.alive - before,
        tuple(machine.size[block] for block in fresh),
        tuple(number.get(value.block, value.block) for value in values),
    )


def _run(machine: Machine, played: Tape, arguments: Sequence[int], taken: Sequence[int]) -> list[LiveValue]:
    """The results of a tape, run event by event."""
    frame = [-1] * played.slots
    for i, block in enumerate(arguments):
        frame[i] = block
        machine.hold(block)
    for block in taken:
        machine.drop(block)
    for event in played.events:
        machine.line = event.line
        machine.peak(event.peak)
        fresh = [machine.new(n) for n in event.fresh]
        for slot, alias, number in event.outs:
            block = frame[alias] if alias >= 0 else fresh[number] if number >= 0 else -1
            machine.hold(block)
            machine.drop(frame[slot])
            frame[slot] = block
        for slot in event.dropped:
            machine.drop(frame[slot])
            frame[slot] = -1
    results = [
        LiveValue(frame[slot], layout) if slot >= 0 else NOTHING
        for slot, layout in zip(played.returns, played.layouts, strict=True)
    ]
    for value in results:
        machine.hold(value.block)
    for block in frame:
        machine.drop(block)
    return results
