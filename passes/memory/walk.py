"""One microbatch of a stage, played: what its actions hold and need, and when its gradients go to the store.

The stage's forward, backward and weights are walked line by line over one machine, calls as tapes. Parameters, buffers
and the batch are there all the time and cost nothing here; what forward returns for backward is all that lives between
the actions. The result is the same for every microbatch; what the gradient store makes of it is not (peak.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.ir import lines as ir
from autopar.ir.fusion import fuse_bias
from autopar.ir.lines import Function, GatherKey, Line, Ref, Stored
from autopar.ir.lowered import BoundaryEnd, LoweredStage, LoweredTemplate
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.memory.probe import GatheredShard, Probe, local
from autopar.passes.memory.recorder import Handed, Recorded, Recorder
from autopar.passes.memory.tape import NOTHING, LiveValue, Machine, Tape, dropped_after, play, tape
from autopar.passes.played.tensors import Layout

Binding = LiveValue | list[LiveValue]
"""The value that a local name of a stage's function stands for, or a list of saved ones."""


@dataclass(frozen=True)
class HandedGradient:
    """A gradient goes to the store: the most alive since the one before it, what is alive without it, and how it lies.
    owned: nobody else holds it; parked: bytes that the microbatch has in tiers then; storage: the one it lies in, and its
    bytes (None: what rests); held: whether `alive` has these, as somebody else holds it; at_once: no line ran since the one
    before; call: number of the one that ran last when most was alive (None: of no call)."""

    top: int
    alive: int
    name: str
    layout: Layout
    owned: bool
    parked: dict[str, int] = field(default_factory=dict)
    storage: tuple[int, int] | None = field(default=None, compare=False)
    held: bool = field(default=False, compare=False)
    at_once: bool = field(default=False, compare=False)
    call: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ActionBytes:
    """An action of a microbatch: the gradients it hands to the store, the most alive after them, what is alive at its end;
    without what is received and sent. received: bytes that arrive for it, sent: bytes that leave after it. given: bytes of
    outputs that stay from it until the step is over, which are in no number of a later action, nor at its own end. parked: bytes
    in tiers at its end, by tier. call: as of `HandedGradient`."""

    gradients: tuple[HandedGradient, ...]
    top: int
    end: int
    received: int
    sent: int
    parked: dict[str, int] = field(default_factory=dict)
    given: int = 0
    call: int | None = field(default=None, compare=False)

    @property
    def peak(self) -> int:
        return max([self.top, *(gradient.top for gradient in self.gradients)])


def action_bytes(stage: LoweredStage, probe: Probe | None = None) -> dict[str, ActionBytes]:
    """A microbatch's F, B and W, each on top of what the same microbatch holds before it. probe: of the stage's mesh, by default
    one for a CPU."""
    walk = _Walk(stage, probe or Probe(stage.mesh))
    return {
        action: walk.run(function, action)
        for action, function in zip("FBW", (stage.forward, stage.backward, stage.weights), strict=True)
        if function is not None
    }


def recorded_actions(stage: LoweredStage, probe: Probe) -> dict[str, tuple[ActionBytes, list[Recorded]]]:
    """The same with all that happens to storages while each is played."""
    recorder = Recorder()
    walk, actions = _RecordedWalk(stage, probe, recorder), dict[str, tuple[ActionBytes, list[Recorded]]]()
    for action, function in zip("FBW", (stage.forward, stage.backward, stage.weights), strict=True):
        if function is not None:
            recorder.happened = []
            actions[action] = walk.run(function, action), recorder.happened
    return actions


def kept_by_call(
    stage: LoweredStage, probe: Probe | None = None, after: str = "F"
) -> tuple[Machine, dict[int, list[LiveValue]]]:
    """The machine at the end of a microbatch's F, and the values on it that each call keeps for its backward, by its number.
    after: "B" for the end of its B, and what each keeps for the gradients of weights."""
    walk = _Walk(stage, probe or Probe(stage.mesh))
    walk.run(stage.forward, "F")
    calls = [line for line in stage.forward.lines if isinstance(line, ir.CallForward) and line.keeps]
    names = {line.number: line.outs[-1] for line in calls}
    if after == "B":
        assert stage.backward is not None
        walk.run(stage.backward, "B")
        backward = [line for line in stage.backward.lines if isinstance(line, ir.CallBackward) and line.outs]
        names = {line.number: line.outs[-1] for line in backward if stage.templates[line.template].later}
    lists = {number: walk.kept.get(name, []) for number, name in names.items()}
    return walk.machine, {number: kept for number, kept in lists.items() if isinstance(kept, list)}


