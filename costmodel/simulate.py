"""An event simulator for pipeline schedules: action table + stage graph + seconds -> timeline.

Every group of ranks has a compute stream, which runs its row of the table in order, and a communication stream. An
action starts when its group is free and all it reads has arrived:

    start(F, v) >= end(F, u) + comm(u, v)   for every stage u that feeds v
    start(B, u) >= end(B, v) + comm(v, u)   for every stage v that returns a gradient to u, and >= end(F, u)
    start(W, u) >= end(B, u)

`comm` is paid only between different groups. A table without W actions runs B and W as one block and sends the gradient
at the end of the block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import PlanError
from autopar.ir.actions import Action, StageGraph, Table, splits_backward
from autopar.runtime.program.actions import Replay, replay

Durations = Mapping[tuple[int, str], float]
"""Seconds of (stage, kind)."""

Comm = float | Mapping[tuple[int, int], float]
"""Seconds from one stage to another: of every edge, or by (sender, receiver); the way back costs the same unless given."""


@dataclass(frozen=True)
class StreamWork:
    """Work of a group's communication stream: starts after `after`, and `before` waits for it (None: nothing waits)."""

    group: int
    name: str
    seconds: float
    after: Action | None = None
    before: Action | None = None


@dataclass(frozen=True)
class Event:
    """One bar of the timeline, seconds from the start of the step. action: what runs, where it is compute. sent: whose results
    travel, where they go to another group, and peer, which that is."""

    group: int
    stream: str
    name: str
    start_s: float
    end_s: float
    action: Action | None = None
    sent: Action | None = None
    peer: int | None = None

    @property
    def stage(self) -> int:
        """The group: where every group runs one stage, their numbers are the same."""
        return self.group


