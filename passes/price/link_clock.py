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
from autopar.ir.lines import Compute, Convert, Function, GoOn, Join, Line, Start, Wait
from autopar.ir.program import Template
from autopar.ir.rule import Strategy
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

    def compute(self, seconds: float) -> None:
        """Let the rank compute for so many seconds."""
        self.now_s += seconds

    def expose(self, purpose: Purpose, seconds: float, alone_s: float) -> None:
        """The rank waits so many seconds for messages that take alone_s."""
        self.now_s += seconds
        self.hidden_s += alone_s - seconds
        self.exposed[purpose] = self.exposed.get(purpose, 0.0) + seconds

    def send(self, purpose: Purpose, seconds: float) -> None:
        """Put a message on the link and wait for it."""
        self.expose(purpose, max(self._free_s - self.now_s, 0.0) + seconds, seconds)

    def start(self, handle: str, purpose: Purpose, seconds: float) -> None:
        """Put a message on the link."""
        self.expose(purpose, self.least_exposed * seconds, seconds)
        self._free_s = max(self.now_s, self._free_s) + (1 - self.least_exposed) * seconds
        self._coming[handle] = (purpose, self._free_s)

    def arrives_s(self, handle: str) -> float:
        """The time at which the message of a handle arrives."""
        return self._coming[handle][1]

    def wait(self, handle: str) -> None:
        """Wait for the message of a handle."""
        purpose, arrives_s = self._coming.pop(handle)
        self.expose(purpose, max(arrives_s - self.now_s, 0.0), 0.0)
        self.now_s = max(self.now_s, arrives_s)  # to the last bit


def run_line(
    clock: LinkClock, line: Line, held: Mapping[str, float], pricer: Pricer, op_s: Callable[[Compute], float]
) -> None:
    """A line of a template's function passes on a clock. held: bytes of the function's values; op_s: seconds of an op's work."""
    match line:
        case (Convert() as conversion) | Start(line=Convert() as conversion):
            clock.compute(conversion_copied_s(conversion, held, pricer))
            for message in conversion_messages(conversion, held, pricer.mesh):
                if isinstance(line, Start):
                    clock.start(line.outs[0], message.purpose, message.seconds(pricer))
                else:
                    clock.send(message.purpose, message.seconds(pricer))
        case Wait(handle, line=Convert()):
            clock.wait(handle)
        case Join():
            clock.compute(joined_s(line, held, pricer))
        case Compute():
            clock.compute(op_s(line))
            _send(clock, line, pricer, op_s(line))
        case Start(line=Compute() as op, outs=(handle,)):
            _send(clock, op, pricer, op_s(op), stops=True)
            _run_part(clock, op, 0, handle, pricer, op_s(op))
        case GoOn(handle, line=op, stop=stop):
            clock.wait(handle)
            _run_part(clock, op, stop, handle, pricer, op_s(op))
        case Wait(handle, line=Compute() as op):
            clock.wait(handle)
            _run_part(clock, op, len(op.stops), handle, pricer, op_s(op))


def _send(clock: LinkClock, op: Compute, pricer: Pricer, work_s: float, stops: bool = False) -> None:
    """An op's messages that it waits for itself, which are all, or where it stops for some, the others. work_s: seconds of its
    work."""
    for one, non_overlapped_s, alone_s in pricer.non_overlapped_s(op.sent, work_s):
        if not stops or one.after is None:
            clock.send(Purpose(one.axis), one.times * non_overlapped_s)
            clock.hidden_s += one.times * (alone_s - non_overlapped_s)


def _run_part(clock: LinkClock, op: Compute, stop: int, handle: str, pricer: Pricer, work_s: float) -> None:
    """An op that was started runs to its stop of a number, or to its end. work_s: seconds of all of its work."""
    done = [0.0, *(sent.after or 0.0 for sent in op.stops), 1.0]
    clock.compute((done[stop + 1] - done[stop]) * work_s)
    if stop < len(op.stops):
        own = [row for row in pricer.non_overlapped_s(op.sent, work_s) if row[0].after is not None]
        one, non_overlapped_s, alone_s = own[stop]
        clock.hidden_s += one.times * (alone_s - non_overlapped_s)
        clock.start(handle, Purpose(one.axis), one.times * non_overlapped_s)


def joined_s(line: Join, held: Mapping[str, float], pricer: Pricer) -> float:
    """Seconds to read pieces and to write what they make. held: bytes of values."""
    return pricer.copy_s * sum(held.get(name, 0.0) for name in (*line.pieces, *line.outs))


def function_seconds(function: Function, pricer: Pricer, op_s: Callable[[Compute], float]) -> float:
    """Seconds of a template's function on these clocks. op_s: of an op's own work."""
    clock, held = LinkClock(pricer.least_exposed), function.local_bytes(pricer.mesh)
    for line in function.lines:
        run_line(clock, line, held, pricer, op_s)
    return clock.now_s


def strategy_of(line: Compute, plan: TemplatePlan, pricer: Pricer) -> tuple[Strategy, Pricer]:
    """An op's strategy, and the prices of what it has so: all of its block, or a piece."""
    strategy = plan.strategies[line.node]
    if line.piece is None:
        return strategy, pricer
    factor, count = line.piece
    return (*strategy, factor), pricer.of_pieces(count)


def op_seconds(plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook) -> Callable[[Compute], float]:
    """Seconds of the work of a template's ops; casts that lowering adds have none. A piece takes its share of the block's at
    least: alone it might fit into a cache, but it comes from where the block lies."""

    priced: dict[tuple[str, tuple[str, int] | None], float] = {}

    def block_s(line: Compute) -> float:
        call = template.op_calls.get(line.node)
        if call is None:
            return 0.0
        rule, (strategy, prices) = rules.rule(call), strategy_of(line, plan, pricer)
        share_s = 0.0 if line.piece is None else pricer.op_s(call, rule, plan.strategies[line.node]) / line.piece[1]
        return max(share_s, prices.op_s(call, rule, strategy))

    def op_s(line: Compute) -> float:
        key = line.node, line.piece
        if key not in priced:
            priced[key] = block_s(line)
        return priced[key]

    return op_s