def held_by_call(stage: LoweredStage, probe: Probe | None = None, after: str = "F") -> dict[int, int]:
    """Bytes of the device that each call of a stage keeps of a microbatch for its backward, by its number. A storage that several
    calls keep counts with the first; all together they are what is alive at the end of F. after: as of `kept_by_call`."""
    machine, kept = kept_by_call(stage, probe, after)
    counted = {NOTHING.block, *machine.tier}
    held: dict[int, int] = {}
    for number, values in kept.items():
        own = {value.block for value in values} - counted
        held[number] = sum(machine.size[block] for block in own)
        counted |= own
    return held


class _Walk:
    """The machine, what local names stand for, and what one action leaves for the next (`kept`)."""

    def __init__(self, stage: LoweredStage, probe: Probe, machine: Machine | None = None) -> None:
        self.stage, self.probe = stage, probe
        self.machine = machine or Machine()
        self.names: dict[str, Binding] = {}
        self.layouts: dict[str, Layout | None] = {}
        self.blocks: dict[tuple[TensorType, Spec], Layout] = {}
        self.started: dict[GatherKey, tuple[int, tuple[GatheredShard, ...]]] = {}
        self.gradients: list[HandedGradient] = []
        self.kept: dict[str, Binding] = {}
        self.given = 0
        self.running: int | None = None
        self.top_call: int | None = None
        self.extras = {row.name for row in stage.outputs if row.extra}

    def run(self, function: Function, action: str) -> ActionBytes:
        """Play one of the stage's functions."""
        stage, machine = self.stage, self.machine
        self.names, self.gradients = {}, []
        ends = {"F": stage.received, "B": stage.gradients_received}.get(action, ())
        received = self._bind_arguments(function, ends)
        machine.top = machine.alive
        self.running = self.top_call = None
        returned, handed = {n for n in function.returns if n}, False
        for line, dropped in zip(function.lines, dropped_after(function, returned), strict=True):
            machine.line = line
            if isinstance(line, ir.AddGradient):
                self._hand_over(line, dropped, handed)
            else:
                top = machine.top
                self._line(line)
                self._drop(dropped)
                if machine.top > top:
                    self.top_call = self.running
            handed = isinstance(line, ir.AddGradient)
        state = set(stage.state if action == "F" else stage.later if action == "B" else ())
        top, leaving = machine.top, {n: self.names[n] for n in returned if n in self.names}
        self.kept |= {n: v for n, v in leaving.items() if n in state}
        self._drop([n for n in self.names if n not in leaving])
        before, known = machine.alive, self.given
        for name, value in leaving.items():
            if name not in state and not (action == "F" and name in self.extras):
                self._release(value)
        sent = before - machine.alive
        if action == "F" and self.extras:
            for name in self.extras & state:
                self._hold(leaving[name])
            self.given = self._bytes_of([leaving[name] for name in self.extras])
        gradients = tuple(self.gradients)
        if known:
            gradients = tuple(replace(g, top=g.top - known, alive=g.alive - known) for g in gradients)
        end, given = machine.alive - self.given, self.given - known
        return ActionBytes(gradients, top - known, end, received, sent, dict(machine.parked), given, self.top_call)

    def _bytes_of(self, values: Sequence[Binding]) -> int:
        """Bytes of the device in the storages of single values."""
        blocks = {value.block for value in values if isinstance(value, LiveValue)} - {NOTHING.block, *self.machine.tier}
        return sum(self.machine.size[block] for block in blocks)

    def _bind_arguments(self, function: Function, ends: Sequence[BoundaryEnd]) -> int:
        """Bytes of the arguments that arrive from other stages. Inputs of the batch are there anyway."""
        received = 0
        free = {row.name for row in self.stage.inputs}
        arrive = {end.name for end in ends}
        for name in function.args:
            if name in self.kept:
                self._bind(name, self.kept.pop(name))
                continue
            type_, spec = function.arg_types[name]
            layout = self._local(type_, spec)
            block = -1 if name in free else self.machine.new(layout.nbytes)
            self.machine.hold(block)
            received += 0 if name in free or name not in arrive else layout.nbytes
            self._bind(name, LiveValue(block, layout))
        return received

    # ---- lines

    def _line(self, line: Line) -> None:
        match line:
            case ir.CallForward() | ir.CallBackward() | ir.CallWeights():
                self._call(line)
            case ir.Prefetch():
                self._prefetch(line)
            case ir.TakeParameters():
                self._take(line)
            case ir.ParkSaved(saved, places, tier):
                self._park(self._list(saved), places, tier)
            case ir.FetchSaved(saved):
                self._fetch(self._list(saved))
            case ir.AwaitSaved() | ir.WriteBuffer():
                pass
            case ir.ReadBuffer():
                self._bind(line.outs[0], LiveValue(-1, self._layout(line)))
            case ir.SumLoss(value):
                self._bind(line.outs[0], self.names[value])
                self._hold(self.names[line.outs[0]])
            case ir.SeedGradient() | ir.ZeroGradient():
                layout = self._layout(line)
                block = self.machine.new(layout.nbytes)
                self.machine.hold(block)
                self.machine.peak(0)
                self._bind(line.outs[0], LiveValue(block, layout))
            case ir.Compute() | ir.Convert():
                names, effect = self.probe.effect(line, self.layouts)
                results = self.machine.bind(effect, [self._one(n).block for n in names])
                for name, result in zip(line.outs, results, strict=False):
                    self._bind(name, result)
            case _:
                raise TypeError(f"the memory of a {type(line).__name__} is not known")

    def _layout(self, line: Line) -> Layout:
        """The layout of a line's only result."""
        ((_, type_, spec),) = line.made()
        assert type_ is not None
        assert spec is not None
        return self._local(type_, spec)

    def _local(self, type_: TensorType, spec: Spec) -> Layout:
        """The layout of a rank's block, which is found once for all values of a type and spec."""
        layout = self.blocks.get((type_, spec))
        if layout is None:
            layout = self.blocks[type_, spec] = local(type_, spec, self.stage.mesh)
        return layout

    def _call(self, line: ir.CallForward | ir.CallBackward | ir.CallWeights) -> None:
        """Play a template's function; the list that it leaves, if it leaves one, is the last of what it makes."""
        template = self.stage.templates[line.template]
        self.running = line.number
        match line:
            case ir.CallForward(params=params, inputs=inputs):
                arguments = [*map(self._param, params), *map(self._one, inputs)]
                listed, leaves = template.saved, template.backward is not None
                results = self._play(template, line.action, [], arguments)
            case ir.CallBackward(saved=saved, params=params, tangents=tangents):
                arguments = [*map(self._param, params), *map(self._one, tangents)]
                listed, leaves = template.later, bool(template.later)
                results = self._play(template, line.action, self._list(saved), arguments)
            case ir.CallWeights(later=later):
                listed, leaves = (), False
                results = self._play(template, line.action, self._list(later), [])
        count = len(results) - len(listed)
        bindings: list[Binding] = [*results[:count]]
        if leaves:
            bindings.append(results[count:])
        outs = [*line.outs, "_"] if leaves and len(line.outs) == count else line.outs
        for name, binding in zip(outs, bindings, strict=False):
            self._bind(name, binding)

    def _play(
        self, template: LoweredTemplate, action: str, listed: list[LiveValue], arguments: list[LiveValue]
    ) -> list[LiveValue]:
        """The values that a template's function returns; it takes its first values out of a list, which then holds them
        no longer."""
        taken = list(listed)
        listed.clear()
        ordered = [*taken, *arguments]
        layouts = tuple(value.layout for value in ordered)
        played = self.probe.memo[_taped](template, action, layouts, self.probe)
        return play(self.machine, played, [value.block for value in ordered], [value.block for value in taken])

    def _prefetch(self, line: ir.Prefetch) -> None:
        stage = self.stage
        shards = tuple(GatheredShard.of(gather, stage.parameters[gather.name], self._local) for gather in line.gathers)
        gathered = self.probe.gathered(shards)
        self.machine.peak(gathered.starting_peak)
        block = self.machine.new(gathered.started)
        self.machine.hold(block)
        self.started[line.key] = (block, shards)

    def _take(self, line: ir.TakeParameters) -> None:
        block, shards = self.started.pop(line.key)
        gathered = self.probe.gathered(shards)
        self.machine.peak(gathered.ending_peak - gathered.started)
        self.machine.drop(block)
        effect = replace(gathered.effect, peak=sum(gathered.effect.fresh))
        results = self.machine.bind(effect, [-1] * len(shards))
        for name, value in zip(line.outs, results, strict=True):
            self._bind(name, value)

    def _hand_over(self, line: ir.AddGradient, dropped: tuple[str, ...], at_once: bool) -> None:
        value, top = self._one(line.value), self.machine.top
        layout = value.layout
        self._drop(dropped)
        assert layout is not None, line
        alive, parked = self.machine.alive, dict(self.machine.parked)
        storage = (value.block, self.machine.size[value.block]) if value.block >= 0 else None
        held = storage is not None and self.machine.refs[value.block] > 0
        self.gradients.append(
            HandedGradient(
                top, alive, line.parameter, layout, line.owned, parked, storage, held, at_once, self.top_call
            )
        )
        self.machine.top = alive

    def _park(self, saved: list[LiveValue], places: Sequence[int], tier: str) -> None:
        """Saved values move to a tier, storage by storage; what rests anyway (block -1) stays."""
        machine = self.machine
        moved: dict[int, int] = {}
        for place in places:
            block = saved[place].block
            if block >= 0:
                if block not in moved:
                    moved[block] = machine.park(machine.size[block], tier)
                    machine.peak(0)
                self._replace(saved, place, moved[block])

    def _fetch(self, saved: list[LiveValue]) -> None:
        """Saved values that are in a tier come back, storage by storage."""
        machine = self.machine
        moved: dict[int, int] = {}
        for place, value in enumerate(saved):
            if value.block in machine.tier:
                if value.block not in moved:
                    moved[value.block] = machine.new(machine.size[value.block])
                    machine.peak(0)
                self._replace(saved, place, moved[value.block])

    def _replace(self, saved: list[LiveValue], place: int, block: int) -> None:
        """A value of a list lies in another storage from now on."""
        self.machine.hold(block)
        self.machine.drop(saved[place].block)
        saved[place] = replace(saved[place], block=block)

    # ---- names

    def _param(self, p: Ref | Stored) -> LiveValue:
        if isinstance(p, Ref):
            return self._one(p.name)
        stored = self.stage.parameters[p.name]
        layout = self._local(stored.type_of(p), stored.storage)
        return LiveValue(-1, replace(layout, in_room=True) if stored.room else layout)

    def _one(self, name: str) -> LiveValue:
        value = self.names.get(name, NOTHING)
        return value if isinstance(value, LiveValue) else NOTHING

    def _list(self, name: str) -> list[LiveValue]:
        values = self.names[name]
        assert isinstance(values, list)
        return values

    def _bind(self, name: str, value: Binding) -> None:
        """A name takes over a value that is held for it."""
        if name in self.names:
            self._release(self.names[name])
        self.names[name] = value
        self.layouts[name] = value.layout if isinstance(value, LiveValue) else None

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.names:
                self._release(self.names.pop(name))

    def _hold(self, value: Binding) -> None:
        for one in value if isinstance(value, list) else [value]:
            self.machine.hold(one.block)

    def _release(self, value: Binding) -> None:
        for one in value if isinstance(value, list) else [value]:
            self.machine.drop(one.block)


class _RecordedWalk(_Walk):
    """The same, noting when gradients go to the store."""

    def _hand_over(self, line: ir.AddGradient, dropped: tuple[str, ...], at_once: bool) -> None:
        super()._hand_over(line, dropped, at_once)
        assert isinstance(self.machine, Recorder)
        self.machine.happened.append(Handed(len(self.gradients) - 1))


def _taped(template: LoweredTemplate, action: str, layouts: tuple[Layout | None, ...], probe: Probe) -> Tape:
    """The tape of a template's function for an action. layouts: of the values that it takes out of a list, then of its
    arguments."""
    returned: list[str | None]
    match action:
        case "F":
            function = fuse_bias(template.forward, template.saved)
            returned = [*filter(None, function.returns), *template.saved]
        case "B":
            assert template.backward is not None
            function = replace(template.backward, args=(*template.saved, *template.backward.args))
            returned = [*function.returns, *template.later]
        case _:
            assert template.weights is not None
            function, returned = template.weights, [*template.weights.returns]
    return tape(function, returned, layouts, probe)
