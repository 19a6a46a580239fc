"""An event simulator for pipeline schedules: action table + seconds -> timeline.

Every stage has a compute stream, which runs its actions in the table's order, and a communication stream. An action
starts when its stage is free and its input has arrived:

    start(F, v) >= end(F, v-1) + comm        start(B, v) >= end(B, v+1) + comm        start(W, v) >= end(B, v)

for virtual stages v; the last one's B waits for its own F. `comm` is paid only between different stages. A table
without W actions runs B and W as one block and sends the gradient at the end of the block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from autopar.errors import PlanError
from autopar.passes.schedule import Action, Table, build, virtual_stage

Durations = Mapping[tuple[int, str, int], float]
"""Seconds of (stage, kind, chunk)."""


@dataclass(frozen=True)
class Collective:
    """Work of a stage's communication stream: starts after `after`, and `before` waits for it (None: nothing waits)."""

    stage: int
    name: str
    seconds: float
    after: Action | None = None
    before: Action | None = None


@dataclass(frozen=True)
class Event:
    """One bar of the timeline, seconds from the start of the step."""

    stage: int
    stream: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What the simulator found. `busy_s[i]`: compute seconds of stage i; `critical_path` from first to last event."""

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    comm_s: tuple[float, ...]
    spans_s: tuple[float, ...]
    critical_path: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the step of the average stage."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 0.0

    @property
    def bubble_rate(self) -> float:
        """As in the zero-bubble paper: cost is the largest over stages of (last end - first start)."""
        cost = max(self.spans_s)
        return 1 - max(self.busy_s) / cost if cost else 0.0

    @property
    def exposed_comm_s(self) -> float:
        """Seconds by which communication lengthens the step beyond its busiest compute stream and the bubble."""
        ends = [e.end_s for e in self.events if e.stream == "compute"]
        return self.makespan_s - max(ends) if ends else 0.0

    def chrome_trace(self) -> str:
        """JSON in the Chrome trace format, which Perfetto opens; one process per stage, one thread per stream."""
        rows: list[dict[str, Any]] = []
        for stage in range(len(self.busy_s)):
            rows.append({"ph": "M", "pid": stage, "name": "process_name", "args": {"name": f"stage {stage}"}})
            for tid, stream in enumerate(("compute", "comm")):
                rows.append({"ph": "M", "pid": stage, "tid": tid, "name": "thread_name", "args": {"name": stream}})
        for e in self.events:
            tid = 0 if e.stream == "compute" else 1
            bar = {"ts": e.start_s * 1e6, "dur": (e.end_s - e.start_s) * 1e6}
            rows.append({"ph": "X", "pid": e.stage, "tid": tid, "name": e.name, "cat": e.stream, **bar})
        return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


@dataclass(frozen=True)
class _Graph:
    """A table's actions in an order in which every dependency comes first; -1 is none."""

    stage: tuple[int, ...]
    key: tuple[tuple[int, str, int], ...]
    action: tuple[Action, ...]
    before_on_stage: tuple[int, ...]
    needs: tuple[int, ...]
    sends: tuple[bool, ...]
    stages: int


def _graph(table: Table, placement: str = "") -> _Graph:
    p = len(table)
    chunks = 1 + max((a.chunk for acts in table for a in acts), default=0)
    last = p * chunks - 1
    at = {(i, c): virtual_stage(i, c, p, placement) for i in range(p) for c in range(chunks)}
    owner = {v: i for (i, _), v in at.items()}
    codes = [[(a.kind, at[i, a.chunk], a.microbatch, a) for a in acts] for i, acts in enumerate(table)]
    done: dict[tuple[str, int, int], int] = {}
    waiting: dict[tuple[str, int, int], int] = {}
    cursor, previous, pending = [0] * p, [-1] * p, list(range(p))
    rows: list[tuple[int, tuple[int, str, int], Action, int, int, bool]] = []
    while pending:
        i = pending.pop()
        acts, n, prev = codes[i], cursor[i], previous[i]
        while n < len(acts):
            kind, v, mb, action = acts[n]
            if kind == "F":
                need = ("F", v - 1, mb) if v else None
            elif kind == "B":
                need = ("B", v + 1, mb) if v < last else ("F", v, mb)
            else:
                need = ("B", v, mb)
            source = -1
            if need is not None:
                source = done.get(need, -1)
                if source < 0:
                    waiting[need] = i
                    break
            index = len(rows)
            rows.append((i, (i, kind, action.chunk), action, prev, source, need is not None and owner[need[1]] != i))
            done[kind, v, mb] = prev = index
            n += 1
            woken = waiting.pop((kind, v, mb), None)
            if woken is not None and woken != i:
                pending.append(woken)
        cursor[i], previous[i] = n, prev
    if len(rows) < sum(len(acts) for acts in table):
        stuck = [f"stage {i} waits before {table[i][cursor[i]]}" for i in range(p) if cursor[i] < len(table[i])]
        raise PlanError("the action table deadlocks: " + "; ".join(stuck[:4]))
    return _Graph(
        stage=tuple(r[0] for r in rows),
        key=tuple(r[1] for r in rows),
        action=tuple(r[2] for r in rows),
        before_on_stage=tuple(r[3] for r in rows),
        needs=tuple(r[4] for r in rows),
        sends=tuple(r[5] for r in rows),
        stages=p,
    )


