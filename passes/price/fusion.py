"""The least bytes that a function's passes over memory move, if neighbours were one kernel.

Pointwise ops, norms and reductions that follow each other, with no product and no message between them, make a *run*. As one
kernel a run reads what comes from outside and writes what is read outside:

    a = linear(x, w);  b = a * s;  c = gelu(b);  d = linear(c, v)         the run b, c: reads a, s and writes c
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.ir.lines import Compute, Function, Line
from autopar.ops.registry import find
from autopar.passes.price.storages import storage_owners


def fused_bytes(
    function: Function,
    held: Mapping[str, float],
    passes: Callable[[Line], bool | None],
    lines: tuple[Line, ...] | None = None,
) -> float:
    """Bytes read and written by all runs on one rank. held: bytes of every value. passes: whether a line passes over memory,
    so that it belongs to a run; None where it moves nothing, so that it ends none. lines: the function's in another order."""
    lines = function.lines if lines is None else lines
    owner = storage_owners(function)
    run_of: list[int | None] = []
    run = 0
    for line in lines:
        belongs = passes(line)
        run += belongs is False
        run_of.append(run if belongs is not False else None)
    made_in: dict[str, int | None] = {}
    reads: dict[tuple[int, str], float] = {}  # bytes of the largest part that a run reads of a storage from outside
    read_elsewhere = {owner.get(name, name) for name in function.returns if name}
    for line, place in zip(lines, run_of, strict=True):
        belongs = passes(line)
        for name in line.reads():
            storage = owner.get(name, name)
            inside = place is not None and made_in.get(storage, -1) == place
            if inside or belongs is None:
                continue
            read_elsewhere.add(storage)
            if belongs and place is not None:
                nbytes = held.get(name, 0.0)
                if _picked(line) == name:
                    nbytes = min(nbytes, held.get(line.outs[0], nbytes))
                reads[place, storage] = max(reads.get((place, storage), 0.0), nbytes)
        if belongs is not None:
            made_in |= {owner.get(out, out): place for out in line.outs}
    written = sum(
        held.get(storage, 0.0) for storage, place in made_in.items() if place is not None and storage in read_elsewhere
    )
    return sum(reads.values()) + written


def _picked(line: Line) -> str | None:
    """The value of which a line reads no more than it makes."""
    definition = find(line.op) if isinstance(line, Compute) else None
    return next(line.reads(), None) if definition is not None and definition.picks is not None else None
