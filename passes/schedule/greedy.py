"""List scheduling of F, B and W: in the order of time, every free group chooses among what it could run.

B comes first, because other groups wait for it; then F, as far as memory and the stage's allowance of microbatches in
flight go; then W, which nobody waits for. A group sees arrivals ahead that are under way already: it does not start what
would delay an arriving B by more than the policy's `patience`, and takes a W, or stays idle, instead.

With two stages per group, the first leaves room for the second, so that a started microbatch can always come back: the
oldest microbatch that is not through finds its room on every group, so the schedule never gets stuck.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from autopar.passes.schedule.pipeline import Pipeline, Step, Timed

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


def greedy(pipeline: Pipeline, policy: Policy) -> Timed | None:
    """The table that the policy makes; None when it gets stuck."""
    graph, m, room = pipeline.graph, pipeline.m, pipeline.room
    p, n = len(graph.groups), graph.stages
    owner = graph.group_of
    f, b, w, feeds, returns = pipeline.f, pipeline.b, pipeline.w, pipeline.feeds, pipeline.returns
    wakes = [sorted({owner[v] for v in graph.readers[s]}) for s in range(n)]
    wakes_b = [sorted({owner[u] for u in graph.credits[s]}) for s in range(n)]
    end_f, end_b = [[NEVER] * m for _ in range(n)], [[NEVER] * m for _ in range(n)]
    next_f, next_b = [0] * n, [0] * n
    reserve = [max((room.after_F[x] for x in graph.groups[owner[s]] if x > s), default=0.0) for s in range(n)]
    order = [tuple(reversed(g)) if policy.deep else g for g in graph.groups]
    free, first, held = [0.0] * p, [NEVER] * p, [0.0] * p
    todo: list[list[tuple[int, int]]] = [[] for _ in range(p)]
    taken = [0] * p
    made: list[list[Step]] = [[] for _ in range(p)]
    bound = [x * (1 + 1e-9) for x in room.bound]
    events = [(0.0, g) for g in range(p)]
    left = 2 * m * n
    ready_f, ready_b = [0.0 if not feeds[s] else NEVER for s in range(n)], [NEVER] * n

    def see_f(s: int) -> None:
        k, at = next_f[s], 0.0
        if k < m:
            for u, comm in feeds[s]:
                at = max(at, end_f[u][k] + comm)
        ready_f[s] = at if k < m else NEVER

    def see_b(s: int) -> None:
        k = next_b[s]
        at = end_f[s][k] if k < m else NEVER
        if at < NEVER:
            for v, comm in returns[s]:
                at = max(at, end_b[v][k] + comm)
        ready_b[s] = at

    while events and left:
        now, g = heapq.heappop(events)
        if now < free[g]:
            continue
        tiny = now * 1e-12
        coming_b = coming_f = NEVER
        pick_b = pick_f = -1
        for s in order[g]:
            at = ready_b[s]
            if at <= now + tiny:
                if pick_b < 0:
                    pick_b = s
            elif at < coming_b:
                coming_b = at
            at = ready_f[s]
            if at < NEVER and held[g] + room.after_F[s] + reserve[s] <= bound[g]:
                if next_f[s] - next_b[s] < policy.flight[s]:
                    if at <= now + tiny:
                        if pick_f < 0:
                            pick_f = s
                    elif at < coming_f:
                        coming_f = at
        queue, at_w = todo[g], taken[g]
        if pick_b >= 0:
            s = pick_b
            k = next_b[s]
            end = end_b[s][k] = now + b[s]
            next_b[s] += 1
            see_b(s)
            for u in graph.credits[s]:
                if next_b[u] == k:
                    see_b(u)
            made[g].append(("B", k, s))
            held[g] += room.later[s] - room.after_F[s]
            queue.append((s, k))
            left -= 1
            targets = wakes_b[s]
        elif pick_f >= 0 and now + f[pick_f] <= coming_b + policy.patience_F * f[pick_f] + tiny:
            s = pick_f
            k = next_f[s]
            end = end_f[s][k] = now + f[s]
            next_f[s] += 1
            see_f(s)
            if next_b[s] == k:
                see_b(s)
            for v in graph.readers[s]:
                if next_f[v] == k:
                    see_f(v)
            made[g].append(("F", k, s))
            held[g] += room.after_F[s]
            left -= 1
            targets = wakes[s]
        elif at_w < len(queue):
            s, k = queue[at_w]
            late = now + w[s] - policy.patience_W * w[s] - tiny
            if late > coming_b or (late > coming_f and policy.idle > 0):
                heapq.heappush(events, (min(coming_b, coming_f), g))
                continue
            taken[g] += 1
            end = now + w[s]
            made[g].append(("W", k, s))
            held[g] -= room.later[s]
            targets = []
        else:
            at = min(coming_b, coming_f)
            if at < NEVER:
                heapq.heappush(events, (at, g))
            continue
        if first[g] == NEVER:
            first[g] = now
        free[g] = end
        heapq.heappush(events, (end, g))
        for j in targets:
            if j != g:
                heapq.heappush(events, (end, j))
    if left:
        return None
    for g in range(p):
        for s, k in todo[g][taken[g] :]:
            made[g].append(("W", k, s))
            free[g] += w[s]
    return Timed(made, tuple(x - y for x, y in zip(free, first, strict=True)), max(free))
