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
from autopar.ir.actions import Action, StageGraph, Table

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
    """One bar of the timeline, seconds from the start of the step. action: what runs, where it is compute."""

    group: int
    stream: str
    name: str
    start_s: float
    end_s: float
    action: Action | None = None

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
    """A table's actions in an order in which every dependency comes first.

    previous[n]: the action before it on its group (-1: none). needs[n]: (action, index into `links`) of every arrival
    from another group; what the same group made is there already.
    """

    group: tuple[int, ...]
    action: tuple[Action, ...]
    key: tuple[tuple[int, str], ...]
    previous: tuple[int, ...]
    needs: tuple[tuple[tuple[int, int], ...], ...]
    links: tuple[tuple[int, int], ...]
    groups: int
    split: bool


def network(table: Table, graph: StageGraph) -> Network:
    """The dependencies of a table. Raises PlanError when it deadlocks."""
    if len(table) != len(graph.groups):
        raise PlanError(f"the action table has {len(table)} rows for {len(graph.groups)} groups")
    reads, links = _reads(graph)
    return _Ordering(table, reads).network(links)


Read = tuple[str, int, int]
"""(kind of the action that is read, its stage, index of the link it comes over; -1: made by the same group)."""


def _reads(graph: StageGraph) -> tuple[dict[tuple[str, int], list[Read]], tuple[tuple[int, int], ...]]:
    """The reads of actions of each (kind, stage), and the links between groups."""
    owner = graph.group_of
    links: dict[tuple[int, int], int] = {}
    reads: dict[tuple[str, int], list[Read]] = {}
    for s in range(graph.stages):
        for kind, sources in (("F", graph.feeds[s]), ("B", graph.returns[s])):
            reads[kind, s] = [
                (kind, u, links.setdefault((u, s), len(links)) if owner[u] != owner[s] else -1) for u in sources
            ]
        reads["B", s].append(("F", s, -1))
        reads["W", s] = [("B", s, -1)]
    return reads, tuple(links)


class _Ordering:
    """Walks every row of a table as far as what its actions read is there, until all have run or nothing moves.

    done: index of each action that has run, by (kind, stage, microbatch); waiting: the groups that wait for one.
    """

    def __init__(self, table: Table, reads: Mapping[tuple[str, int], Sequence[Read]]) -> None:
        self.table, self.reads = table, reads
        self.done: dict[tuple[str, int, int], int] = {}
        self.waiting: dict[tuple[str, int, int], list[int]] = {}
        self.group: list[int] = []
        self.actions: list[Action] = []
        self.previous: list[int] = []
        self.needs: list[tuple[tuple[int, int], ...]] = []

    def network(self, links: tuple[tuple[int, int], ...]) -> Network:
        """Raises PlanError, saying who waits, when the table deadlocks."""
        p = len(self.table)
        cursor, pending = [0] * p, list(range(p))
        last = [-1] * p
        while pending:
            g = pending.pop()
            row = self.table[g]
            while cursor[g] < len(row):
                action = row[cursor[g]]
                arrivals = self._arrivals(g, action)
                if arrivals is None:
                    break
                self.group.append(g)
                self.previous.append(last[g])
                self.needs.append(arrivals)
                last[g] = len(self.actions)
                self.actions.append(action)
                key = action.kind, action.stage, action.microbatch
                self.done[key] = last[g]
                cursor[g] += 1
                if self.waiting:
                    pending.extend(other for other in self.waiting.pop(key, ()) if other != g)
        rows = enumerate(self.table)
        stuck = [f"group {g} waits before {row[cursor[g]]}" for g, row in rows if cursor[g] < len(row)]
        if stuck:
            raise PlanError("the action table deadlocks: " + "; ".join(stuck[:4]))
        keys = tuple((a.stage, a.kind) for a in self.actions)
        split = any(a.kind == "W" for a in self.actions)
        return Network(
            tuple(self.group), tuple(self.actions), keys, tuple(self.previous), tuple(self.needs), links, p, split
        )

    def _arrivals(self, g: int, action: Action) -> tuple[tuple[int, int], ...] | None:
        """(action, link) of what arrives from other groups; None where something has not run, for which g waits then."""
        arrivals = []
        for kind, stage, link in self.reads[action.kind, action.stage]:
            key = kind, stage, action.microbatch
            source = self.done.get(key)
            if source is None:
                self.waiting.setdefault(key, []).append(g)
                return None
            if link >= 0:
                arrivals.append((source, link))
        return tuple(arrivals)


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
    return max(_ends(net, durations, comm_s), default=0.0)


def bubble_spans(
    table: Table, graph: StageGraph, durations: Durations, comm_s: Comm = 0.0
) -> tuple[tuple[float, ...], float]:
    """`Timeline.spans_s` and `makespan_s` without the timeline."""
    net = network(table, graph)
    seconds = _seconds(net, durations)
    first, last = [-1.0] * net.groups, [0.0] * net.groups
    for i, key, end in zip(net.group, net.key, _ends(net, durations, comm_s), strict=True):
        if first[i] < 0:
            first[i] = end - seconds[key]
        last[i] = end
    return tuple(b - max(a, 0.0) for a, b in zip(first, last, strict=True)), max(last)


def _ends(net: Network, durations: Durations, comm_s: Comm) -> list[float]:
    seconds, comm = _seconds(net, durations), link_seconds(net.links, comm_s)
    ends: list[float] = []
    append = ends.append
    for key, prev, needs in zip(net.key, net.previous, net.needs, strict=True):
        start = ends[prev] if prev >= 0 else 0.0
        for source, link in needs:
            arrived = ends[source] + comm[link]
            if arrived > start:
                start = arrived
        append(start + seconds[key])
    return ends


def uniform(stages: int, tf: float, tb: float, tw: float) -> dict[tuple[int, str], float]:
    """Durations of equal stages."""
    return {(s, k): t for s in range(stages) for k, t in (("F", tf), ("B", tb), ("W", tw))}


def simulate(
    table: Table, graph: StageGraph, durations: Durations, comm_s: Comm = 0.0, collectives: Sequence[StreamWork] = ()
) -> Timeline:
    """The timeline of one step. Raises PlanError when the table deadlocks or a duration is missing."""
    net = network(table, graph)
    seconds, comm = _seconds(net, durations), link_seconds(net.links, comm_s)
    groups = net.groups
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
    for n, action in enumerate(net.action):
        i, previous = net.group[n], net.previous[n]
        start, cause_of_start = 0.0, -1
        if previous >= 0:
            start, cause_of_start = events[event_of[previous]].end_s, event_of[previous]
        for source, link in net.needs[n]:
            sent = events[event_of[source]].end_s
            if sent + comm[link] > start:
                start, cause_of_start = sent + comm[link], event_of[source]
            if comm[link] > 0:
                name = f"send {net.action[source]}"
                events.append(Event(net.group[source], "comm", name, sent, sent + comm[link]))
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
