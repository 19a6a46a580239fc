"""Lines as a framework runs them: what its products do in passing, in which order passes become neighbours, what hides its
messages, and those of parameters, which travel as if at once.

Emitted programs run the lines of a function one by one. A framework's product adds its bias as it writes and adds up the bias's
gradient as it reads, and products of one input are made at once (`side_by_side.py`), so that gradients of that input are one:

    g = linear(x, w);  s = silu(g);  u = linear(x, v);  y = s * u         runs as  g, u = linear(x, [w, v]);  y = silu(g) * u
    dx = linear_dx(dg, w) + linear_dx(du, v)                              runs as  dx = linear_dx([dg, du], [w, v])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from autopar.costmodel.bill import ParameterTraffic, Purpose
from autopar.costmodel.software import BEHIND_PRODUCTS
from autopar.ir.lines import Compute, Convert, Function, Line, Prefetch
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ops.registry import find
from autopar.passes.price.lines import (
    Message,
    conversion_messages,
    gather_messages,
    gradient_messages,
    regather_messages,
)
from autopar.passes.price.pricer import Pricer
from autopar.passes.price.side_by_side import OF_INPUT, OF_WEIGHT, PRODUCT, SideBySide

_Sent = tuple[str, tuple[str, ...], float]
"""The kind of a message, the axes along which it is one, and its bytes on a framework's wire."""
OF_LOSS = "autopar.times"
"""Gradients that a loss and its head made in forward, in backward: a framework makes them there."""
SUMS = ("reduce_scatter", "all_reduce")
CP_EXPOSED = "cp_exposed"
PRODUCTS = (PRODUCT, OF_INPUT, OF_WEIGHT)


@dataclass(frozen=True)
class AsRun:
    """The lines of a function as they become kernels. lines: in the order of these; inside: values that kernels of products
    make on their way."""

    lines: tuple[Line, ...]
    inside: frozenset[str] = frozenset()

    def is_inside(self, line: Line) -> bool:
        """Whether a line is a part of a product's kernel."""
        return bool(line.outs) and self.inside.issuperset(line.outs)


AS_WRITTEN = AsRun(())
"""Lines of which none is inside a kernel."""


def as_run(function: Function, beside: SideBySide | None) -> AsRun:
    """The way in which a framework runs a template's function. beside: its products that are parts of wider ones; None: the
    program's own lines run."""
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
    and of gradients of one input; and gradients that came with a loss, times its own."""
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
        if line.op == OF_LOSS:
            inside |= {*line.outs}
            continue
        out, reads, definition = line.outs[0], [*line.reads()], find(line.op)
        if len(reads) == 2 and definition is not None and definition.carries:
            source = parts.get(reads[0])
            if source and parts.get(reads[1]) == source:
                parts[out] = source
            elif not (_is_product(reads[0], made) and rank.get(reads[1]) == 1):
                continue
        elif not (len(reads) == 1 and reads[0] in gradients and rank.get(out) == 1 < rank.get(reads[0], 1)):
            continue
        inside.add(out)
    return frozenset(inside)


def _is_product(value: str, made: Mapping[str, Line]) -> bool:
    """Whether a value is a product's result, or the sum of it over ranks."""
    line = made.get(value)
    while isinstance(line, Convert):
        line = made.get(line.value)
    return line is not None and _is(line, PRODUCT)


def _is(line: Line, *ops: str) -> bool:
    return isinstance(line, Compute) and line.op in ops


def made_whole(forward: Function | None, backward: Function | None, recompute: Collection[str]) -> Function | None:
    """A backward whose checkpoints make all of these values again, with lines of forward for those that it does not read."""
    if forward is None or backward is None or not recompute:
        return backward
    made = {out for line in backward.lines for out in line.outs}
    whole = (line for line in forward.lines if isinstance(line, (Compute, Convert)) and line.node in recompute)
    missing = tuple(line for line in whole if made.isdisjoint(line.outs))
    return replace(backward, lines=(*missing, *backward.lines), arg_types=forward.arg_types | backward.arg_types)


# --- messages between ops


def conversions(function: Function, forward: Function | None, pricer: Pricer) -> Iterator[tuple[Purpose, float]]:
    """The messages of a function's conversions, with what hides them, and their seconds. forward: of the template whose backward
    the function is.

    Around a layer's products software overlaps the gathers and scatters of a sequence, around a head's it does not. What moves a
    sequence to other ranks hides as context parallelism does, and so do attention's keys and values, which travel together.
    Megatron's backward sends its sums behind products of weights' gradients, and gathers behind those of inputs what forward
    gathered; keys and values it gathers again as it did before.
    """
    software, mesh = pricer.software, pricer.mesh
    again = {out for line in forward.lines for out in line.outs} if forward is not None else set()
    layers, sent = any(_of_weights(line) for line in function.lines), _messages(function, mesh)
    of_keys = _of_keys(function, sent)
    for out, message in sent:
        overlap = message.purpose.overlap if layers else ""
        if out in of_keys.values:
            continue
        if message.kind == "all_to_all":
            overlap = CP_EXPOSED
        elif forward is not None and layers and message.kind in SUMS and software.regathers and out not in again:
            overlap = BEHIND_PRODUCTS
        yield Purpose(message.axis, overlap), message.seconds(pricer)
    messages = of_keys.messages
    if forward is not None and software.regathers and layers:
        sent = _messages(forward, mesh)
        of_keys = _of_keys(forward, sent)
        messages += tuple(message for message in of_keys.messages if message.kind == "all_gather")
        for out, message in sent:
            if message.kind == "all_gather" and out not in of_keys.values:
                yield Purpose(message.axis, BEHIND_PRODUCTS), message.seconds(pricer)
    yield from ((Purpose(message.axis, CP_EXPOSED), message.seconds(pricer)) for message in messages)


