"""Whose memory a value of a lowered function shows, by the ops' definitions: its own, or that of what it is a view of."""

from __future__ import annotations

from autopar.ir.lines import Compute, Convert, Cut, Function, Line
from autopar.ops.registry import find


def storage_owners(function: Function) -> dict[str, str]:
    """Per name the value that owns its memory: itself, or the first operand, view by view."""
    owner = {name: name for name in (*function.args, *function.arg_types)}
    for line in function.lines:
        source = next(line.reads(), None) if _is_view(line) else None
        for out in line.outs:
            owner[out] = out if source is None else owner.get(source, out)
    return owner


def _is_view(line: Line) -> bool:
    match line:
        case Cut():
            return True
        case Convert(step=step):
            return step.facts.table.view
        case Compute(op=op):
            definition = find(op)
            return definition is not None and definition.free
    return False