@lru_cache(maxsize=256)
def _named_graph(name: str, p: int, m: int, V: int) -> _Graph:
    return _graph(build(name, p, m, V))


def named_makespan_s(name: str, p: int, m: int, V: int, durations: Durations, comm_s: float = 0.0) -> float:
    """`makespan_s` of a named schedule, its dependencies worked out once."""
    graph = _named_graph(name, p, m, V)
    return _longest(graph, _with_blocks(graph.action, durations), comm_s)


def _with_blocks(actions: Sequence[Action], durations: Durations) -> Durations:
    """Without W actions, B takes the seconds of B and W together."""
    if any(a.kind == "W" for a in actions):
        return durations
    return {(i, k, c): s + (durations.get((i, "W", c), 0.0) if k == "B" else 0.0) for (i, k, c), s in durations.items()}


def makespan_s(table: Table, durations: Durations, comm_s: float = 0.0, placement: str = "") -> float:
    """Seconds from the first start to the last end; the fast path of `simulate`."""
    graph = _graph(table, placement)
    return _longest(graph, _with_blocks(graph.action, durations), comm_s)


def _longest(graph: _Graph, seconds: Durations, comm_s: float) -> float:
    ends: list[float] = []
    append = ends.append
    for key, prev, need, sends in zip(graph.key, graph.before_on_stage, graph.needs, graph.sends, strict=True):
        start = ends[prev] if prev >= 0 else 0.0
        if need >= 0:
            arrived = ends[need] + comm_s if sends else ends[need]
            if arrived > start:
                start = arrived
        append(start + seconds[key])
    return max(ends)


def uniform(p: int, tf: float, tb: float, tw: float, V: int = 1) -> dict[tuple[int, str, int], float]:
    """Durations of p equal stages; tf, tb, tw are of a whole stage and are divided over its V chunks."""
    per = {"F": tf / V, "B": tb / V, "W": tw / V}
    return {(i, k, c): s for i in range(p) for c in range(V) for k, s in per.items()}


def simulate(
    table: Table,
    durations: Durations,
    comm_s: float = 0.0,
    placement: str = "",
    collectives: Sequence[Collective] = (),
) -> Timeline:
    """The timeline of one step. Raises PlanError when the table deadlocks or a duration is missing."""
    graph = _graph(table, placement)
    seconds = _with_blocks(graph.action, durations)
    p = graph.stages
    after: dict[tuple[int, Action | None], list[Collective]] = {}
    for c in collectives:
        after.setdefault((c.stage, c.after), []).append(c)
    comm_free = [0.0] * p
    gate: dict[tuple[int, Action], tuple[float, int]] = {}
    events: list[Event] = []
    cause: list[int] = []
    at: list[int] = []

    def run_collectives(stage: int, action: Action | None, now: float, why: int) -> None:
        for c in after.get((stage, action), ()):
            start = max(now, comm_free[stage])
            comm_free[stage] = start + c.seconds
            events.append(Event(stage, "comm", c.name, start, comm_free[stage]))
            cause.append(why)
            if c.before is not None:
                old = gate.get((stage, c.before), (0.0, -1))
                gate[stage, c.before] = max(old, (comm_free[stage], len(events) - 1))

    for i in range(p):
        run_collectives(i, None, 0.0, -1)
    for n, action in enumerate(graph.action):
        i, prev, need = graph.stage[n], graph.before_on_stage[n], graph.needs[n]
        start, why = 0.0, -1
        if prev >= 0:
            start, why = events[at[prev]].end_s, at[prev]
        if need >= 0:
            arrived = events[at[need]].end_s + (comm_s if graph.sends[n] else 0.0)
            if arrived > start:
                start, why = arrived, at[need]
            if graph.sends[n] and comm_s > 0:
                sender = graph.stage[need]
                name = f"send {graph.action[need]}"
                events.append(Event(sender, "comm", name, events[at[need]].end_s, events[at[need]].end_s + comm_s))
                cause.append(at[need])
        if (i, action) in gate and gate[i, action][0] > start:
            start, why = gate[i, action]
        if graph.key[n] not in seconds:
            raise PlanError(f"no duration for {graph.key[n]}; durations need (stage, kind, chunk) for every action")
        events.append(Event(i, "compute", str(action), start, start + seconds[graph.key[n]]))
        cause.append(why)
        at.append(len(events) - 1)
        run_collectives(i, action, events[-1].end_s, len(events) - 1)
    return _timeline(p, events, cause)


def _timeline(p: int, events: list[Event], cause: list[int]) -> Timeline:
    busy, comm, first, last = [0.0] * p, [0.0] * p, [float("inf")] * p, [0.0] * p
    for e in events:
        if e.stream == "comm":
            comm[e.stage] += e.end_s - e.start_s
            continue
        busy[e.stage] += e.end_s - e.start_s
        first[e.stage] = min(first[e.stage], e.start_s)
        last[e.stage] = max(last[e.stage], e.end_s)
    at = max(range(len(events)), key=lambda i: events[i].end_s)
    path = []
    walk = at
    while walk >= 0:
        path.append(events[walk])
        walk = cause[walk]
    spans = tuple(b - a for a, b in zip(first, last, strict=True))
    return Timeline(tuple(events), events[at].end_s, tuple(busy), tuple(comm), spans, tuple(reversed(path)))
