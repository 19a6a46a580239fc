"""Messages of a template's function that travel while lines which do not need them run.

A conversion that sends becomes two lines: it starts as soon as its operand is made and the link is free, and is waited for
where its result is first read, or where nothing else is left to do. Lines are taken one by one, on a clock of the rank and one
of its link (`autopar.passes.price.link_clock`). Backward of a row-parallel product, whose weights' gradient needs no message:

    dw = g.T @ x                          dx = g @ w
    dx = g @ w                            dx_coming = rt.comm.start_all_reduce(dx, 'tp')
    dx = rt.comm.all_reduce(dx, 'tp')     dw = g.T @ x
    y = f(dx)                             dx = dx_coming.wait();  y = f(dx)

Messages keep their order, and every rank of a stage runs the same lines, so collectives match. How far other lines change
places the plan says (`TemplatePlan.overlap`), as what is put off holds its operands for longer:

    between    not at all
    next       what needs a message that is still coming lets others go first, and what the next message does not need (dw
               above) is put off until that is under way
    any        what no message needs is put off until there is time for it, if need be to the end

A function that this does not make faster stays as it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.ir.lines import Convert, Function, Line, Start, Wait
from autopar.ir.steps import LOCAL_KINDS
from autopar.passes.lower.names import Names
from autopar.passes.price.link_clock import LinkClock, run_line
from autopar.passes.price.pricer import Pricer

RunLine = Callable[[LinkClock, Line], None]
"""A line passes on a clock."""


def overlapped(function: Function, overlap: str, pricer: Pricer, work_s: Callable[[Line], float]) -> Function:
    """The function with lines run while messages travel, as far as a plan says and where it is faster. work_s: seconds of a
    line's own work."""
    sizes, held = pricer.mesh.sizes, function.local_bytes(pricer.mesh)
    messages = [i for i, line in enumerate(function.lines) if _sends(line, sizes)]
    if not overlap or not messages:
        return function

    def run(clock: LinkClock, line: Line) -> None:
        run_line(clock, line, held, pricer, work_s(line))

    order = _Order(function, messages, overlap, LinkClock(pricer.least_exposed), run)
    lines = tuple(_joined([*order.lines()]))
    before, after = LinkClock(pricer.least_exposed), LinkClock(pricer.least_exposed)
    for clock, sequence in ((before, function.lines), (after, lines)):
        for line in sequence:
            run(clock, line)
    return replace(function, lines=lines) if after.now_s < before.now_s else function


def _sends(line: Line, sizes: dict[str, int]) -> bool:
    return isinstance(line, Convert) and line.step.kind not in LOCAL_KINDS and sizes[line.step.axis] > 1


class _Order:
    """The lines of a function as they are taken. messages: places of the conversions that send."""

    def __init__(
        self, function: Function, messages: Sequence[int], overlap: str, clock: LinkClock, run: RunLine
    ) -> None:
        self.function, self.messages, self.clock, self.run = function, list(messages), clock, run
        self.moves = overlap != "between"
        self.names = Names()
        for name in (*function.args, *function.arg_types, *(out for line in function.lines for out in line.outs)):
            self.names.take(name)
        made = {out for line in function.lines for out in line.outs}
        self.unmade = [len(made.intersection(line.reads())) for line in function.lines]
        """How many operands of every line are neither made nor coming."""
        self.readers: dict[str, list[int]] = {}
        for i, line in enumerate(function.lines):
            for name in set(line.reads()):
                self.readers.setdefault(name, []).append(i)
        self.coming: dict[str, Wait] = {}
        self.turn = self._turns(overlap)
        self.ready = [(self.turn[i], i) for i in range(len(function.lines)) if not self.unmade[i] and i in self.turn]
        heapq.heapify(self.ready)
        self.blocked: list[tuple[float, int]] = []
        """Ops of which some operands are coming, by when the last arrives."""

    def lines(self) -> Iterator[Line]:
        """All lines, in the order in which they are taken."""
        others = sorted(self.turn)
        begun = 0
        while self.messages or begun < len(others):
            self._unblock()
            can_run = bool(self.ready) and (self.moves or self.ready[0][1] == others[begun])
            if self._can_start() and (self.clock.link_is_free or not can_run):
                yield from self._start(self.messages.pop(0))
            elif can_run:
                begun += 1
                yield from self._line(heapq.heappop(self.ready)[1])
            else:
                yield self._wait(next(iter(self.coming)))
        for name in list(self.coming):
            yield self._wait(name)

    def _turns(self, overlap: str) -> dict[int, tuple[int, ...]]:
        """In which order lines that send nothing are taken: as they stand, but for those that are put off."""
        lines, turns = self.function.lines, dict[int, tuple[int, ...]]()
        needed, until = set[str](), len(lines)
        for i in reversed(range(len(lines))):
            if overlap == "next" and i in self.messages:
                needed, until = set(), i
            needs = i in self.messages or not needed.isdisjoint(lines[i].outs)
            needed |= set(lines[i].reads()) if needs else set()
            if i not in self.messages:
                turns[i] = (i,) if needs or not self.moves else (until, i)
        return turns

    def _unblock(self) -> None:
        """Lines whose operands have arrived are ready."""
        while self.blocked and self.blocked[0][0] <= self.clock.now_s:
            i = heapq.heappop(self.blocked)[1]
            heapq.heappush(self.ready, (self.turn[i], i))

    def _can_start(self) -> bool:
        """Whether the operand of the next message is made, or has arrived."""
        return (
            bool(self.messages)
            and not self.unmade[self.messages[0]]
            and self._arrives_s(self.messages[0]) <= self.clock.now_s
        )

    def _arrives_s(self, i: int) -> float:
        """When the last of a line's operands that are coming arrives."""
        names = (name for name in self.function.lines[i].reads() if name in self.coming)
        return max((self.clock.arrives_s(self.coming[name].value) for name in names), default=0.0)

    def _start(self, i: int) -> Iterator[Line]:
        line = self.function.lines[i]
        assert isinstance(line, Convert)
        yield from self._operands(line)
        handle = self.names.fresh(f"{line.outs[0]}_coming")
        start = Start(line, outs=(handle,), phase=line.phase, source=line.source)
        self.run(self.clock, start)
        self.coming[line.outs[0]] = Wait(
            handle, line, outs=line.outs, types=line.types, specs=line.specs, phase=line.phase, source=line.source
        )
        self._made(line)
        yield start

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
                yield self._wait(name)

    def _wait(self, name: str) -> Line:
        wait = self.coming.pop(name)
        self.run(self.clock, wait)
        return wait

    def _made(self, line: Line) -> None:
        """What a line makes is there, or coming."""
        for i in {reader for out in line.outs for reader in self.readers.get(out, ())}:
            self.unmade[i] -= len(set(line.outs).intersection(self.function.lines[i].reads()))
            if not self.unmade[i] and i in self.turn:
                heapq.heappush(self.blocked, (self._arrives_s(i), i))


def _joined(lines: Sequence[Line]) -> Iterator[Line]:
    """Conversions with nothing between their start and their wait are one line again."""
    skip = False
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        if isinstance(line, Start) and isinstance(following, Wait) and following.value == line.outs[0]:
            yield line.line
        elif not skip:
            yield line
        skip = isinstance(line, Start) and isinstance(following, Wait) and following.value == line.outs[0]