@dataclass(frozen=True)
class Timeline:
    """The outcome of a simulated step. `busy_s[i]`: compute seconds of group i; `critical_path` from first to last
    event; names: of its rows, where they are not just groups."""

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    comm_s: tuple[float, ...]
    spans_s: tuple[float, ...]
    critical_path: tuple[Event, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        """The name of each row."""
        return self.names or tuple(f"group {g}" for g in range(len(self.busy_s)))

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the step of the average group."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 0.0

    @property
    def bubble_rate(self) -> float:
        """The bubble rate as in the zero-bubble paper: cost is the largest over groups of (last end - first start)."""
        cost = max(self.spans_s)
        return 1 - max(self.busy_s) / cost if cost else 0.0

    @property
    def exposed_comm_s(self) -> float:
        """Seconds by which communication lengthens the step beyond its busiest compute stream and the bubble."""
        ends = [e.end_s for e in self.events if e.stream == "compute"]
        return self.makespan_s - max(ends) if ends else 0.0

    def with_messages(self, seconds: Durations) -> Timeline:
        """The same with the messages inside the actions, of so many seconds, which their ops hide; by (stage, kind)."""
        inside = [
            Event(e.group, "inside", f"messages in {e.name}", e.start_s, min(e.start_s + hidden_s, e.end_s))
            for e in self.events
            if e.action is not None and (hidden_s := seconds.get((e.action.stage, e.action.kind), 0.0)) > 0
        ]
        return replace(self, events=(*self.events, *inside))

    def beside(self, other: Timeline) -> Timeline:
        """The other one's groups below those of this one."""
        groups = len(self.busy_s)
        below = tuple(replace(e, group=e.group + groups) for e in other.events)
        return Timeline(
            (*self.events, *below),
            max(self.makespan_s, other.makespan_s),
            (*self.busy_s, *other.busy_s),
            (*self.comm_s, *other.comm_s),
            (*self.spans_s, *other.spans_s),
            names=(*self.rows, *other.rows),
        )

    def trace_rows(self) -> list[dict[str, Any]]:
        """The events in the Chrome trace format: one process per group, one thread per stream."""
        rows: list[dict[str, Any]] = []
        for group, name in enumerate(self.rows):
            rows.append({"ph": "M", "pid": group, "name": "process_name", "args": {"name": name}})
            for tid, stream in enumerate(("compute", "comm")):
                rows.append({"ph": "M", "pid": group, "tid": tid, "name": "thread_name", "args": {"name": stream}})
        for e in self.events:
            tid = 0 if e.stream == "compute" else 1
            bar = {"ts": e.start_s * 1e6, "dur": (e.end_s - e.start_s) * 1e6}
            rows.append({"ph": "X", "pid": e.group, "tid": tid, "name": e.name, "cat": e.stream, **bar})
        return rows

    def chrome_trace(self) -> str:
        """JSON in the Chrome trace format, which Perfetto opens."""
        return as_trace(self.trace_rows())


def as_trace(rows: Sequence[Mapping[str, Any]]) -> str:
    """JSON of a Chrome trace."""
    return json.dumps({"traceEvents": list(rows), "displayTimeUnit": "ms"})


@dataclass(frozen=True)
class Network:
    """A table's actions in an order in which every dependency comes first. key: (stage, kind) of each; links: of `Replay`."""

    played: Replay[Action]
    key: Sequence[tuple[int, str]]
    links: tuple[tuple[int, int], ...]
    groups: int
    split: bool

    def ends_s(self, durations: Durations, comm_s: Comm) -> list[float]:
        """When every action ends. Raises PlanError for an action without seconds."""
        seconds = _seconds(self, durations)
        return self.played.ends_s(map(seconds.__getitem__, self.key), link_seconds(self.links, comm_s))


def network(table: Table, graph: StageGraph) -> Network:
    """The dependencies of a table. Raises PlanError, saying who waits, when it deadlocks."""
    if len(table) != len(graph.groups):
        raise PlanError(f"the action table has {len(table)} rows for {len(graph.groups)} groups")
    reads, links = graph.reads
    played = replay(table, reads)
    if played.stuck:
        stuck = [f"group {one.row} waits before {table[one.row][one.place]}" for one in played.stuck]
        raise PlanError("the action table deadlocks: " + "; ".join(stuck[:4]))
    key = [(stage, kind) for kind, _, stage in played.item]
    return Network(played, key, links, len(table), splits_backward(table))


def _seconds(net: Network, durations: Durations) -> Durations:
    """The durations of actions: without W actions, B takes the seconds of B and W together. Raises PlanError for an
    action without seconds."""
    if not net.split:
        durations = {(s, k): t + (durations.get((s, "W"), 0.0) if k == "B" else 0.0) for (s, k), t in durations.items()}
    for key in set(net.key):
        if key not in durations:
            raise PlanError(f"no duration for {key}; durations need (stage, kind) for every action")
    return durations


def link_seconds(links: Sequence[tuple[int, int]], comm_s: Comm) -> list[float]:
    """Seconds of every (sender, receiver)."""
    if isinstance(comm_s, Mapping):
        return [comm_s.get((u, v), comm_s.get((v, u), 0.0)) for u, v in links]
    return [float(comm_s)] * len(links)


def makespan_s(table: Table, graph: StageGraph, durations: Durations, comm_s: Comm = 0.0) -> float:
    """Seconds from the first start to the last end; the fast path of `simulate`."""
    return longest_s(network(table, graph), durations, comm_s)


def longest_s(net: Network, durations: Durations, comm_s: Comm = 0.0) -> float:
    """`makespan_s` of a table whose dependencies are worked out."""
    return max(net.ends_s(durations, comm_s), default=0.0)


def bubble_spans(
    table: Table, graph: StageGraph, durations: Durations, comm_s: Comm = 0.0
) -> tuple[tuple[float, ...], float]:
    """`Timeline.spans_s` and `makespan_s` without the timeline."""
    net = network(table, graph)
    seconds = _seconds(net, durations)
    first, last = [-1.0] * net.groups, [0.0] * net.groups
    for i, key, end in zip(net.played.row, net.key, net.ends_s(durations, comm_s), strict=True):
        if first[i] < 0:
            first[i] = end - seconds[key]
        last[i] = end
    return tuple(b - max(a, 0.0) for a, b in zip(first, last, strict=True)), max(last)


def uniform(stages: int, tf: float, tb: float, tw: float) -> dict[tuple[int, str], float]:
    """Durations of equal stages."""
    return {(s, k): t for s in range(stages) for k, t in (("F", tf), ("B", tb), ("W", tw))}


def simulate(
    table: Table, graph: StageGraph, durations: Durations, comm_s: Comm = 0.0, collectives: Sequence[StreamWork] = ()
) -> Timeline:
    """The timeline of one step. Raises PlanError when the table deadlocks or a duration is missing."""
    net = network(table, graph)
    seconds, comm = _seconds(net, durations), link_seconds(net.links, comm_s)
    groups, played = net.groups, net.played
    works_after: dict[tuple[int, Action | None], list[StreamWork]] = {}
    for c in collectives:
        works_after.setdefault((c.group, c.after), []).append(c)
    comm_free = [0.0] * groups
    blocked_until: dict[tuple[int, Action], tuple[float, int]] = {}
    events: list[Event] = []
    cause: list[int] = []
    event_of: list[int] = []

    def run_collectives(group: int, action: Action | None, now: float, cause_of_start: int) -> None:
        for c in works_after.get((group, action), ()):
            start = max(now, comm_free[group])
            comm_free[group] = start + c.seconds
            events.append(Event(group, "comm", c.name, start, comm_free[group]))
            cause.append(cause_of_start)
            if c.before is not None:
                old = blocked_until.get((group, c.before), (0.0, -1))
                blocked_until[group, c.before] = max(old, (comm_free[group], len(events) - 1))

    for i in range(groups):
        run_collectives(i, None, 0.0, -1)
    for n, action in enumerate(played.item):
        i, previous = played.row[n], played.previous[n]
        start, cause_of_start = 0.0, -1
        if previous >= 0:
            start, cause_of_start = events[event_of[previous]].end_s, event_of[previous]
        for source, link in played.arrivals[n]:
            sent = events[event_of[source]].end_s
            if sent + comm[link] > start:
                start, cause_of_start = sent + comm[link], event_of[source]
            if comm[link] > 0:
                what = played.item[source]
                arrives = sent + comm[link]
                events.append(Event(played.row[source], "comm", f"send {what}", sent, arrives, sent=what, peer=i))
                cause.append(event_of[source])
        if (i, action) in blocked_until and blocked_until[i, action][0] > start:
            start, cause_of_start = blocked_until[i, action]
        events.append(Event(i, "compute", str(action), start, start + seconds[net.key[n]], action))
        cause.append(cause_of_start)
        event_of.append(len(events) - 1)
        run_collectives(i, action, events[-1].end_s, len(events) - 1)
    return _timeline(groups, events, cause)


def _timeline(groups: int, events: list[Event], cause: list[int]) -> Timeline:
    busy, comm, first, last = [0.0] * groups, [0.0] * groups, [float("inf")] * groups, [0.0] * groups
    for e in events:
        if e.stream == "comm":
            comm[e.group] += e.end_s - e.start_s
            continue
        busy[e.group] += e.end_s - e.start_s
        first[e.group] = min(first[e.group], e.start_s)
        last[e.group] = max(last[e.group], e.end_s)
    spans = tuple(max(0.0, b - a) for a, b in zip(first, last, strict=True))
    if not events:
        return Timeline((), 0.0, tuple(busy), tuple(comm), spans)
    final_event = max(range(len(events)), key=lambda i: events[i].end_s)
    path = []
    event = final_event
    while event >= 0:
        path.append(events[event])
        event = cause[event]
    return Timeline(tuple(events), events[final_event].end_s, tuple(busy), tuple(comm), spans, tuple(reversed(path)))
