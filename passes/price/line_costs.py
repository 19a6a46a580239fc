"""The lines of a stage's function in seconds: one walk, over which whoever wants a price of them folds.

    when  line                                 what it takes
    0     Prefetch("0f", [w])                  the cast of w, and its gather, of which a share stays exposed
    0     TakeParameters("0f")                 nothing
    0     CallForward("block", 0)              the forward of the block
    1     Convert(y, all_reduce over tp)       what is copied for it, and its message

The bill of a stage (`bills.py`) adds seconds up by what they are for, a clock (`parameter_clock.py`) lets them pass, cuts of a
program into stages (`autopar.passes.account.calls`) give them to the calls beside them, and the list of collectives counts
messages. A template's functions are walked on a clock of their own (`link_clock.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autopar.costmodel.bill import Purpose
from autopar.ir.lines import Function, Line, Prefetch, TemplateCall
from autopar.ir.lowered import LoweredStage
from autopar.passes.price.lines import (
    Message,
    TemplateSeconds,
    cast_seconds,
    gather_alone_s,
    line_copied_s,
    line_messages,
)
from autopar.passes.price.pricer import Pricer

GATHER = Purpose("gather")


class Part(NamedTuple):
    """Seconds that a rank is busy, and of a message alone (None: there is none), of which a share stays exposed at least."""

    own_s: float
    sent_s: float = 0.0
    purpose: Purpose | None = None
    share: float = 1.0


@dataclass(frozen=True)
class LineCost:
    """A line of a stage's function on one rank. when: how many calls stand before it. messages: all that it sends. met_s: until
    ranks meet for parameters that are gathered, whatever becomes of the gathers."""

    line: Line
    when: int
    messages: tuple[Message, ...]
    parts: tuple[Part, ...]
    met_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of the line without what is hidden of it."""
        return sum(part.own_s + part.share * part.sent_s for part in self.parts)


def line_costs(
    function: Function | None,
    stage: LoweredStage,
    pricer: Pricer,
    calls: TemplateSeconds | None = None,
    where: str = "",
) -> Iterator[LineCost]:
    """Every line of a function. calls: seconds of the templates (None: calls have no parts); where: the function stands, for
    messages of conversions."""
    if function is None:
        return
    held, when = function.local_bytes(stage.mesh), 0
    exposed_share = pricer.software.exposed_share
    for line in function.lines:
        messages, met_s = tuple(line_messages(line, held, stage, where)), 0.0
        parts: tuple[Part, ...] = ()
        match line:
            case TemplateCall(template=template, action=action):
                parts = (Part(calls[template][action]),) if calls is not None else ()
            case Prefetch(gathers=gathers):
                stored = [(gather, stage.parameters[gather.name]) for gather in gathers]
                share, met_s = pricer.software.shards_share, pricer.rendezvous_s(m.axis for m in messages)
                parts = tuple(
                    Part(cast_seconds(*one, pricer), gather_alone_s(*one, pricer), GATHER, share) for one in stored
                )
            case _:
                sent = ((m.seconds(pricer), m.purpose) for m in messages)
                own = Part(line_copied_s(line, held, stage, pricer))
                parts = (own, *(Part(0.0, s, purpose, exposed_share(purpose.overlap)) for s, purpose in sent))
        yield LineCost(line, when, messages, parts, met_s)
        when += isinstance(line, TemplateCall)
