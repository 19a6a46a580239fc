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
from dataclasses import dataclass

from autopar.passes.schedule.timed_pipeline import Step, TimedPipeline, TimedTable

NEVER = float("inf")


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


def greedy(pipeline: TimedPipeline, policy: Policy, longest_s: float = NEVER) -> TimedTable | None:
    """The table that the policy makes; None when it gets stuck, or a group would take longer than `longest_s`."""
    return _ListScheduler(pipeline, policy, longest_s).table()


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
        self.owner = owner = graph.group_of
        self.readers, self.credits = graph.readers, graph.credits
        self.order = [tuple(reversed(g)) if policy.deep else g for g in graph.groups]
        self.bound = [x * (1 + 1e-9) for x in pipeline.room.bound]
        growth = list(map(pipeline.room.growth, graph.groups))
        self.reserve = [
            max((self.after_F[x] for x in graph.groups[owner[s]] if x > s), default=0.0) + growth[owner[s]]
            for s in range(n)
        ]
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
        s, coming_B = self._arrived_B(g, now + tiny)
        if s >= 0:
            if self.owed[g] and self.held[g] + self.after_B[s] - self.after_F[s] > self.bound[g]:
                return self._run_W(g, now)
            return self._run_B(g, s, now)
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

    def _arrived_B(self, g: int, now: float) -> tuple[int, float]:
        """(the first stage of a group that may run B, or -1; when the next B arrives)."""
        coming, ready = NEVER, self.ready_B
        for s in self.order[g]:
            at = ready[s]
            if at <= now:
                return s, coming
            if at < coming:
                coming = at
        return -1, coming

    def _arrived_F(self, g: int, now: float) -> tuple[int, float]:
        """(the first stage of a group that may run F within memory and allowance, or -1; when the next F arrives)."""
        chosen, coming = -1, NEVER
        for s in self.order[g]:
            at = self.ready_F[s]
            if at == NEVER or self.next_F[s] - self.next_B[s] >= self.policy.flight[s]:
                continue
            if self.held[g] + self.after_F[s] + self.reserve[s] > self.bound[g]:
                continue
            if at > now:
                coming = min(coming, at)
            elif chosen < 0:
                chosen = s
        return chosen, coming

    def _run_F(self, g: int, s: int, now: float) -> None:
        k = self.next_F[s]
        end = self.end_F[s][k] = now + self.f[s]
        self.next_F[s] += 1
        self._see_F(s)
        if self.next_B[s] == k:
            self._see_B(s)
        for v in self.readers[s]:
            if self.next_F[v] == k:
                self._see_F(v)
                self._look_again(v, self.ready_F[v])
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
                self._see_B(u)
                self._look_again(u, self.ready_B[u])
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
        """The group of a stage looks again when something arrives, if it is free then."""
        if arrival < NEVER:
            heapq.heappush(self.events, (arrival, self.owner[s]))

    def _see_F(self, s: int) -> None:
        """Note when the next F of a stage has all that it reads."""
        k, at = self.next_F[s], 0.0
        if k < self.m:
            for u, comm in self.pipeline.feeds[s]:
                at = max(at, self.end_F[u][k] + comm)
        self.ready_F[s] = at if k < self.m else NEVER

    def _see_B(self, s: int) -> None:
        """Note when the next B of a stage has its own F and the gradients that it reads."""
        k = self.next_B[s]
        at = self.end_F[s][k] if k < self.m else NEVER
        if at < NEVER:
            for v, comm in self.pipeline.returns[s]:
                at = max(at, self.end_B[v][k] + comm)
        self.ready_B[s] = at
