"""Bytes of a pipeline by brute force: every group's actions run line by line, and after each line all that a name, a
list or a caller still reaches is added up. No liveness is computed ahead but "is the name read further down?"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.ir.lowered import Function, Line, LoweredProgram, LoweredStage, Ref
from autopar.ops.registry import find
from autopar.passes.memory import StageMemory

Frame = dict[str, Any]
UNREAD = "_ result "


@dataclass(eq=False)
class Storage:
    """The bytes behind one or several names."""

    nbytes: float


def reach(value: Any, found: set[Storage]) -> None:
    if isinstance(value, Storage):
        found.add(value)
    elif isinstance(value, dict):
        for v in value.values():
            reach(v, found)
    elif isinstance(value, (list, tuple)):
        for v in value:
            reach(v, found)


def peaks_by_reachability(lowered: LoweredProgram, stages: list[StageMemory]) -> list[float]:
    """Largest bytes per group over a step."""
    found = []
    for group, row in zip(lowered.graph.groups, lowered.table, strict=True):
        walk = _Walk(lowered)
        for action in row:
            walk.action(action.kind, action.microbatch, lowered.stages[action.stage])
        found.append(walk.peak + sum(stages[s].resting_bytes for s in group))
    return found


class _Walk:
    """One group: what waits between its actions, the frames of the functions that run now, and the most so far."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self.lowered = lowered
        self.waiting: dict[tuple[int, int], Frame] = {}
        self.frames: list[Frame] = []
        self.peak = 0.0

    def measure(self) -> None:
        found: set[Storage] = set()
        reach(self.waiting, found)
        reach(self.frames, found)
        self.peak = max(self.peak, sum(s.nbytes for s in found))

    def action(self, kind: str, microbatch: int, stage: LoweredStage) -> None:
        function = {"F": stage.forward, "B": stage.backward, "W": stage.weights}[kind]
        assert function is not None
        frame = self.waiting.pop((stage.index, microbatch), {})
        for name, (type_, spec) in function.arg_types.items():
            frame[name] = Storage(float(spec.local_bytes(type_, stage.mesh)))
        keep = {"F": stage.state, "B": stage.later, "W": ()}[kind]
        self.run(function, frame, stage, keep)
        left = {name: frame[name] for name in keep}
        if left:
            self.waiting[stage.index, microbatch] = left

    def run(self, function: Function, frame: Frame, stage: LoweredStage, keep: Any = ()) -> None:
        """Lines in order; a name goes when no later line and no result reads it."""
        self.frames.append(frame)
        self.measure()
        results = {n for n in (*function.returns, *keep) if n}
        last = {name: i for i, line in enumerate(function.lines) for name in (*line.reads(), *line.outs)}
        for i, line in enumerate(function.lines):
            self.line(line, frame, stage)
            self.measure()
            for name in list(frame):
                dead = last.get(name, len(function.lines)) <= i and name not in results
                if dead or name.startswith(UNREAD):
                    del frame[name]
        self.frames.pop()

    def line(self, line: Line, frame: Frame, stage: LoweredStage) -> None:
        if line.op.startswith("call."):
            self.call(line, frame, stage)
            return
        definition = find(line.op) if line.op.startswith(("aten.", "autopar.")) else None
        view = line.op == "comm.slice" or (definition is not None and definition.free)
        source = next(iter(line.reads()), None)
        for k, (name, type_, spec) in enumerate(zip(line.outs, line.types, line.specs, strict=False)):
            if line.op == "buffer.read":
                frame[name] = Storage(0.0)
            elif view and source is not None:
                frame[name] = frame[source]
            elif type_ is not None and spec is not None:
                frame[name if name != "_" else f"{UNREAD}{k}"] = Storage(float(spec.local_bytes(type_, stage.mesh)))

    def call(self, line: Line, frame: Frame, stage: LoweredStage) -> None:
        """The template's lines in a frame of their own, while the caller's names live on."""
        name, _, *rest = line.args
        template = stage.templates[name]
        outs = line.outs

        def value(ref: Any) -> Any:
            return frame[ref.name] if isinstance(ref, Ref) else Storage(0.0)

        if line.op == "call.forward":
            function, kept = template.forward, template.saved if line.kwargs["keep"] else ()
            inner = dict(zip(function.args, map(value, (*rest[0], *rest[1])), strict=True))
        elif line.op == "call.backward":
            assert template.backward is not None
            function, kept = template.backward, template.later
            inner = {**frame[rest[0].name], **dict(zip(function.args, map(value, (*rest[1], *rest[2])), strict=True))}
        else:
            assert template.weights is not None
            function, kept, inner = template.weights, (), dict(frame[rest[0].name])
        arguments = dict(inner)
        self.frames.append(arguments)
        self.run(function, inner, stage, kept)
        self.frames.pop()
        for out, returned in zip(outs, function.returns, strict=False):
            if returned is not None and out != "_":
                frame[out] = inner[returned]
        if len(outs) > len(function.returns):
            frame[outs[-1]] = {n: inner[n] for n in kept}