def _messages(function: Function, mesh: Mesh) -> list[tuple[str, Message]]:
    """The messages of a function's conversions, with what these make."""
    held = function.local_bytes(mesh)
    converts = (line for line in function.lines if isinstance(line, Convert))
    return [(line.outs[0], message) for line in converts for message in conversion_messages(line, held, mesh)]


@dataclass(frozen=True)
class _Keys:
    """Messages of keys, values and their gradients, those of one attention together, and what conversions make for these."""

    messages: tuple[Message, ...]
    values: frozenset[str]


def _of_keys(function: Function, converted: Sequence[tuple[str, Message]]) -> _Keys:
    """The messages of a function that attention waits for, or that wait for attention, apart from exchanges of heads.
    converted: those of its conversions, as of `_messages`."""
    messages: list[Message] = []
    values: set[str] = set()
    value_of = {line.outs[0]: line.value for line in function.lines if isinstance(line, Convert)}
    for line in function.lines:
        if not isinstance(line, Compute) or not is_along_sequence(line):
            continue
        nbytes: dict[tuple[str, str], float] = {}
        for sent in line.sent:
            nbytes[sent.kind, sent.axis] = nbytes.get((sent.kind, sent.axis), 0.0) + sent.times * float(sent.nbytes)
        for out, message in converted:
            if message.kind != "all_to_all" and (out in set(line.reads()) or value_of[out] in line.outs):
                values.add(out)
                key = message.kind, message.axis
                nbytes[key] = nbytes.get(key, 0.0) + message.nbytes
        messages += [Message(kind, axis, "keys", together) for (kind, axis), together in nbytes.items()]
    return _Keys(tuple(messages), frozenset(values))


def is_along_sequence(line: Compute) -> bool:
    """Whether an op's ranks along a sequence have unequal work: it is attention, or its gradient."""
    definition = find(line.op)
    return definition is not None and definition.imbalance is not None


def _of_weights(line: Line) -> bool:
    definition = find(line.op) if isinstance(line, Compute) else None
    return definition is not None and bool(definition.of_weights)


# --- parameters


def framework_traffic(stage: LoweredStage, pricer: Pricer) -> ParameterTraffic:
    """Messages for a stage's parameters. Gradients of those that are gathered for every microbatch (ZeRO-3) are reduced behind
    the backward that makes them, with the gathers of what it reads."""
    software, mesh = pricer.software, stage.mesh
    gathers: dict[bool, list[_Sent]] = {True: [], False: []}
    gathered: set[str] = set()
    for action, function in stage.by_action:
        for line in function.lines if function is not None else ():
            for gather in line.gathers if isinstance(line, Prefetch) else ():
                p = stage.parameters[gather.name]
                width = (gather.dtype or p.type.dtype).itemsize
                sent = _at_once_along(gather_messages(gather, p, mesh), software.copy_bytes, width)
                gathers[action == "F"] += sent
                gathered |= {gather.name} if sent else set()
    trained = [p for p in stage.parameters.values() if p.contributions]
    behind = [p for p in trained if p.name in gathered and (p.by_microbatch or stage.microbatches == 1)]
    once, each = ([p for p in trained if p not in behind and p.by_microbatch == by] for by in (False, True))

    def sent_s(of: Callable[[StoredParameter, Mesh], Iterable[Message]], parameters: list[StoredParameter]) -> float:
        wire = software.reduce_bytes if of is gradient_messages else software.copy_bytes
        parts = (_at_once_along(of(p, mesh), wire, p.type.dtype.itemsize) for p in parameters)
        return _together_s(chain.from_iterable(parts), pricer)

    return ParameterTraffic(
        _together_s(gathers[True], pricer),
        _together_s(gathers[False], pricer) + sent_s(gradient_messages, behind),
        sent_s(gradient_messages, once),
        sent_s(regather_messages, trained),
        each_reduce_s=sent_s(gradient_messages, each),
    )


def _at_once_along(messages: Iterable[Message], wire_bytes: float | None, width: int) -> list[_Sent]:
    """A parameter's messages, of which all of a kind are one along their axes, of the largest's bytes. wire_bytes: of an element
    that has so many here (None: as many)."""
    along: dict[str, list[Message]] = {}
    for message in messages:
        along.setdefault(message.kind, []).append(message)
    share = 1.0 if wire_bytes is None else wire_bytes / width
    return [(kind, tuple(m.axis for m in parts), share * max(m.nbytes for m in parts)) for kind, parts in along.items()]


def _together_s(sent: Iterable[_Sent], pricer: Pricer) -> float:
    """Seconds of messages of which all of a kind along the same axes are one."""
    nbytes: dict[tuple[str, frozenset[str]], float] = {}
    for kind, axes, each in sent:
        key = kind, frozenset(axes)
        nbytes[key] = nbytes.get(key, 0.0) + each
    return sum(pricer.collective_along_s(kind, together, axes) for (kind, axes), together in nbytes.items())
