"""One microbatch of a stage, played: what its actions hold and need, and when its gradients go to the store.

The stage's forward, backward and weights are walked line by line over one machine, calls as tapes. Parameters, buffers
and the batch are there all the time and cost nothing here; what forward returns for backward is all that lives between
the actions. The result is the same for every microbatch; what the gradient store makes of it is not (memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.codegen.printer import fuse_bias
from autopar.ir.lowered import Function, Line, LoweredStage, LoweredTemplate, Ref
from autopar.passes.memory.probe import Layout, gathers, local
from autopar.passes.memory.tape import NOTHING, Held, Machine, Tape, dropped_after, line_effect, play, tape


@dataclass(frozen=True)
class Given:
    """A gradient goes to the store: the most alive since the last one, what is alive without it, and its bytes."""

    before: int
    alive: int
    name: str
    nbytes: int
    owned: bool
    itemsize: int


@dataclass(frozen=True)
class Course:
    """An action of a microbatch: gradients given, the most alive after them, what is alive at its end; without what is
    received and sent. received: bytes that arrive for it, sent: bytes that leave after it. parked: bytes in tiers at its
    end, by tier."""

    given: tuple[Given, ...]
    after: int
    end: int
    received: int
    sent: int
    parked: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max([self.after, *(g.before for g in self.given)])


def courses(stage: LoweredStage) -> dict[str, Course]:
    """The courses of a microbatch's F, B and W, each on top of what the same microbatch holds before it."""
    walk = _Walk(stage)
    return {
        kind: walk.run(function, kind)
        for kind, function in zip("FBW", (stage.forward, stage.backward, stage.weights), strict=True)
        if function is not None
    }


