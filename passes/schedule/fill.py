"""Puts the W actions of a zero-bubble schedule where they hurt least, for a given order of F and B on every group.

W has no reader, so it can wait: it fills the gaps in which a group would stand idle (Qi et al., Zero Bubble Pipeline
Parallelism, ICLR 2024, section 3.1). Walking through the rows in the order of their dependencies:

  * before an F that would not fit, W of the oldest microbatches make room;
  * a gap that a whole W fits into takes it;
  * a shorter gap stays idle while the group's idle seconds are within `budget`, else it takes a W too, which delays
    what follows;
  * what is left runs at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.passes.schedule.pipeline import Pipeline, Step, Timed

Code = tuple[bool, int, int]
"""(is a B, microbatch, stage)."""


def order_of(rows: Sequence[Sequence[Step]]) -> list[list[Code]]:
    """Rows without W."""
    return [[(kind == "B", k, s) for kind, k, s in row if kind != "W"] for row in rows]


def fill(pipeline: Pipeline, rows: Sequence[Sequence[Code]], budget: float) -> Timed | None:
    """The table of these rows of F and B with W put in; None when an F fits nowhere or the order deadlocks."""
    graph, m = pipeline.graph, pipeline.m
    p = len(rows)
    end_f = [[-1.0] * m for _ in range(graph.stages)]
    end_b = [[-1.0] * m for _ in range(graph.stages)]
    now, first, idle, held = [0.0] * p, [-1.0] * p, [0.0] * p, [0.0] * p
    made: list[list[Step]] = [[] for _ in range(p)]
    todo: list[list[tuple[int, int]]] = [[] for _ in range(p)]
    taken, cursor, pending = [0] * p, [0] * p, list(range(p))
    waiting: dict[Code, list[int]] = {}
    left = sum(map(len, rows))
    after_F, later, bound, w = pipeline.room.after_F, pipeline.room.later, pipeline.room.bound, pipeline.w
    while pending:
        g = pending.pop()
        row, n, out, t, queue, at = rows[g], cursor[g], made[g], now[g], todo[g], taken[g]
        while n < len(row):
            back, mb, s = row[n]
            ready = end_f[s][mb] if back else 0.0
            missing = ready < 0
            if not missing:
                ends = end_b if back else end_f
                for u, comm in pipeline.returns[s] if back else pipeline.feeds[s]:
                    sent = ends[u][mb]
                    if sent < 0:
                        waiting.setdefault((back, mb, u), []).append(g)
                        missing = True
                        break
                    if sent + comm > ready:
                        ready = sent + comm
            if missing:
                break
            if not back:
                limit = bound[g] * (1 + 1e-9) - after_F[s]
                while held[g] > limit and at < len(queue):
                    x, y = queue[at]
                    at += 1
                    out.append(("W", y, x))
                    t += w[x]
                    held[g] -= later[x]
                if held[g] > limit:
                    return None
            while t < ready and at < len(queue):
                x, y = queue[at]
                if t + w[x] > ready * (1 + 1e-12) and idle[g] + ready - t <= budget:
                    break
                at += 1
                out.append(("W", y, x))
                t += w[x]
                held[g] -= later[x]
            if t < ready:
                if first[g] >= 0:
                    idle[g] += ready - t
                t = ready
            if first[g] < 0:
                first[g] = t
            if back:
                out.append(("B", mb, s))
                t += pipeline.b[s]
                end_b[s][mb] = t
                held[g] += later[s] - after_F[s]
                queue.append((s, mb))
            else:
                out.append(("F", mb, s))
                t += pipeline.f[s]
                end_f[s][mb] = t
                held[g] += after_F[s]
            n += 1
            left -= 1
            if waiting:
                pending.extend(j for j in waiting.pop((back, mb, s), ()) if j != g)
        cursor[g], now[g], taken[g] = n, t, at
    if left:
        return None
    for g in range(p):
        for x, y in todo[g][taken[g] :]:
            made[g].append(("W", y, x))
            now[g] += w[x]
    return Timed(made, tuple(b - a for a, b in zip(first, now, strict=True)), max(now))
