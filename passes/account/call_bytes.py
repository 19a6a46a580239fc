"""The bytes that a template's function makes inside, by the types of its values alone.

A name's memory is its own or that of what it is a view of. This knows no scratch of ops, which `passes.memory` plays to the
byte; it is quick, as the cutting of a program into stages needs it, which asks for it on every submesh.
"""

from __future__ import annotations

from autopar.ir.lines import Function
from autopar.ir.mesh import Mesh
from autopar.passes.price.storages import storage_owners


def most_inside(function: Function, mesh: Mesh) -> float:
    """The most bytes beside its arguments that one call of a function has at once."""
    owner, nbytes = storage_owners(function), function.local_bytes(mesh)
    stays = {owner.get(name, name) for name in function.returns if name}
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
    return peak
