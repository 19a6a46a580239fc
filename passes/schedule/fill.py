"""Puts the W actions of a zero-bubble schedule where they hurt least, for a given order of F and B on every group.

W has no reader, so it can wait: it fills the gaps in which a group would stand idle (Qi et al., Zero Bubble Pipeline
Parallelism, ICLR 2024, section 3.1). Walking through the rows in the order of their dependencies:

  * before an F or B that would not fit, W of the oldest microbatches make room;
  * a gap that a whole W fits into takes it;
  * a shorter gap stays idle while the group's idle seconds are within `budget`, else it takes a W too, which delays
    what follows;
  * what is left runs at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.passes.schedule.timed_pipeline import Step, TimedPipeline, TimedTable

Code = tuple[bool, int, int]
"""(is a B, microbatch, stage)."""


def order_of(rows: Sequence[Sequence[Step]]) -> list[list[Code]]:
    """The actions of rows without their W."""
    return [[(kind == "B", k, s) for kind, k, s in row if kind != "W"] for row in rows]


@dataclass
class _Row:
    """The actions that one group has run so far, and its clock. owed: (stage, microbatch) of the W that wait; held: bytes."""

    now: float = 0.0
    first: float = -1.0
    idle: float = 0.0
    held: float = 0.0
    steps: list[Step] = field(default_factory=list)
    owed: deque[tuple[int, int]] = field(default_factory=deque)


def fill(pipeline: TimedPipeline, rows: Sequence[Sequence[Code]], budget: float) -> TimedTable | None:
    """The table of these rows of F and B with W put in; None when an F or B fits nowhere or the order deadlocks."""
    return _Filling(pipeline, rows, budget).table()


class _Filling:
    """One walk through rows of F and B. waiting: groups by the action of another group that they wait for."""

    def __init__(self, pipeline: TimedPipeline, rows: Sequence[Sequence[Code]], budget: float) -> None:
        self.pipeline, self.rows, self.budget = pipeline, rows, budget
        self.end_F, self.end_B = ([[-1.0] * pipeline.m for _ in range(pipeline.graph.stages)] for _ in "FB")
        self.made = [_Row() for _ in rows]
        self.waiting: dict[Code, list[int]] = {}

    def table(self) -> TimedTable | None:
        """Walks every row as far as its arrivals allow, and on when they are there; what W is left runs at the end."""
        cursor, pending = [0] * len(self.rows), list(range(len(self.rows)))
        while pending:
            g = pending.pop()
            while cursor[g] < len(self.rows[g]):
                code = self.rows[g][cursor[g]]
                ready = self._ready(g, code)
                if ready is None:
                    break
                if not self._run(g, code, ready):
                    return None
                cursor[g] += 1
                if self.waiting:
                    pending.extend(j for j in self.waiting.pop(code, ()) if j != g)
        if any(n < len(row) for n, row in zip(cursor, self.rows, strict=True)):
            return None
        for row in self.made:
            while row.owed:
                self._run_W(row)
        spans_s = tuple(row.now - row.first for row in self.made)
        return TimedTable([row.steps for row in self.made], spans_s, max(row.now for row in self.made))

    def _ready(self, g: int, code: Code) -> float | None:
        """When all that an action reads is there; None where something has not run, for which the group waits then."""
        back, mb, s = code
        ready = self.end_F[s][mb] if back else 0.0
        if ready < 0:
            return None
        ends = self.end_B if back else self.end_F
        for u, comm in self.pipeline.returns[s] if back else self.pipeline.feeds[s]:
            sent = ends[u][mb]
            if sent < 0:
                self.waiting.setdefault((back, mb, u), []).append(g)
                return None
            if sent + comm > ready:
                ready = sent + comm
        return ready

    def _run(self, g: int, code: Code, ready: float) -> bool:
        """Runs an F or B, after the W that must or should go before it; False where it does not fit."""
        (back, mb, s), row, room = code, self.made[g], self.pipeline.room
        more = room.later[s] - room.after_F[s] if back else room.after_F[s]
        if not self._make_room(row, room.bound[g] * (1 + 1e-9) - more):
            return False
        self._fill_gap(row, ready)
        if row.now < ready:
            if row.first >= 0:
                row.idle += ready - row.now
            row.now = ready
        if row.first < 0:
            row.first = row.now
        row.steps.append(("B" if back else "F", mb, s))
        if back:
            row.now = self.end_B[s][mb] = row.now + self.pipeline.b[s]
            row.owed.append((s, mb))
        else:
            row.now = self.end_F[s][mb] = row.now + self.pipeline.f[s]
        row.held += more
        return True

    def _make_room(self, row: _Row, limit: float) -> bool:
        """Runs W until no more than `limit` is held; whether that can be."""
        while row.held > limit and row.owed:
            self._run_W(row)
        return row.held <= limit

    def _fill_gap(self, row: _Row, ready: float) -> None:
        """Runs W before `ready`: those that fit, and a longer one where the group has idled enough."""
        while row.now < ready and row.owed:
            over = row.now + self.pipeline.w[row.owed[0][0]] > ready * (1 + 1e-12)
            if over and row.idle + ready - row.now <= self.budget:
                break
            self._run_W(row)

    def _run_W(self, row: _Row) -> None:
        s, mb = row.owed.popleft()
        row.steps.append(("W", mb, s))
        row.now += self.pipeline.w[s]
        row.held -= self.pipeline.room.later[s]
