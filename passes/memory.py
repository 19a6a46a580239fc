"""Bytes alive in a lowered program at every point of its schedule.

Counted by walking the lines as they run: a value lives from its line to its last use, what forward keeps for backward
lives in between; a template call adds the largest moment inside it; parameters, gradients and optimizer state rest all
the time. Between its actions a stage holds what its microbatches in flight keep, so the peak of a group of ranks is the
largest, over its row of the action table, of what is held then and what the action needs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.lowered import Function, Line, LoweredProgram, LoweredStage, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import find
from autopar.passes.shard.problem import Setting


@dataclass(frozen=True)
class Moment:
    """What an action does to a stage's bytes: the most it needs while it runs, and what it leaves behind.

    `peak` counts what the same microbatch held before; `after` is what that microbatch holds afterwards.
    """

    peak: float
    after: float


@dataclass(frozen=True)
class StageMemory:
    """resting: bytes by kind that are always there. actions: per kind of action."""

    resting: dict[str, float]
    actions: dict[str, Moment]

    @property
    def resting_bytes(self) -> float:
        return sum(self.resting.values())


def stage_memory(stage: LoweredStage, setting: Setting) -> StageMemory:
    """Bytes of a stage on one of its ranks."""
    return StageMemory(_resting(stage, setting), _actions(stage))


def group_peaks(lowered: LoweredProgram, stages: list[StageMemory]) -> tuple[float, ...]:
    """Largest bytes on a rank of every group over a step."""
    peaks = []
    for group, row in zip(lowered.graph.groups, lowered.table, strict=True):
        resting = sum(stages[s].resting_bytes for s in group)
        held: dict[tuple[int, int], float] = {}
        worst = 0.0
        for action in row:
            key = (action.stage, action.microbatch)
            moment = stages[action.stage].actions[action.kind]
            worst = max(worst, sum(held.values()) - held.get(key, 0.0) + moment.peak)
            held[key] = moment.after
        peaks.append(resting + worst)
    return tuple(peaks)


def _resting(stage: LoweredStage, setting: Setting) -> dict[str, float]:
    mesh = stage.mesh
    parameters = gradients = optimizer = 0.0
    for p in stage.parameters.values():
        parameters += p.storage.local_bytes(p.type, mesh)
        if p.contributions and stage.training:
            shard = p.optimizer.local_bytes(p.type, mesh)
            gradients += shard
            if p.owned:
                each = max(setting.state_bytes, p.type.dtype.itemsize)
                optimizer += shard / p.type.dtype.itemsize * setting.state_ratio * each
    buffers = float(sum(t.nbytes for t in stage.buffers.values()))
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "buffers": buffers}


def value_bytes(type_: TensorType | None, spec: Spec | None, mesh: Mesh) -> float:
    """Bytes of a value on one rank."""
    return 0.0 if type_ is None or spec is None else float(spec.local_bytes(type_, mesh))


def _is_view(line: Line) -> bool:
    if line.op.startswith("comm."):
        return line.op == "comm.slice"
    definition = (
        find(line.op) if "." in line.op and not line.op.startswith(("call.", "params.", "grads.", "buffer.")) else None
    )
    return definition is not None and definition.free


@dataclass(frozen=True)
class _Inside:
    """What a function holds: `peak` bytes made inside, and where what it saves lies.

    kept: bytes of it by name, outputs apart. pinned: saved name -> the argument whose memory it shows. returned: saved
    name -> place among the results. root: name -> the one whose memory it shows.
    """

    peak: float
    root: dict[str, str]
    kept: dict[str, float]
    pinned: dict[str, str]
    returned: dict[str, int]

    @property
    def kept_bytes(self) -> float:
        return sum(self.kept.values())


@dataclass(frozen=True)
class _List:
    """A list that an action leaves for the next: bytes of its own, and the values of the stage that it keeps alive.

    taken: of its own bytes those that are handed on from the list `before`.
    """

    nbytes: float
    names: frozenset[str]
    before: str = ""
    taken: float = 0.0


def _roots(lines: tuple[Line, ...], args: tuple[str, ...]) -> dict[str, str]:
    """The value whose memory a name shows: itself, or what it is a view of."""
    root = {a: a for a in args}
    for line in lines:
        source = next(iter(line.reads()), None)
        for out in line.outs:
            root[out] = root.get(source, out) if source is not None and _is_view(line) else out
    return root


def inside(function: Function, mesh: Mesh, saved: tuple[str, ...] = ()) -> _Inside:
    """Bytes inside a template's function."""
    root = _roots(function.lines, (*function.args, *function.arg_types))
    outputs = {root.get(n, n) for n in function.returns if n}
    held = {root.get(n, n) for n in saved}
    last: dict[str, int] = {}
    for i, line in enumerate(function.lines):
        for name in (*line.reads(), *line.outs):
            last[root.get(name, name)] = i
    size: dict[str, float] = {}
    alive = peak = unread = 0.0
    for i, line in enumerate(function.lines):
        for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
            if name == "_":
                unread += value_bytes(type_, spec, mesh)
            elif root[name] == name:
                size[name] = value_bytes(type_, spec, mesh)
                alive += size[name]
        peak, unread = max(peak, alive + unread), 0.0
        for name in {root.get(n, n) for n in (*line.reads(), *line.outs)}:
            if last[name] == i and name not in outputs and name not in held and name in size:
                alive -= size.pop(name)
    kept = {n: v for n, v in size.items() if n in held and n not in outputs}
    given = {*function.args, *function.arg_types}
    results = [root.get(n, n) if n else "" for n in function.returns]
    return _Inside(
        peak, root, kept, {n: root.get(n, n) for n in saved if root.get(n, n) in given},
        {n: results.index(root.get(n, n)) for n in saved if root.get(n, n) in results and root.get(n, n) not in given},
    )  # fmt: skip


