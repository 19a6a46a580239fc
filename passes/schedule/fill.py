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

from autopar.costmodel.simulate import link_seconds
from autopar.ir.actions import StageGraph
from autopar.passes.schedule.timed_pipeline import Step, TimedPipeline, TimedTable
from autopar.runtime.program.actions import Replay, replay


def without_W(graph: StageGraph, rows: Sequence[Sequence[Step]]) -> Replay[Step]:
    """The F and B of rows, every one after all that it reads."""
    return replay([[step for step in row if step[0] != "W"] for row in rows], graph.reads[0])


@dataclass
class _Row:
    """The actions that one group has run so far, and its clock. owed: (stage, microbatch) of the W that wait; held: bytes."""

    now: float = 0.0
    first: float = -1.0
    idle: float = 0.0
    held: float = 0.0
    steps: list[Step] = field(default_factory=list)
    owed: deque[tuple[int, int]] = field(default_factory=deque)


def fill(pipeline: TimedPipeline, order: Replay[Step], budget: float) -> TimedTable | None:
    """The table of F and B in this order with W put in; None when one of them fits nowhere or the order deadlocks."""
    return None if order.stuck else _Filling(pipeline, order, budget).table()


class _Filling:
    """One walk through the F and B of all rows."""

    def __init__(self, pipeline: TimedPipeline, order: Replay[Step], budget: float) -> None:
        self.pipeline, self.order, self.budget = pipeline, order, budget
        self.made = [_Row() for _ in pipeline.graph.groups]

    def table(self) -> TimedTable | None:
        """Runs F and B as their arrivals allow; the W that are left run at the end."""
        order, graph = self.order, self.pipeline.graph
        link_s = link_seconds(graph.reads[1], self.pipeline.costs.comm_s)
        ends: list[float] = []
        for step, g, arrivals in zip(order.item, order.row, order.arrivals, strict=True):
            ready = max((ends[source] + link_s[link] for source, link in arrivals), default=0.0)
            if not self._run(g, step, ready):
                return None
            ends.append(self.made[g].now)
        for row in self.made:
            while row.owed:
                self._run_W(row)
        spans_s = tuple(row.now - row.first for row in self.made)
        return TimedTable([row.steps for row in self.made], spans_s, max(row.now for row in self.made))

    def _run(self, g: int, step: Step, ready: float) -> bool:
        """Runs an F or B, after the W that must or should go before it; False where it does not fit."""
        (kind, mb, s), row, room = step, self.made[g], self.pipeline.room
        back = kind == "B"
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
        row.steps.append(step)
        row.now += self.pipeline.b[s] if back else self.pipeline.f[s]
        if back:
            row.owed.append((s, mb))
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
