"""Lines as a framework runs them: what its products do in passing, in which order passes become neighbours, and parameters'
messages, which travel as if at once.

Emitted programs run the lines of a function one by one. A framework's product adds its bias as it writes, adds up the bias's
gradient as it reads, and makes all products of one input at once (`side_by_side.py`), so that gradients of that input come as one:

    g = linear(x, w);  s = silu(g);  u = linear(x, v);  y = s * u         runs as  g, u = linear(x, [w, v]);  y = silu(g) * u
    dx = linear_dx(dg, w) + linear_dx(du, v)                              runs as  dx = linear_dx([dg, du], [w, v])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.costmodel.bill import ParameterTraffic
from autopar.ir.lines import Compute, Convert, Function, Line, Prefetch
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ops.registry import find
from autopar.passes.price.lines import Message, gather_messages, gradient_messages, regather_messages
from autopar.passes.price.pricer import Pricer
from autopar.passes.price.side_by_side import OF_INPUT, OF_WEIGHT, PRODUCT, SideBySide

_Sent = tuple[Message, float]
"""A message, and bytes on a framework's wire per byte of it."""
PRODUCTS = (PRODUCT, OF_INPUT, OF_WEIGHT)


@dataclass(frozen=True)
class AsRun:
    """The lines of a function as they become kernels. lines: in the order of these; inside: values that are made inside the kernel
    of a product."""

    lines: tuple[Line, ...]
    inside: frozenset[str] = frozenset()

    def is_inside(self, line: Line) -> bool:
        """Whether a line is a part of a product's kernel."""
        return bool(line.outs) and self.inside.issuperset(line.outs)


def as_run(function: Function, beside: SideBySide | None) -> AsRun:
    """How a framework runs a template's function. beside: its products that are parts of wider ones; None: the program's own lines
    run."""
    if beside is None:
        return AsRun(function.lines)
    return AsRun(_at_once(function.lines, beside), _inside(function, beside))


def _at_once(lines: tuple[Line, ...], beside: SideBySide) -> tuple[Line, ...]:
    """The lines with products of one input next to each other: forward where the first of them stands, backward the last."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, line in enumerate(lines):
        source = beside.source(line)
        if source:
            groups.setdefault((line.op if isinstance(line, Compute) else "", source), []).append(i)
    place = {i: float(i) for i in range(len(lines))}
    for (op, _), members in groups.items():
        place |= dict.fromkeys(members, float(members[0] if op == PRODUCT else members[-1]))
    return tuple(lines[i] for i in sorted(range(len(lines)), key=lambda i: (place[i], i)))


def _inside(function: Function, beside: SideBySide) -> frozenset[str]:
    """Results of sums that products do as they read and write: of a product and a vector, of a product's gradients over its rows,
    and of gradients of one input."""
    made = {out: line for line in function.lines for out in line.outs}
    gradients = {next(line.reads()) for line in function.lines if _is(line, OF_INPUT, OF_WEIGHT)}
    rank = {name: 0 if type_ is None else len(type_.shape) for name, type_ in function.types.items()}
    inside: set[str] = set()
    parts: dict[str, str] = {}  # results of OF_INPUT and their sums, by input
    for line in function.lines:
        if _is(line, OF_INPUT):
            parts[line.outs[0]] = beside.source(line)
        if not isinstance(line, Compute) or line.op in PRODUCTS:
            continue
        reads, definition = [*line.reads()], find(line.op)
        adds = definition is not None and definition.carries and len(reads) == 2
        first = made.get(reads[0]) if reads else None
        while isinstance(first, Convert):  # a sum over ranks
            first = made.get(first.value)
        if adds and parts.get(reads[0]) and parts.get(reads[0]) == parts.get(reads[1]):
            parts[line.outs[0]] = parts[reads[0]]
            inside.add(line.outs[0])
        elif adds and first is not None and _is(first, PRODUCT) and rank.get(reads[1]) == 1:
            inside.add(line.outs[0])
        elif len(reads) == 1 and reads[0] in gradients and rank.get(line.outs[0]) == 1 < rank.get(reads[0], 1):
            inside.add(line.outs[0])
    return frozenset(inside)


def _is(line: Line, *ops: str) -> bool:
    return isinstance(line, Compute) and line.op in ops


# --- parameters


def framework_traffic(stage: LoweredStage, pricer: Pricer) -> ParameterTraffic:
    """Messages for a stage's parameters. Gradients of those that are gathered for every microbatch (ZeRO-3) are reduced behind the
    backward that they are made in, with the gathers of what it reads."""
    software, mesh = pricer.software, stage.mesh
    gathers: dict[str, list[_Sent]] = {"F": [], "B": []}
    gathered: set[str] = set()
    for action, function in stage.by_action:
        for line in function.lines if function is not None else ():
            for gather in line.gathers if isinstance(line, Prefetch) else ():
                p = stage.parameters[gather.name]
                width = (gather.dtype or p.type.dtype).itemsize
                sent = [(m, (software.copy_bytes or width) / width) for m in gather_messages(gather, p, mesh)]
                gathers["F" if action == "F" else "B"] += sent
                gathered |= {gather.name} if sent else set()
    trained = [p for p in stage.parameters.values() if p.contributions]
    behind = [p for p in trained if p.name in gathered and (p.by_microbatch or stage.microbatches == 1)]
    others = [p for p in trained if p not in behind]

    def reduced_s(parameters: Iterable[StoredParameter]) -> float:
        def sent() -> Iterator[_Sent]:
            for p in parameters:
                width = p.type.dtype.itemsize
                for message in gradient_messages(p, mesh):
                    yield message, (software.reduce_bytes or width) / width

        return at_once_s(sent(), pricer)

    updated = (
        (message, (software.copy_bytes or p.type.dtype.itemsize) / p.type.dtype.itemsize)
        for p in trained
        for message in regather_messages(p, mesh)
    )
    return ParameterTraffic(
        at_once_s(gathers["F"], pricer),
        at_once_s(gathers["B"], pricer) + reduced_s(behind),
        reduced_s(p for p in others if not p.by_microbatch),
        at_once_s(updated, pricer),
        each_reduce_s=reduced_s(p for p in others if p.by_microbatch),
    )


def at_once_s(sent: Iterable[_Sent], pricer: Pricer) -> float:
    """Seconds of messages of which all of a kind along an axis are one."""
    nbytes: dict[tuple[str, str], float] = {}
    for message, share in sent:
        key = message.kind, message.axis
        nbytes[key] = nbytes.get(key, 0.0) + share * message.nbytes
    return sum(pricer.collective_s(kind, together, axis) for (kind, axis), together in nbytes.items())
