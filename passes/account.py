"""What a lowered step costs beyond its ops: bytes alive at every line, and the collectives with their bytes.

Bytes are counted by walking the step as it runs: parameters, gradients and optimizer state rest all the time; values
live from their line to their last use; a template call adds the largest moment inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.ir.lowered import Function, Line, LoweredStage, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import find
from autopar.passes.costs import Pricer
from autopar.passes.shard.problem import Setting


@dataclass(frozen=True)
class Collective:
    """One kind of communication in the program: nbytes of one (full array), times per step, seconds in all."""

    kind: str
    axis: str
    what: str
    nbytes: float
    times: int
    time_s: float


@dataclass(frozen=True)
class Account:
    """Per rank and step."""

    peak_bytes: float
    resting_bytes: dict[str, float]
    comm_time_s: float
    collectives: tuple[Collective, ...]


def account(stage: LoweredStage, pricer: Pricer, program: Program, setting: Setting) -> Account:
    """Bytes and communication of a lowered stage."""
    resting = _resting(stage, setting)
    peak = sum(resting.values()) + _walk(stage)
    found = _collectives(stage, pricer, program)
    return Account(peak, resting, sum(c.time_s for c in found), tuple(found))


def _resting(stage: LoweredStage, setting: Setting) -> dict[str, float]:
    mesh = stage.mesh
    parameters = gradients = optimizer = 0.0
    for p in stage.parameters.values():
        parameters += p.storage.local_bytes(p.type, mesh)
        if p.contributions and stage.training:
            shard = p.optimizer.local_bytes(p.type, mesh)
            gradients += shard
            optimizer += (
                shard / p.type.dtype.itemsize * setting.state_ratio * max(setting.state_bytes, p.type.dtype.itemsize)
            )
    buffers = float(sum(t.nbytes for t in stage.buffers.values()))
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "buffers": buffers}


def _bytes(type_: TensorType | None, spec: Spec | None, mesh: Mesh) -> float:
    return 0.0 if type_ is None or spec is None else float(spec.local_bytes(type_, mesh))


def _is_view(line: Line) -> bool:
    if line.op.startswith("comm."):
        return line.op == "comm.slice"
    definition = (
        find(line.op) if "." in line.op and not line.op.startswith(("call.", "params.", "grads.", "buffer.")) else None
    )
    return definition is not None and definition.free


@dataclass(frozen=True)
class _Moment:
    """What a function holds: `peak` bytes made inside, `kept` bytes of what it saves, outputs apart, `pinned` args."""

    peak: float
    kept: float
    outputs: float
    pinned: frozenset[str]


def _roots(function: Function) -> dict[str, str]:
    """The value whose memory a name shows: itself, or what it is a view of."""
    root = {a: a for a in function.args}
    for line in function.lines:
        source = next(iter(line.reads()), None)
        for out in line.outs:
            root[out] = root.get(source, out) if source is not None and _is_view(line) else out
    return root


def _inside(function: Function, mesh: Mesh, saved: tuple[str, ...] = ()) -> _Moment:
    root = _roots(function)
    outputs = {root.get(n, n) for n in function.returns if n}
    held = {root.get(n, n) for n in saved}
    last: dict[str, int] = {}
    for i, line in enumerate(function.lines):
        for name in (*line.reads(), *line.outs):
            last[root.get(name, name)] = i
    size: dict[str, float] = {}
    alive = peak = 0.0
    for i, line in enumerate(function.lines):
        for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
            if root[name] == name:
                size[name] = _bytes(type_, spec, mesh)
                alive += size[name]
        peak = max(peak, alive)
        for name in {root.get(n, n) for n in (*line.reads(), *line.outs)}:
            if last[name] == i and name not in outputs and name not in held and name in size:
                alive -= size.pop(name)
    kept = sum(v for n, v in size.items() if n in held and n not in outputs)
    pinned = frozenset(a for a in function.args if a in held)
    return _Moment(peak, kept, sum(v for n, v in size.items() if n in outputs), pinned)


def _walk(stage: LoweredStage) -> float:
    """Largest bytes alive during the step beyond what rests."""
    mesh = stage.mesh
    forward = {n: _inside(t.forward, mesh, t.saved) for n, t in stage.templates.items()}
    back = {n: _inside(t.backward, mesh) for n, t in stage.templates.items() if t.backward is not None}
    lines = stage.step.lines
    root = _roots(stage.step)
    uses = [{root.get(n, n) for n in (*line.reads(), *line.outs)} for line in lines]
    pinned: dict[str, set[str]] = {}
    for line in lines:
        if line.op == "call.forward" and line.kwargs["keep"]:
            template = stage.templates[line.args[0]]
            values = template.forward.args[len(line.args[2]) :]
            names = {root.get(ref.name, ref.name) for arg, ref in zip(values, line.args[3], strict=True)
                     if arg in forward[line.args[0]].pinned}  # fmt: skip
            outs = set(line.outs[:-1])
            pinned[line.outs[-1]] = names | {o for o, n in zip(line.outs, template.forward.returns, strict=False)
                                             if n in set(template.saved) and o in outs}  # fmt: skip
    for i, line in enumerate(lines):
        for name in line.reads():
            uses[i] |= pinned.get(name, set())
    last = {name: i for i, names in enumerate(uses) for name in names}
    size = {n: _bytes(*stage.step.arg_types[n], mesh) for n in stage.step.args}
    alive = peak = sum(size.values())
    for i, line in enumerate(lines):
        if line.op == "call.forward":
            peak = max(peak, alive + forward[line.args[0]].peak)
        elif line.op == "call.backward":
            peak = max(peak, alive + back[line.args[0]].peak)
        for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
            if root[name] != name or line.op == "buffer.read":
                continue
            size[name] = (
                forward[line.args[0]].kept if line.op == "call.forward" and type_ is None else _bytes(type_, spec, mesh)
            )
            alive += size[name]
        peak = max(peak, alive)
        for name in uses[i]:
            if last[name] == i and name in size:
                alive -= size.pop(name)
    return peak


def _collectives(stage: LoweredStage, pricer: Pricer, program: Program) -> list[Collective]:
    mesh, microbatches = stage.mesh, stage.microbatches
    found: dict[tuple[str, str, str, float], int] = {}

    def add(kind: str, axis: str, what: str, nbytes: float, times: int) -> None:
        if mesh.sizes[axis] > 1 and kind not in ("slice", "to_partial", "shard"):
            key = (kind, axis, what, nbytes)
            found[key] = found.get(key, 0) + times

    def count(lines: tuple[Line, ...], where: str, times: int, known: dict[str, float]) -> None:
        for line in lines:
            if line.op.startswith("comm."):
                kind, axis = line.op.removeprefix("comm."), line.args[1]
                source = line.args[0]
                held = known.get(source.name, 0.0) if isinstance(source, Ref) else 0.0
                full = held * mesh.sizes[axis] if kind == "all_gather" else held
                add(kind, axis, f"{where}.{line.node or line.source}", full, times)
            for name, type_, spec in zip(line.outs, line.types, line.specs, strict=False):
                known[name] = _bytes(type_, spec, mesh)

    calls = dict.fromkeys(stage.templates, 0)
    back = dict.fromkeys(stage.templates, 0)
    for line in stage.step.lines:
        if line.op == "call.forward":
            calls[line.args[0]] += 1
        elif line.op == "call.backward":
            back[line.args[0]] += 1
        elif line.op == "grads.sum":
            for axis in line.args[1]:
                add("all_reduce", axis, "loss", float(line.types[0].nbytes) if line.types[0] else 0.0, microbatches)
        elif line.op == "params.prefetch":
            for name, steps in line.args[1]:
                _steps(
                    add,
                    f"gather {name}",
                    stage.parameters[name].type,
                    stage.parameters[name].storage,
                    steps,
                    mesh,
                    microbatches,
                )
    for name, t in stage.templates.items():
        count(
            t.forward.lines,
            name,
            calls[name] * microbatches,
            {n: _bytes(*ts, mesh) for n, ts in t.forward.arg_types.items()},
        )
        if t.backward is not None:
            known = {n: _bytes(*ts, mesh) for n, ts in t.backward.arg_types.items()}
            count(t.backward.lines, name, back[name] * microbatches, known)
    count(stage.step.lines, "step", microbatches, {n: _bytes(*ts, mesh) for n, ts in stage.step.arg_types.items()})
    for p in stage.parameters.values():
        if p.contributions:
            _reductions(add, p, mesh)
            _steps(add, f"regather {p.name}", p.type, p.optimizer, p.regather, mesh, 1)
    return [
        Collective(kind, axis, what, nbytes, times, times * _price(pricer, what)(kind, nbytes, axis))
        for (kind, axis, what, nbytes), times in found.items()
    ]


def _price(pricer: Pricer, what: str) -> Callable[[str, float, str], float]:
    """Gradients, updated parameters and the loss travel many in one message."""
    together = what.startswith(("regather ", "gradient ")) or what == "loss"
    return pricer.bucketed_s if together else pricer.collective_s


def _steps(
    add: object,
    what: str,
    type_: TensorType,
    start: Spec,
    steps: tuple[tuple[object, ...], ...],
    mesh: Mesh,
    times: int,
) -> None:
    held = float(start.local_bytes(type_, mesh))
    for kind, axes, *_ in steps:
        for axis in axes:  # type: ignore[attr-defined]
            size = mesh.sizes[axis]
            if kind == "all_gather":
                held *= size
                add(kind, axis, what, held, times)  # type: ignore[operator]
            elif kind in ("reduce_scatter", "shard"):
                add(kind, axis, what, held, times)  # type: ignore[operator]
                held /= size
            else:
                add(kind, axis, what, held, times)  # type: ignore[operator]


def _reductions(add: object, p: object, mesh: Mesh) -> None:
    """The reduction steps of one gradient, from the bytes it starts with."""
    scale = 1.0
    for kind, axes, *_ in p.reduce:  # type: ignore[attr-defined]
        for axis in axes:
            scale = scale * mesh.sizes[axis] if kind in ("reduce_scatter", "shard") else scale
            scale = scale / mesh.sizes[axis] if kind == "all_gather" else scale
    held = p.optimizer.local_bytes(p.type, mesh) * scale  # type: ignore[attr-defined]
    for kind, axes, *_ in p.reduce:  # type: ignore[attr-defined]
        for axis in axes:
            size = mesh.sizes[axis]
            full = held * size if kind == "all_gather" else held
            add(kind, axis, f"gradient {p.name}", full, 1)  # type: ignore[attr-defined,operator]
            held = held / size if kind in ("reduce_scatter", "shard") else full