def _actions(stage: LoweredStage) -> dict[str, Moment]:
    """Walk forward, backward and weights of one microbatch in a row; what is alive between them is what is held."""
    mesh = stage.mesh
    forward = {n: inside(t.forward, mesh, t.saved) for n, t in stage.templates.items()}
    back = {n: inside(t.backward, mesh, t.later) for n, t in stage.templates.items() if t.backward is not None}
    weights = {n: inside(t.weights, mesh) for n, t in stage.templates.items() if t.weights is not None}
    functions = [f for f in (stage.forward, stage.backward, stage.weights) if f is not None]
    lines = tuple(line for f in functions for line in f.lines)
    root = _roots(lines, tuple(a for f in functions for a in f.arg_types))
    uses = [{root.get(n, n) for n in (*line.reads(), *line.outs)} for line in lines]
    lists = _lists(stage, forward, back, root)
    for i, line in enumerate(lines):
        for name in line.reads():
            uses[i] |= lists[name].names if name in lists else frozenset()
    last = {name: i for i, names in enumerate(uses) for name in names}
    size: dict[str, float] = {}
    alive, start, found = 0.0, 0, {}
    for kind, function in zip("FBW", functions, strict=False):
        for name, held in function.arg_types.items():
            size[name] = value_bytes(*held, mesh)
            alive += size[name]
        peak = alive
        leaving = {root.get(n, n) for n in function.returns if n} - set(stage.state) - set(stage.later)
        for i, line in enumerate(function.lines, start):
            table = {"call.forward": forward, "call.backward": back, "call.weights": weights}.get(line.op)
            moment = table[line.args[0]] if table is not None else None
            if moment is not None:
                peak = max(peak, alive + moment.peak)
            for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
                if root[name] != name or line.op == "buffer.read" or name == "_":
                    continue
                size[name] = lists[name].nbytes if name in lists else value_bytes(type_, spec, mesh)
                alive += size[name]
                if name in lists and lists[name].before:
                    size[lists[name].before] -= lists[name].taken
                    alive -= lists[name].taken
            peak = max(peak, alive)
            for name in uses[i]:
                if last[name] == i and name in size and name not in leaving:
                    alive -= size.pop(name)
        start += len(function.lines)
        for name in (*leaving, *function.arg_types):
            if last.get(name, -1) < start and name in size:
                alive -= size.pop(name)
        found[kind] = Moment(peak, alive)
    return found


def _lists(
    stage: LoweredStage, forward: dict[str, _Inside], back: dict[str, _Inside], root: dict[str, str]
) -> dict[str, _List]:
    """What forward leaves for backward and, where they are apart, backward for weights, by the name of the list."""
    found: dict[str, _List] = {}
    where: dict[str, dict[str, str]] = {}  # list -> saved name -> value of the stage
    for line in stage.forward.lines:
        if line.op == "call.forward" and line.kwargs["keep"]:
            template, held = stage.templates[line.args[0]], forward[line.args[0]]
            refs = zip(template.forward.args, (*line.args[2], *line.args[3]), strict=True)
            given = {a: root.get(r.name, r.name) for a, r in refs if isinstance(r, Ref)}
            shown = {n: given[a] for n, a in held.pinned.items() if a in given}
            shown |= {n: line.outs[k] for n, k in held.returned.items()}
            found[line.outs[-1]] = _List(held.kept_bytes, frozenset(shown.values()))
            where[line.outs[-1]] = shown
    for line in stage.backward.lines if stage.backward is not None and stage.weights is not None else ():
        if line.op == "call.backward" and line.outs and line.outs[-1] in stage.later:
            template, held = stage.templates[line.args[0]], back[line.args[0]]
            assert template.backward is not None
            before, saved = forward[line.args[0]], line.args[2].name
            refs = zip(template.backward.args, (*line.args[3], *line.args[4]), strict=True)
            given = {a: root.get(r.name, r.name) for a, r in refs if isinstance(r, Ref)} | where[saved]
            source = {n: held.pinned.get(n, n) for n in template.later}
            names = {given[a] for a in source.values() if a in given}
            names |= {line.outs[k] for k in held.returned.values() if line.outs[k] != "_"}
            still = {before.root.get(a, a) for a in source.values()}
            own = sum(v for n, v in before.kept.items() if n in still)
            found[line.outs[-1]] = _List(held.kept_bytes + own, frozenset(names), saved, own)
    return found


def pinned_values(stage: LoweredStage) -> dict[str, frozenset[str]]:
    """Per list of saved values the values of the stage that it keeps alive."""
    forward = {n: inside(t.forward, stage.mesh, t.saved) for n, t in stage.templates.items()}
    back = {n: inside(t.backward, stage.mesh, t.later) for n, t in stage.templates.items() if t.backward is not None}
    made = _lists(stage, forward, back, _roots(stage.forward.lines, stage.forward.args))
    return {name: held.names for name, held in made.items()}
