"""A rank's clock beside that of its link, on which messages go one after another while the rank computes on.

A message that takes s seconds alone, of which a share e is never hidden, sets out when the link is free:

    start    now += e · s;  arrives = free = max(now, free) + (1 - e) · s
    wait     now = max(now, arrives)
    send     a message that is waited for at once: now = max(now, free) + s

What `now` loses to messages is exposed. An all-reduce of 3 ms that is waited for after 2 ms of work exposes 1 ms, and so does
any that follows it by less than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.costmodel.bill import Purpose
from autopar.ir.lines import Compute, Convert, Line, Start, Wait
from autopar.ir.program import Template
from autopar.passes.price.lines import conversion_copied_s, conversion_messages
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.plan import TemplatePlan


class LinkClock:
    """least_exposed: e. now_s: seconds so far; exposed: of messages, by what these are for; hidden_s: of the same messages what
    is hidden."""

    def __init__(self, least_exposed: float) -> None:
        self.least_exposed = least_exposed
        self.now_s = self.hidden_s = 0.0
        self.exposed: dict[Purpose, float] = {}
        self._free_s = 0.0
        self._coming: dict[str, tuple[Purpose, float]] = {}

    @property
    def link_is_free(self) -> bool:
        return self._free_s <= self.now_s

    def compute(self, seconds: float) -> None:
        """The rank computes."""
        self.now_s += seconds

    def expose(self, purpose: Purpose, seconds: float, alone_s: float) -> None:
        """The rank waits so many seconds for messages that take alone_s."""
        self.now_s += seconds
        self.hidden_s += alone_s - seconds
        self.exposed[purpose] = self.exposed.get(purpose, 0.0) + seconds

    def send(self, purpose: Purpose, seconds: float) -> None:
        """A message goes, and is waited for."""
        self.expose(purpose, max(self._free_s - self.now_s, 0.0) + seconds, seconds)

    def start(self, handle: str, purpose: Purpose, seconds: float) -> None:
        """A message sets out."""
        self.expose(purpose, self.least_exposed * seconds, seconds)
        self._free_s = max(self.now_s, self._free_s) + (1 - self.least_exposed) * seconds
        self._coming[handle] = (purpose, self._free_s)

    def arrives_s(self, handle: str) -> float:
        """When the message of a handle arrives."""
        return self._coming[handle][1]

    def wait(self, handle: str) -> None:
        """The message of a handle has arrived."""
        purpose, arrives_s = self._coming.pop(handle)
        self.expose(purpose, max(arrives_s - self.now_s, 0.0), 0.0)
        self.now_s = max(self.now_s, arrives_s)  # to the last bit


def run_line(clock: LinkClock, line: Line, held: Mapping[str, float], pricer: Pricer, work_s: float) -> None:
    """A line of a template's function passes on a clock. held: bytes of the function's values; work_s: seconds of the line's
    own work."""
    clock.compute(work_s)
    match line:
        case Wait(handle):
            clock.wait(handle)
        case Convert() | Start(line=Convert()):
            conversion = line.line if isinstance(line, Start) else line
            for message in conversion_messages(conversion, held, pricer.mesh):
                if isinstance(line, Start):
                    clock.start(line.outs[0], message.purpose, message.seconds(pricer))
                else:
                    clock.send(message.purpose, message.seconds(pricer))
        case Compute(sent=sent):
            exposed_s = pricer.sent_s(sent, work_s)
            for axis, seconds in exposed_s.items():
                clock.send(Purpose(axis), seconds)
            alone_s = sum(one.times * pricer.collective_s(one.kind, one.nbytes, one.axis) for one in sent)
            clock.hidden_s += alone_s - sum(exposed_s.values())


def line_work_s(
    plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook, held: Mapping[str, float]
) -> Callable[[Line], float]:
    """Seconds of what a line of a template's function computes or copies itself; casts that lowering adds have none. held:
    bytes of the function's values."""

    def work_s(line: Line) -> float:
        match line:
            case Convert() | Start(line=Convert()):
                return conversion_copied_s(line.line if isinstance(line, Start) else line, held, pricer)
            case Compute(node=node) if node in template.op_calls:
                call = template.op_calls[node]
                return pricer.op_s(call, rules.rule(call), plan.strategies[node])
        return 0.0

    return work_s
