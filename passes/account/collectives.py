"""The collectives of a stage: every message of its lines and of its parameters' steps, counted over one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from autopar.ir.lines import Compute, Convert, Function, Line
from autopar.ir.lowered import LoweredStage
from autopar.passes.price.lines import (
    Message,
    extra_messages,
    gradient_messages,
    line_costs,
    regather_messages,
    sent_times,
)
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
    for message, count in _messages(stage, pricer):
        times[message] += count
    return tuple(
        Collective(m.kind, m.axis, m.what, m.nbytes, count, count * m.seconds(pricer), stage.index)
        for m, count in times.items()
        if count
    )


def _messages(stage: LoweredStage, pricer: Pricer) -> Iterator[tuple[Message, int]]:
    """Every message, with how often a step sends it; those of conversions between calls follow those inside calls."""
    m, calls = stage.microbatches, Counter((call.template, call.action) for f in stage.functions for call in f.calls)

    def sent(function: Function | None, where: str) -> list[tuple[Line, Message]]:
        costs = line_costs(function, stage, pricer, where=where)
        return [(cost.line, message) for cost in costs for message in cost.messages]

    between = [one for function in stage.functions for one in sent(function, "step")]
    yield from ((message, m) for line, message in between if not isinstance(line, (Convert, Compute)))
    for name, template in stage.templates.items():
        for action, function in zip("FBW", (template.forward, template.backward, template.weights), strict=True):
            yield from ((message, calls[name, action] * m) for _, message in sent(function, name))
    yield from ((message, m) for line, message in between if isinstance(line, (Convert, Compute)))
    yield from extra_messages(stage)
    for p in stage.parameters.values():
        if p.contributions:
            yield from ((message, sent_times(p, stage)) for message in gradient_messages(p, stage.mesh))
            yield from ((message, 1) for message in regather_messages(p, stage.mesh))
