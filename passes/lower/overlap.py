"""Messages of a template's function that travel while lines which do not need them run.

A conversion that sends becomes two lines: it starts as soon as its operand is made and the link is free, and is waited for
where its result is first read, or where nothing else is left to do. An op that stops for messages of its own
(`autopar.runtime.comm.suspended`) is started likewise, and goes on whenever its message has arrived. Lines are taken one by
one, on a clock of the rank and one of its link (`autopar.passes.price.link_clock`). Backward of a row-parallel product,
whose weights' gradient needs no message:

    dw = g.T @ x                          dx = g @ w
    dx = g @ w                            dx_coming = rt.comm.start_all_reduce(dx, 'tp')
    dx = rt.comm.all_reduce(dx, 'tp')     dw = g.T @ x
    y = f(dx)                             dx = dx_coming.wait();  y = f(dx)

Messages set out when their operands are made, and every rank of a stage runs the same lines, so collectives match. How far
other lines change places the plan says (`TemplatePlan.overlap`), as what is put off holds its operands for longer:

    between    not at all
    next       what needs a message that is still coming lets others go first, and what the next message does not need (dw
               above) is put off until that is under way
    any        what no message needs is put off until there is time for it, if need be to the end; of the other lines those go
               first after which least is to be computed until a message sets out

A function that this does not make faster stays as it is, unless the plan insists.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.ir.lines import Compute, Convert, Function, GoOn, Line, Start, Wait
from autopar.passes.lower.names import Names
from autopar.passes.price.link_clock import LinkClock, function_seconds, run_line
from autopar.passes.price.pricer import Pricer
from autopar.plan import TemplatePlan

RunLine = Callable[[LinkClock, Line], None]
"""A line passes on a clock."""


def overlapped(function: Function, plan: TemplatePlan, pricer: Pricer, op_s: Callable[[Compute], float]) -> Function:
    """The function with lines run while messages travel, as far as its template's plan says and where it is faster, or where the
    plan insists. op_s: seconds of an op's own work."""
    sizes, held = pricer.mesh.sizes, function.local_bytes(pricer.mesh)
    messages = [i for i, line in enumerate(function.lines) if sends(line, sizes)]
    if not plan.overlap or not messages:
        return function

    def run(clock: LinkClock, line: Line) -> None:
        run_line(clock, line, held, pricer, op_s)

    order = _Order(function, messages, plan.overlap, LinkClock(pricer.least_exposed), run)
    moved = replace(function, lines=tuple(_joined([*order.lines()])))
    return moved if plan.insists else min(function, moved, key=lambda one: function_seconds(one, pricer, op_s))


def sends(line: Line, sizes: dict[str, int]) -> bool:
    """Whether a line may be started and waited for."""
    match line:
        case Convert(step=step):
            return step.facts.sends and sizes[step.axis] > 1
        case Compute():
            return bool(line.stops)
    return False


def sends_beside(line: Line, sizes: dict[str, int]) -> bool:
    """Whether a line sends what others may run beside, or is the start of one that does."""
    return isinstance(line, Start) or sends(line, sizes)