class _Walk:
    def __init__(self, stage: LoweredStage) -> None:
        self.stage = stage
        self.machine = Machine()
        self.tapes: dict[Any, Tape] = {}
        self.forward = {n: fuse_bias(t.forward, t.saved) for n, t in stage.templates.items()}
        self.names: dict[str, Held | list[Held]] = {}
        self.layouts: dict[str, Layout | None] = {}
        self.started: dict[str, tuple[int, list[Layout], tuple[Any, ...]]] = {}
        self.given: list[Given] = []
        self.kept: dict[str, Held | list[Held]] = {}

    def run(self, function: Function, kind: str) -> Course:
        stage, machine = self.stage, self.machine
        ports = {"F": (stage.received, stage.sent), "B": (stage.gradients_received, stage.gradients_sent)}.get(
            kind, ((), ())
        )
        self.names, self.given = {}, []
        received = 0
        free = {row.name for row in stage.inputs}
        arrive = {port.name for port in ports[0]}
        for name in function.args:
            if name in self.kept:
                self._bind(name, self.kept.pop(name))
                continue
            type_, spec = function.arg_types[name]
            layout = local(type_, spec, stage.mesh)
            block = -1 if name in free else machine.new(layout.nbytes)
            machine.hold(block)
            received += 0 if name in free or name not in arrive else layout.nbytes
            self._bind(name, Held(block, layout))
        machine.top = machine.alive
        returned = {n for n in function.returns if n}
        for line, gone in zip(function.lines, dropped_after(function, returned), strict=True):
            if line.op == "grads.add":
                self._give(line, gone)
            else:
                self._line(line)
                self._drop(gone)
        states = set(stage.state if kind == "F" else stage.later if kind == "B" else ())
        top, leaving = machine.top, {n: self.names[n] for n in returned if n in self.names}
        self.kept |= {n: v for n, v in leaving.items() if n in states}
        self._drop([n for n in self.names if n not in leaving])
        before = machine.alive
        for name, value in leaving.items():
            if name not in states:
                self._release(value)
        sent = before - machine.alive
        return Course(tuple(self.given), top, machine.alive, received, sent, dict(machine.parked))

    # ---- lines

    def _line(self, line: Line) -> None:
        op = line.op
        if op.startswith("call."):
            self._call(line)
        elif op == "params.prefetch":
            self._prefetch(line)
        elif op.startswith("tier."):
            self._tier(line)
        elif op == "params.take":
            self._take(line)
        elif op == "buffer.read":
            type_, spec = line.types[0], line.specs[0]
            self._bind(line.outs[0], Held(-1, local(type_, spec, self.stage.mesh) if type_ and spec else None))
        elif op == "buffer.write":
            return
        elif op == "grads.sum":
            self._bind(line.outs[0], self.names[line.args[0].name])
            self._hold(self.names[line.outs[0]])
        elif op in ("grads.seed", "grads.zero"):
            type_ = line.args[0]
            layout = (
                local(type_, line.args[1], self.stage.mesh)
                if op == "grads.zero"
                else Layout.dense(type_.shape, type_.dtype)
            )
            block = self.machine.new(layout.nbytes)
            self.machine.hold(block)
            self.machine.peak(0)
            self._bind(line.outs[0], Held(block, layout))
        else:
            names, found = line_effect(line, self.layouts, self.stage.mesh)
            made = self.machine.bind(found, [self._one(n).block for n in names])
            for name, held in zip(line.outs, made, strict=False):
                self._bind(name, held)

    def _call(self, line: Line) -> None:
        name, _, *rest = line.args
        template = self.stage.templates[name]
        if line.op == "call.forward":
            params, inputs = rest
            arguments = [
                *(self._param(p, template, i) for i, p in enumerate(params)),
                *(self._one(x.name) for x in inputs),
            ]
            saved = list(template.saved) if template.backward is not None else []
            function = self.forward[name]
            made = self._play(function, [*(n for n in function.returns if n), *saved], arguments)
            count = len(made) - len(saved)
            self._give_names(line, made[:count], made[count:] if template.backward is not None else None)
            return
        if line.op == "call.weights":
            assert template.weights is not None
            held = self._list(rest[0].name)
            made = self._consume(template.weights, list(template.weights.returns), held, [])
            self._give_names(line, made, None)
            return
        saved, params, tangents = rest
        assert template.backward is not None
        held = self._list(saved.name)
        arguments = [
            *(self._param(p, template, i) for i, p in enumerate(params)),
            *(self._one(t.name) for t in tangents),
        ]
        later = list(template.later)
        made = self._consume(template.backward, [*template.backward.returns, *later], held, arguments, template)
        count = len(made) - len(later)
        self._give_names(line, made[:count], made[count:] if later else None)

    def _consume(
        self,
        function: Function,
        returned: list[str | None],
        held: list[Held],
        arguments: list[Held],
        template: LoweredTemplate | None = None,
    ) -> list[Held]:
        """Play a function that takes its first values out of a list, which then holds them no longer."""
        if template is not None:
            function = replace(function, args=(*template.saved, *function.args))
        ordered = [*held, *arguments]
        key = (function.name, tuple(h.layout for h in ordered))
        made = self._tape(key, function, returned, ordered)
        taken = list(held)
        held.clear()
        return play(self.machine, made, [h.block for h in ordered], [h.block for h in taken])

    def _play(self, function: Function, returned: list[str | None], arguments: list[Held]) -> list[Held]:
        made = self._tape((function.name, tuple(h.layout for h in arguments)), function, returned, arguments)
        return play(self.machine, made, [h.block for h in arguments])

    def _tape(self, key: Any, function: Function, returned: Sequence[str | None], arguments: list[Held]) -> Tape:
        if key not in self.tapes:
            self.tapes[key] = tape(function, returned, [h.layout for h in arguments], self.stage.mesh)
        return self.tapes[key]

    def _give_names(self, line: Line, made: list[Held], listed: list[Held] | None) -> None:
        outs = list(line.outs)
        if listed is not None and len(outs) == len(made):
            outs.append("_")
        values: list[Held | list[Held]] = [*made] if listed is None else [*made, listed]
        for name, value in zip(outs, values, strict=False):
            self._bind(name, value)

    def _prefetch(self, line: Line) -> None:
        key, rows = line.args
        shards, steps = [], []
        for name, path, dtype in rows:
            p = self.stage.parameters[name]
            shards.append(local(p.type, p.storage, self.stage.mesh))
            steps.append((path, dtype, p.tier))
        started, most, _, _ = gathers(tuple(shards), tuple(steps), self.stage.mesh.axes)
        self.machine.peak(most)
        block = self.machine.new(started)
        self.machine.hold(block)
        self.started[key] = (block, shards, tuple(steps))

    def _take(self, line: Line) -> None:
        block, shards, steps = self.started.pop(line.args[0])
        started, _, ended, found = gathers(tuple(shards), steps, self.stage.mesh.axes)
        self.machine.peak(ended - started)
        self.machine.drop(block)
        made = self.machine.bind(replace(found, peak=sum(found.fresh)), [-1] * len(shards))
        for name, held in zip(line.outs, made, strict=True):
            self._bind(name, held)

    def _give(self, line: Line, gone: tuple[str, ...]) -> None:
        held = self._one(line.args[1].name)
        nbytes = held.layout.nbytes if held.layout is not None else 0
        before = self.machine.top
        self._drop(gone)
        itemsize = held.layout.dtype.itemsize if held.layout is not None else 0
        self.given.append(
            Given(before, self.machine.alive, line.args[0], nbytes, bool(line.kwargs.get("owned")), itemsize)
        )
        self.machine.top = self.machine.alive

    def _tier(self, line: Line) -> None:
        """Saved values move to a tier, or come back, storage by storage; what rests anyway (block -1) stays."""
        machine, held = self.machine, self._list(line.args[0].name)
        places = line.args[1] if line.op == "tier.park" else range(len(held)) if line.op == "tier.fetch" else ()
        moved: dict[int, int] = {}
        for place in places:
            block = held[place].block
            if block < 0 or (line.op == "tier.fetch" and block not in machine.tier):
                continue
            if block not in moved:
                size = machine.size[block]
                moved[block] = machine.park(size, line.args[2]) if line.op == "tier.park" else machine.new(size)
                machine.peak(0)
            machine.hold(moved[block])
            held[place] = replace(held[place], block=moved[block])
            machine.drop(block)

    # ---- names

    def _param(self, p: Ref | str, template: LoweredTemplate, place: int) -> Held:
        if isinstance(p, Ref):
            return self._one(p.name)
        stored = self.stage.parameters[p]
        return Held(-1, local(stored.type, stored.storage, self.stage.mesh))

    def _one(self, name: str) -> Held:
        held = self.names.get(name, NOTHING)
        return held if isinstance(held, Held) else NOTHING

    def _list(self, name: str) -> list[Held]:
        held = self.names[name]
        assert isinstance(held, list)
        return held

    def _bind(self, name: str, value: Held | list[Held]) -> None:
        """A name takes over a value that is held for it."""
        if name in self.names:
            self._release(self.names[name])
        self.names[name] = value
        self.layouts[name] = value.layout if isinstance(value, Held) else None

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.names:
                self._release(self.names.pop(name))

    def _hold(self, value: Held | list[Held]) -> None:
        for held in value if isinstance(value, list) else [value]:
            self.machine.hold(held.block)

    def _release(self, value: Held | list[Held]) -> None:
        for held in value if isinstance(value, list) else [value]:
            self.machine.drop(held.block)
