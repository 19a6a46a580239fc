"""The collectives of a stage: every message of its lines and of its parameters' steps, counted over one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from autopar.ir.lines import Compute, Convert, Function, Start, TemplateCall
from autopar.ir.lowered import LoweredStage
from autopar.passes.price.lines import Message, gradient_messages, line_messages, regather_messages
from autopar.passes.price.pricer import Pricer
from autopar.runtime.data.fields import Bytes, Paragraph, Seconds
from autopar.runtime.data.schema import integer


@dataclass(frozen=True)
class Collective:
    """One kind of communication in the program: nbytes of one (full array), times per step, seconds in all."""

    kind: str
    axis: str
    what: Paragraph
    nbytes: Bytes
    times: Annotated[int, integer(0, 1 << 40)]
    time_s: Seconds
    stage: int = 0


def stage_collectives(stage: LoweredStage, pricer: Pricer) -> tuple[Collective, ...]:
    """Equal messages are one entry."""
    times: Counter[Message] = Counter()
    for message, count in _messages(stage):
        times[message] += count
    return tuple(
        Collective(m.kind, m.axis, m.what, m.nbytes, count, count * m.seconds(pricer), stage.index)
        for m, count in times.items()
        if count
    )


def _messages(stage: LoweredStage) -> Iterator[tuple[Message, int]]:
    """Every message, with how often a step sends it."""
    calls: Counter[tuple[str, str]] = Counter()
    for line in stage.lines:
        if isinstance(line, TemplateCall):
            calls[line.template, line.action] += 1
        elif not isinstance(line, (Convert, Compute)):
            yield from ((message, stage.microbatches) for message in line_messages(line, {}, stage))
    for name, template in stage.templates.items():
        functions = zip("FBW", (template.forward, template.backward, template.weights), strict=True)
        for action, function in functions:
            if function is not None:
                times = calls[name, action] * stage.microbatches
                yield from ((message, times) for message in _conversions(function, stage, name))
    for function in stage.functions:
        yield from ((message, stage.microbatches) for message in _conversions(function, stage, "step"))
    for p in stage.parameters.values():
        if p.contributions:
            yield from ((message, 1) for message in gradient_messages(p, stage.mesh))
            yield from ((message, 1) for message in regather_messages(p, stage.mesh))


def _conversions(function: Function, stage: LoweredStage, where: str) -> Iterator[Message]:
    held = function.local_bytes(stage.mesh)
    for line in function.lines:
        if isinstance(line, (Convert, Start, Compute)):
            yield from line_messages(line, held, stage, where)
