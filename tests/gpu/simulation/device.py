"""One simulated GPU: its host, streams and memory, and the doubles of torch.cuda's streams and events.

A rank runs on fake CUDA tensors; the order in which its kernels, copies, messages and host reads would happen is kept in vector
clocks (clocks.py), and what they touch in `Memory` (accesses.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.gpu.simulation.accesses import Captured, Memory
from tests.gpu.simulation.budgets import LATE, LAUNCH, SYNC, Budget
from tests.gpu.simulation.clocks import Timeline
from tests.gpu.simulation.findings import Finding, Place, Places


class Machine:
    """The state of one rank. findings: without repetitions, in the order in which they were met."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.host = Timeline("host")
        self.main = Stream(self, "main")
        self.current = self.main
        self.places = Places()
        self.budget = Budget()
        self.memory = Memory(self.report, self.places.here)
        self._findings: dict[tuple[str, tuple[Place, ...]], Finding] = {}
        self._numbers = itertools.count(1)
        self.timelines = [self.main.timeline]
        self._before_step: dict[str, int] = {}

    @property
    def findings(self) -> list[Finding]:
        return list(self._findings.values())

    def report(self, kind: str, what: str, places: tuple[Place, ...]) -> None:
        """Note a finding. Those of one kind at the same lines are one."""
        self._findings.setdefault((kind, places), Finding(kind, self.rank, what, places))

    def stream(self) -> Stream:
        """A new stream."""
        made = Stream(self, f"stream {next(self._numbers)}")
        self.timelines.append(made.timeline)
        return made

    def begin_step(self, step: int) -> None:
        """A step begins: all that streams were told so far is of those before."""
        self.budget.step, self.budget.action = step, ""
        self._before_step = {one.name: one.clock.get(one.name, 0) for one in (self.host, *self.timelines)}

    def launch(self, timeline: Timeline | None = None) -> tuple[Timeline, int]:
        """The host starts something on a stream, by default the current one; its event there."""
        timeline = timeline or self.current.timeline
        timeline.join(self.host.clock)
        return timeline, timeline.tick()

    def block(self, clock: dict[str, int], what: str) -> None:
        """The host waits. Raises RuntimeError while a graph is captured, as CUDA does."""
        if self.memory.captured is not None:
            raise RuntimeError(f"{what}: the host cannot wait for a stream that is being captured")
        streams = [name for name in clock if name != self.host.name]
        late = bool(streams) and all(clock[name] <= self._before_step.get(name, 0) for name in streams)
        self.budget.note(LATE if late else SYNC, what, self.places.here())
        self.host.join(clock)

    def settle(self) -> None:
        """All streams, those of groups too, are done with what they were given."""
        for timeline in self.timelines:
            self.host.join(timeline.clock)
        for timeline in self.timelines:
            timeline.join(self.host.clock)


class Stream:
    """The double of torch.cuda.Stream."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.timeline = Timeline(name)
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self.timeline.join(other.timeline.clock)

    def wait_event(self, event: Event) -> None:
        self.timeline.join(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.block(self.timeline.clock, "synchronize a stream")

    def query(self) -> bool:
        return False


class Event:
    """The double of torch.cuda.Event. An event that was never recorded orders nothing, as in CUDA."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock: dict[str, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        timeline = (stream or self.machine.current).timeline
        timeline.join(self.machine.host.clock)
        self.clock = dict(timeline.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.machine.current).wait_event(self)

    def synchronize(self) -> None:
        self.machine.block(self.clock, "synchronize an event")

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Graph:
    """The double of torch.cuda.CUDAGraph: a kernel that does all that was captured."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.captured: list[Captured] = []

    def replay(self) -> None:
        machine = self.machine
        timeline, number = machine.launch()
        machine.budget.note(LAUNCH, "graph", machine.places.here())
        machine.memory.play(self.captured, timeline, number)


@contextmanager
def cuda_doubles(machine: Machine) -> Iterator[None]:
    """Inside, torch.cuda speaks of this machine."""

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        before, machine.current = machine.current, stream or machine.current
        try:
            yield
        finally:
            machine.current = before

    @contextmanager
    def graph(graph: Graph, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        machine.block({}, "capture")
        machine.settle()
        machine.memory.captured = graph.captured
        try:
            with on(stream):
                yield
        finally:
            machine.memory.captured = None

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        machine.memory.recorded(tensor, stream.timeline.name)

    doubles: dict[str, Callable[..., Any]] = {
        "Stream": lambda device=None, priority=0, **_: machine.stream(),
        "Event": lambda *_, **__: Event(machine),
        "current_stream": lambda device=None: machine.current,
        "default_stream": lambda device=None: machine.main,
        "stream": on,
        "CUDAGraph": lambda: Graph(machine),
        "graph": graph,
        "synchronize": lambda device=None: (machine.block({}, "synchronize"), machine.settle()),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
    }
    with ExitStack() as stack:
        for name, double in doubles.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, double))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", record_stream))
        yield
