"""List scheduling of F, B and W: in the order of time, every free group chooses among what it could run.

B comes first, because other groups wait for it; then F, as far as memory and the stage's allowance of microbatches in
flight go; then W, which nobody waits for. A group sees arrivals ahead that are under way already: it does not start what
would delay an arriving B by more than the policy's `patience`, and takes a W, or stays idle, instead.

With two stages per group, the first leaves room for the second, so that a started microbatch can always come back: the
oldest microbatch that is not through finds its room on every group, so the schedule never gets stuck. Where a B keeps more
than its F did, F leave room for one such B, and W of others make room for the next.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from autopar.passes.schedule.timed_pipeline import Step, TimedPipeline, TimedTable

NEVER = float("inf")
_SLACK = 1e-3
"""The share of a microbatch that may be missing in the room for it: more than sums of bytes are rounded by."""


@dataclass(frozen=True)
class Policy:
    """flight[s]: most microbatches of a stage between F and B. patience_F, patience_W: how late an arriving B may start
    because of an F or a W, as a share of its seconds. idle: whether a W waits for an arriving F as it does for a B.
    deep: whether the later of two stages on a group goes first.
    """

    flight: tuple[int, ...]
    patience_F: float = 1.0
    patience_W: float = 0.0
    idle: float = 1.0
    deep: bool = True


@dataclass(frozen=True)
class _Run:
    """The table that a policy made (None: it got stuck, or took longer than `longest_s`), and in which rooms it makes the same:
    per group the most bytes for which there was room, and the least for which there was none."""

    timed: TimedTable | None
    longest_s: float
    had_room: Sequence[float]
    had_none: Sequence[float]

    def is_of(self, bound: Sequence[float], longest_s: float) -> bool:
        """Whether the policy makes this in another room too, and as far as so many seconds of a group."""
        alike = all(had <= x < lacked for had, x, lacked in zip(self.had_room, bound, self.had_none, strict=True))
        return alike and (self.timed is not None or longest_s <= self.longest_s)


def greedy(pipeline: TimedPipeline, policy: Policy, longest_s: float = NEVER) -> TimedTable | None:
    """The table that the policy makes; None when it gets stuck, or a group would take longer than `longest_s`.

    A policy whose choices another room does not change is not run again in that (`ActionCosts.memo`).
    """
    room, bound = pipeline.room, _bounds(pipeline)
    key = _Run, pipeline.graph, pipeline.m, room.after_F, room.later, policy
    runs = pipeline.costs.memo.get(key, list[_Run])
    run = next((run for run in runs if run.is_of(bound, longest_s)), None)
    if run is None:
        scheduler = _ListScheduler(pipeline, policy, longest_s)
        run = _Run(scheduler.table(), longest_s, scheduler.had_room, scheduler.had_none)
        runs.append(run)
    return run.timed if run.timed is not None and max(run.timed.spans_s) <= longest_s else None


def _bounds(pipeline: TimedPipeline) -> list[float]:
    """Bytes that every group may hold, with what sums of bytes are rounded by."""
    return [x * (1 + 1e-9) for x in pipeline.room.bound]


def most_in_flight(pipeline: TimedPipeline) -> list[int]:
    """Microbatches of every stage that the room of its group lets between F and B at most, as many as there are where that is no
    matter."""
    bounds = (pipeline.room.bound[g] for _, g in sorted(pipeline.graph.group_of.items()))
    return [
        max(min(pipeline.m, floor(_SLACK + (bound - reserve) / held)), 1) if held > 0 else pipeline.m
        for bound, held, reserve in zip(bounds, pipeline.room.after_F, _reserves(pipeline), strict=True)
    ]


def _reserves(pipeline: TimedPipeline) -> list[float]:
    """Bytes that the F of every stage leaves free: for the F of a later stage of its group, and for a B that keeps more than its
    F did."""
    graph, room = pipeline.graph, pipeline.room
    return [
        max((room.after_F[x] for x in graph.groups[g] if x > s), default=0.0) + room.growth(graph.groups[g])
        for s, g in sorted(graph.group_of.items())
    ]


class _ListScheduler:
    """One run of list scheduling.

    Per stage: next_F, next_B count what has started, end_F, end_B say when each microbatch ends, and ready_F, ready_B when
    the next one may start as far as arrivals go. Per group: when it is free, when it began, what it holds, the W it owes, how
    long it may still be idle.
    """

    def __init__(self, pipeline: TimedPipeline, policy: Policy, longest_s: float) -> None:
        graph, n, p = pipeline.graph, pipeline.graph.stages, len(pipeline.graph.groups)
        self.pipeline, self.policy, self.m = pipeline, policy, pipeline.m
        self.f, self.b, self.w = pipeline.f, pipeline.b, pipeline.w
        self.after_F, self.after_B = pipeline.room.after_F, pipeline.room.later
        self.owner = graph.group_of
        self.readers, self.credits = graph.readers, graph.credits
        self.feeds, self.returns = pipeline.feeds, pipeline.returns
        self.order = [tuple(reversed(g)) if policy.deep else g for g in graph.groups]
        self.bound = _bounds(pipeline)
        self.had_room, self.had_none = [0.0] * p, [NEVER] * p
        self.reserve = _reserves(pipeline)
        self.next_F, self.next_B = [0] * n, [0] * n
        self.end_F, self.end_B = ([[NEVER] * self.m for _ in range(n)] for _ in "FB")
        self.ready_F, self.ready_B = [NEVER if pipeline.feeds[s] else 0.0 for s in range(n)], [NEVER] * n
        self.free, self.first, self.held = [0.0] * p, [NEVER] * p, [0.0] * p
        self.owed: list[deque[tuple[int, int]]] = [deque() for _ in range(p)]
        self.rows: list[list[Step]] = [[] for _ in range(p)]
        self.events = [(0.0, g) for g in range(p)]
        self.left: float = 2 * self.m * n
        work_s = [f + b + w for f, b, w in zip(pipeline.f, pipeline.b, pipeline.w, strict=True)]
        self.idle_left = [longest_s - self.m * sum(work_s[s] for s in stages) for stages in graph.groups]

    def table(self) -> TimedTable | None:
        """Runs groups in the order of time until every F and B has run; the W left over at the end."""
        while self.events and self.left:
            now, g = heapq.heappop(self.events)
            if now >= self.free[g]:
                self._choose(g, now)
        if self.left:
            return None
        for g, owed in enumerate(self.owed):
            for s, k in owed:
                self.rows[g].append(("W", k, s))
                self.free[g] += self.w[s]
        spans_s = tuple(end - first for end, first in zip(self.free, self.first, strict=True))
        return TimedTable(self.rows, spans_s, max(self.free))

    def _choose(self, g: int, now: float) -> None:
        """Starts what the policy prefers on a free group; with nothing to start, the group looks again at an arrival."""
        policy, tiny = self.policy, now * 1e-12
        coming_B = NEVER
        for s in self.order[g]:
            at = self.ready_B[s]
            if at <= now + tiny:
                if self.owed[g] and not self._has_room(g, self.held[g] + self.after_B[s] - self.after_F[s]):
                    return self._run_W(g, now)
                return self._run_B(g, s, now)
            if at < coming_B:
                coming_B = at
        s, coming_F = self._arrived_F(g, now + tiny)
        f, w = self.f, self.w
        if s >= 0 and now + f[s] <= coming_B + policy.patience_F * f[s] + tiny:
            return self._run_F(g, s, now)
        if self.owed[g]:
            s, _ = self.owed[g][0]
            late = now + w[s] - policy.patience_W * w[s] - tiny
            if late <= coming_B and (late <= coming_F or policy.idle <= 0):
                return self._run_W(g, now)
        arrival = min(coming_B, coming_F)
        if arrival < NEVER:
            heapq.heappush(self.events, (arrival, g))

    def _arrived_F(self, g: int, now: float) -> tuple[int, float]:
        """(the first stage of a group that may run F within memory and allowance, or -1; when the next F arrives)."""
        chosen, coming = -1, NEVER
        for s in self.order[g]:
            at = self.ready_F[s]
            if at == NEVER or self.next_F[s] - self.next_B[s] >= self.policy.flight[s]:
                continue
            if not self._has_room(g, self.held[g] + self.after_F[s] + self.reserve[s]):
                continue
            if at > now:
                coming = min(coming, at)
            elif chosen < 0:
                chosen = s
        return chosen, coming

    def _has_room(self, g: int, nbytes: float) -> bool:
        """Whether a group may hold so much."""
        if nbytes > self.bound[g]:
            if nbytes < self.had_none[g]:
                self.had_none[g] = nbytes
            return False
        if nbytes > self.had_room[g]:
            self.had_room[g] = nbytes
        return True

    def _run_F(self, g: int, s: int, now: float) -> None:
        k = self.next_F[s]
        end = self.end_F[s][k] = now + self.f[s]
        self.next_F[s] += 1
        self._see_F(s)
        if self.next_B[s] == k:
            self._see_B(s)
        for v in self.readers[s]:
            if self.next_F[v] == k:
                self._look_again(v, self._see_F(v))
        self.rows[g].append(("F", k, s))
        self.held[g] += self.after_F[s]
        self.left -= 1
        self._occupy(g, now, end)

    def _run_B(self, g: int, s: int, now: float) -> None:
        k = self.next_B[s]
        end = self.end_B[s][k] = now + self.b[s]
        self.next_B[s] += 1
        self._see_B(s)
        for u in self.credits[s]:
            if self.next_B[u] == k:
                self._look_again(u, self._see_B(u))
        self.rows[g].append(("B", k, s))
        self.held[g] += self.after_B[s] - self.after_F[s]
        self.owed[g].append((s, k))
        self.left -= 1
        self._occupy(g, now, end)

    def _run_W(self, g: int, now: float) -> None:
        s, k = self.owed[g].popleft()
        self.rows[g].append(("W", k, s))
        self.held[g] -= self.after_B[s]
        self._occupy(g, now, now + self.w[s])

    def _occupy(self, g: int, now: float, end: float) -> None:
        """The group is busy until `end`, when it looks again."""
        if self.first[g] == NEVER:
            self.first[g] = now
        elif now > self.free[g]:
            self.idle_left[g] -= now - self.free[g]
        if self.idle_left[g] < 0:
            self.left = NEVER
            self.events.clear()
            return
        self.free[g] = end
        heapq.heappush(self.events, (end, g))

    def _look_again(self, s: int, arrival: float) -> None:
        """The group of a stage looks again when something arrives, if it may be free then: what it runs now it ends before."""
        g = self.owner[s]
        if self.free[g] <= arrival < NEVER:
            heapq.heappush(self.events, (arrival, g))

    def _see_F(self, s: int) -> float:
        """Note when the next F of a stage has all that it reads."""
        k, at = self.next_F[s], 0.0
        if k < self.m:
            for u, comm in self.feeds[s]:
                arrives = self.end_F[u][k] + comm
                if arrives > at:
                    at = arrives
        else:
            at = NEVER
        self.ready_F[s] = at
        return at

    def _see_B(self, s: int) -> float:
        """Note when the next B of a stage has its own F and the gradients that it reads."""
        k = self.next_B[s]
        at = self.end_F[s][k] if k < self.m else NEVER
        if at < NEVER:
            for v, comm in self.returns[s]:
                arrives = self.end_B[v][k] + comm
                if arrives > at:
                    at = arrives
        self.ready_B[s] = at
        return at
