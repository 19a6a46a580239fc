"""Bytes of calls by the types of their values alone: what a call makes inside, and what it keeps for its backward.

A name's memory is its own or that of what it is a view of. This knows no scratch of ops and no order of calls, which
`passes.memory` plays to the byte; it is quick and goes by call, as the cutting of a program into stages needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.lines import CallForward, Function, Ref
from autopar.ir.lowered import LoweredStage
from autopar.ir.mesh import Mesh
from autopar.passes.price.storages import storage_owners


@dataclass(frozen=True)
class FunctionBytes:
    """The bytes that a template's function holds beside its arguments: `peak` bytes made inside, and of what it saves
    `kept` bytes of its own. Other saved values show memory of `arguments` (by name) or of results (by their places)."""

    peak: float
    kept: float
    arguments: frozenset[str]
    results: frozenset[int]


def function_bytes(function: Function, mesh: Mesh, saved: tuple[str, ...] = ()) -> FunctionBytes:
    """The bytes of one call of a function that saves the values `saved`."""
    owner, nbytes = storage_owners(function), function.local_bytes(mesh)
    results = [owner.get(name, name) if name else "" for name in function.returns]
    saved_owners = {owner.get(name, name) for name in saved}
    stays = saved_owners.union(results)
    last: dict[str, int] = {}
    for i, line in enumerate(function.lines):
        for name in (*line.reads(), *line.outs):
            last[owner.get(name, name)] = i
    alive: dict[str, float] = {}
    now = peak = 0.0
    for i, line in enumerate(function.lines):
        unread = 0.0
        for name, type_, spec in line.made():
            if name == "_":
                unread += 0.0 if type_ is None or spec is None else spec.local_bytes(type_, mesh)
            elif owner[name] == name:
                alive[name] = nbytes[name]
                now += alive[name]
        peak = max(peak, now + unread)
        for name in {owner.get(n, n) for n in (*line.reads(), *line.outs)}:
            if last[name] == i and name not in stays and name in alive:
                now -= alive.pop(name)
    arguments = {*function.args, *function.arg_types}
    return FunctionBytes(
        peak,
        sum(size for name, size in alive.items() if name in saved_owners and name not in results),
        frozenset(saved_owners & arguments),
        frozenset(results.index(name) for name in saved_owners - arguments if name in results),
    )


def held_bytes(stage: LoweredStage) -> dict[int, float]:
    """Bytes that each call keeps for its backward, by its number; a value of the stage counts where it is first kept."""
    templates = {name: function_bytes(t.forward, stage.mesh, t.stays) for name, t in stage.templates.items()}
    owner, sizes = storage_owners(stage.forward), stage.forward.local_bytes(stage.mesh)
    held: dict[int, float] = {}
    counted: set[str] = set()
    for line in stage.forward.lines:
        if isinstance(line, CallForward) and line.keeps:
            call = templates[line.template]
            names = [*(p.name if isinstance(p, Ref) else None for p in line.params), *line.inputs]
            passed = zip(stage.templates[line.template].forward.args, names, strict=True)
            kept = {owner.get(name, name) for argument, name in passed if name and argument in call.arguments}
            kept |= {line.outs[place] for place in call.results}
            held[line.number] = call.kept + sum(sizes.get(name, 0.0) for name in kept - counted)
            counted |= kept
    return held
