"""Bytes of a template's functions by their types alone: what a call makes inside, and what it saves.

A name's memory is its own or that of what it is a view of. This knows no scratch and no order of calls (walk.py plays
those); it is quick and goes by call, which is what the cutting of a program into stages asks (units.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.lowered import Function, Line, LoweredStage, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import find


def value_bytes(type_: TensorType | None, spec: Spec | None, mesh: Mesh) -> float:
    """Bytes of a value on one rank."""
    return 0.0 if type_ is None or spec is None else float(spec.local_bytes(type_, mesh))


def _is_view(line: Line) -> bool:
    if line.op.startswith("comm."):
        return line.op == "comm.slice"
    definition = (
        find(line.op)
        if "." in line.op and not line.op.startswith(("call.", "params.", "grads.", "buffer.", "tier."))
        else None
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


def roots(lines: tuple[Line, ...], args: tuple[str, ...]) -> dict[str, str]:
    """The value whose memory a name shows: itself, or what it is a view of."""
    root = {a: a for a in args}
    for line in lines:
        source = next(iter(line.reads()), None)
        for out in line.outs:
            root[out] = root.get(source, out) if source is not None and _is_view(line) else out
    return root


def inside(function: Function, mesh: Mesh, saved: tuple[str, ...] = ()) -> _Inside:
    """Bytes inside a template's function."""
    root = roots(function.lines, (*function.args, *function.arg_types))
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
        peak,
        root,
        kept,
        {n: root.get(n, n) for n in saved if root.get(n, n) in given},
        {n: results.index(root.get(n, n)) for n in saved if root.get(n, n) in results and root.get(n, n) not in given},
    )


def pinned_values(stage: LoweredStage) -> dict[str, frozenset[str]]:
    """Per list that forward saves, the values of the stage that it keeps alive."""
    held = {n: inside(t.forward, stage.mesh, t.stays) for n, t in stage.templates.items()}
    root = roots(stage.forward.lines, (*stage.forward.args, *stage.forward.arg_types))
    found: dict[str, frozenset[str]] = {}
    for line in stage.forward.lines:
        if line.op == "call.forward" and line.kwargs["keep"]:
            template, kept = stage.templates[line.args[0]], held[line.args[0]]
            refs = zip(template.forward.args, (*line.args[2], *line.args[3]), strict=True)
            given = {a: root.get(r.name, r.name) for a, r in refs if isinstance(r, Ref)}
            shown = {given[a] for a in kept.pinned.values() if a in given}
            found[line.outs[-1]] = frozenset(shown | {line.outs[k] for k in kept.returned.values()})
    return found