class _Order:
    """The lines of a function as they are taken. messages: places of those that send."""

    def __init__(
        self, function: Function, messages: Sequence[int], overlap: str, clock: LinkClock, run: RunLine
    ) -> None:
        self.function, self.messages, self.clock, self.run = function, set(messages), clock, run
        self.moves = overlap != "between"
        self.names = Names()
        for name in (*function.args, *function.arg_types, *(out for line in function.lines for out in line.outs)):
            self.names.take(name)
        made = {out for line in function.lines for out in line.outs}
        self.unmade = [len(made.intersection(line.reads())) for line in function.lines]
        """Per line the number of operands that are neither computed nor in flight."""
        self.readers: dict[str, list[int]] = {}
        for i, line in enumerate(function.lines):
            for name in set(line.reads()):
                self.readers.setdefault(name, []).append(i)
        self.rest: dict[str, list[Line]] = {}
        """The remaining lines of every collective that was started, by its handle: the last of them waits for it."""
        self.coming: dict[str, str] = {}
        """The values that are there once their last message has arrived, each with its handle."""
        self.turn = self._turns(overlap)
        self.ready = [(self.turn[i], i) for i in range(len(function.lines)) if not self.unmade[i] and i in self.turn]
        heapq.heapify(self.ready)
        self.blocked = [(0.0, i) for i in messages if not self.unmade[i]]
        """Lines of which all operands are made or coming, by when the last arrives."""
        self.can_start: list[int] = []
        """Messages whose operands are there."""

    def lines(self) -> Iterator[Line]:
        """All lines, in the order in which they are taken."""
        others = sorted(self.turn)
        begun, left = 0, len(self.messages)
        while left or begun < len(others):
            self._unblock()
            stopped = (handle for handle, rest in self.rest.items() if len(rest) > 1)
            arrived = next((h for h in stopped if self.clock.arrives_s(h) <= self.clock.now_s), None)
            can_run = bool(self.ready) and (self.moves or self.ready[0][1] == others[begun])
            if arrived is not None:
                yield self._go_on(arrived)
            elif self.can_start:
                left -= 1
                yield from self._start(heapq.heappop(self.can_start))
            elif can_run:
                begun += 1
                yield from self._line(heapq.heappop(self.ready)[1])
            else:
                yield self._go_on(min(self.rest, key=self.clock.arrives_s))
        while self.rest:
            yield self._go_on(min(self.rest, key=self.clock.arrives_s))

    def _turns(self, overlap: str) -> dict[int, tuple[float, ...]]:
        """In which order lines that send nothing are taken: as they stand, but for those that are put off."""
        lines, turns = self.function.lines, dict[int, tuple[float, ...]]()
        needed, until = set[str](), len(lines)
        for i in reversed(range(len(lines))):
            if overlap == "next" and i in self.messages:
                needed, until = set(), i
            needs = i in self.messages or not needed.isdisjoint(lines[i].outs)
            needed |= set(lines[i].reads()) if needs else set()
            if i not in self.messages:
                turns[i] = (i,) if needs or not self.moves else (until, i)
        return self._soonest() if overlap == "any" else turns

    def _soonest(self) -> dict[int, tuple[float, ...]]:
        """Lines by the work that is left until a message sets out."""
        lines, left_s = self.function.lines, dict.fromkeys(self.messages, 0.0)
        for i in reversed(range(len(lines))):
            if i not in left_s:
                clock = LinkClock(0.0)
                self.run(clock, lines[i])
                readers = (reader for out in lines[i].outs for reader in self.readers.get(out, ()))
                left_s[i] = clock.now_s + min((left_s[reader] for reader in readers), default=math.inf)
        return {i: (seconds, i) for i, seconds in left_s.items() if i not in self.messages}

    def _unblock(self) -> None:
        """Lines whose operands have arrived are ready."""
        while self.blocked and self.blocked[0][0] <= self.clock.now_s:
            i = heapq.heappop(self.blocked)[1]
            if i in self.messages:
                heapq.heappush(self.can_start, i)
            else:
                heapq.heappush(self.ready, (self.turn[i], i))

    def _arrives_s(self, i: int) -> float:
        """When the last of a line's operands that are coming arrives."""
        handles = (self.coming[name] for name in self.function.lines[i].reads() if name in self.coming)
        return max(map(self.clock.arrives_s, handles), default=0.0)

    def _start(self, i: int) -> Iterator[Line]:
        line = self.function.lines[i]
        assert isinstance(line, (Convert, Compute))
        yield from self._operands(line)
        handle = self.names.fresh(f"{next(out for out in line.outs if out != '_')}_coming")
        start = Start(line, outs=(handle,), phase=line.phase, source=line.source)
        self.run(self.clock, start)
        yield start
        parts: list[Line] = []
        if isinstance(line, Compute):
            stops = range(1, len(line.stops))
            parts += (GoOn(handle, line, stop, phase=line.phase, source=line.source) for stop in stops)
        wait = Wait(
            handle, line, outs=line.outs, types=line.types, specs=line.specs, phase=line.phase, source=line.source
        )
        self.rest[handle] = [*parts, wait]
        self._is_coming(handle)

    def _go_on(self, handle: str) -> Line:
        """The next line of what was started."""
        line = self.rest[handle].pop(0)
        self.run(self.clock, line)
        if not self.rest[handle]:
            del self.rest[handle]
            for out in line.outs:
                self.coming.pop(out, None)
        else:
            self._is_coming(handle)
        return line

    def _is_coming(self, handle: str) -> None:
        """Put the values of a collective in flight once only its wait is left."""
        wait, *others = self.rest[handle]
        if not others:
            self.coming |= dict.fromkeys((out for out in wait.outs if out != "_"), handle)
            self._made(wait)

    def _line(self, i: int) -> Iterator[Line]:
        line = self.function.lines[i]
        yield from self._operands(line)
        self.run(self.clock, line)
        self._made(line)
        yield line

    def _operands(self, line: Line) -> Iterator[Line]:
        """Waits for the operands that have arrived."""
        for name in dict.fromkeys(line.reads()):
            if name in self.coming:
                yield self._go_on(self.coming[name])

    def _made(self, line: Line) -> None:
        """Tell the readers of a line's results that these are computed or in flight."""
        for i in {reader for out in line.outs for reader in self.readers.get(out, ())}:
            self.unmade[i] -= len(set(line.outs).intersection(self.function.lines[i].reads()))
            if not self.unmade[i]:
                heapq.heappush(self.blocked, (self._arrives_s(i), i))


def _joined(lines: Sequence[Line]) -> Iterator[Line]:
    """The lines with every collective that has nothing between its start and its wait made one line again."""
    begun: list[Line] = []
    for line in lines:
        if begun and not (isinstance(line, (GoOn, Wait)) and line.value == begun[0].outs[0]):
            yield from begun
            begun = []
        if isinstance(line, Start) or begun:
            begun.append(line)
        else:
            yield line
        if begun and isinstance(line, Wait):
            yield line.line
            begun = []
    yield from begun
