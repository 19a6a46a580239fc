"""A run goes on under another of its program's plans, from a save on, where machines turned out to be slower than described.

`program.save(OUT, slower=[2, 3])` writes plans for slower machines beside the program: their stages are cut so that a slow one
has less to do. Stages, and what rests of them, cannot move in the middle of a step, but a checkpoint loads under any plan. So at
a save all ranks compare the predicted seconds of every plan (`step/paced.py`) under the speeds that they told each other last:

    expected =  measured seconds of a step · predicted of the other plan / predicted of the present one
    saved    =  (measured seconds of a step - expected) · steps that are left
    moves    where measured  >  BETTER · expected  and  saved  >  MARGIN · seconds of a start,  IN_A_ROW times

The run then ends after that save, torchrun starts its workers again, and these take the plan that `learned.json` names. Losses
are those of an undisturbed run, as they are under any plan. Where torchrun has too few restarts left, the next start takes
that plan.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from ..data.schema import SchemaError, integer, listed, number
from ..program.manifest import MOST_SLOWER, Manifest
from ..step.paced import BETTER, PacedPlan, seconds_at
from ..step.rebalance import Rebalancer
from .learned_speeds import LearnedSpeeds, PlanChange, read_learned
from .loaded import LoadedProgram
from .spares import MOVED
from .stop import Stop
from .train_loop import Done, Listener, Loop, tell

MARGIN, IN_A_ROW = 2.0, 2
CHANGED = 1.3
"""How many times as slow as it was, beside the fastest, a rank is at least for its speed to have changed."""
KEPT_RESTARTS = 1
"""Restarts of torchrun that are left to failures."""
RESTART_S = 10.0
"""Seconds, beside those that this start took, in which torchrun starts workers again and these import what they need."""


def plan_of_run(manifest: Manifest, store: dist.Store, rank: int, root: Path) -> Manifest:
    """The manifest of the plan under which a run goes on: all ranks take the one that rank 0 finds in its directory. store: of
    this round. Raises RuntimeProgramError."""
    if not manifest.slower:
        return manifest
    if rank == 0:
        try:
            learned = read_learned(root)
        except (SchemaError, OSError):  # which is said when speeds are read
            learned = None
        store.set("plan", str(learned.plan if learned is not None and learned.plan <= manifest.slower else 0))
    place = integer(0, MOST_SLOWER)(int(store.get("plan")), "")
    return manifest.under(place) if place else manifest


@dataclass(frozen=True)
class Costs:
    """The costs of plans, as they are compared at a save. seconds: predicted of a step at the measured speeds, by plan; present:
    the plan of the run; step_s: measured of a step; left: steps; start_s: of a start; tried: measured seconds of a step under
    plans that the run left; changed: whether speeds did since the run goes on under the present one."""

    seconds: Sequence[float]
    present: int
    step_s: float
    left: int
    start_s: float
    tried: Mapping[int, float] = field(default_factory=dict)
    changed: bool = True

    def expected_s(self, place: int) -> float:
        """Seconds of a step under a plan, in measured ones. A plan that the run left takes what it took, while speeds are the
        same: predictions that err about a stage look like a slow rank, and would send a run back and forth."""
        if place in self.tried and not self.changed:
            return self.tried[place]
        return self.step_s * self.seconds[place] / self.seconds[self.present]

    def best(self) -> tuple[int, float]:
        """The place of the plan that pays, the present one where none does, and the seconds that the steps which are left take
        less under it."""
        places = [place for place in range(len(self.seconds)) if place != self.present]
        place = min(places, key=self.expected_s)
        saved_s = (self.step_s - self.expected_s(place)) * self.left
        pays = self.step_s > BETTER * self.expected_s(place) and saved_s > MARGIN * self.start_s
        return (place, saved_s) if pays else (self.present, 0.0)


class OtherPlans(Listener):
    """Compares plans at saves, and ends a run that is to go on under another one."""

    def __init__(
        self, program: LoadedProgram, own: Rebalancer, learning: LearnedSpeeds, stop: Stop, start_s: float
    ) -> None:
        """start_s: seconds that this start has taken so far."""
        manifest = program.manifest
        home = Manifest.read(manifest.home or manifest.directory)
        every = [home, *(home.under(place + 1) for place in range(home.slower))]
        self._present = next(k for k, one in enumerate(every) if one.directory == manifest.directory)
        self._places = [one.placement or tuple(range(manifest.world_size)) for one in every]
        plans = [PacedPlan.of(one.load_pipeline()) for one in every]
        self._plans = [plan for plan in plans if plan is not None and plan.ranks == manifest.world_size]
        self._comparable = len(self._plans) == len(every) > 1
        self._comm, self._own, self._learning, self._stop = program.session.comm, own, learning, stop
        self._start_s, self._next = start_s, self._present
        self._judged, self._in_a_row = own.alone_s, 0
        self._seconds, self._first = list[float](), list[float]()

    def on_loss(self, loop: Loop, done: Done) -> bool:
        """Keep the seconds of a step; those of the first one belong to the start."""
        self._start_s += 0.0 if self._seconds else done.seconds
        self._seconds.append(done.seconds)
        return False

    def save(self, loop: Loop) -> None:
        """Compare plans, where ranks told each other something since the last save, and none asked to end meanwhile."""
        if not self._comparable or self._own.alone_s is self._judged or loop.last < loop.steps:
            return
        self._judged = self._own.alone_s
        told = self._comm.share(
            [statistics.median(self._seconds[1:] or self._seconds), self._start_s + RESTART_S, float(_restarts())],
            listed(number(0, 1e9)),
        )
        del self._seconds[1:]
        step_s, start_s, restarts = told[0][0], told[0][1], min(restarts for *_, restarts in told)
        slowness, tried = self._learning.slowness(), {one.before: one.step_s for one in self._learning.changes}
        self._first = self._first or slowness
        seconds, changed = seconds_at(self._plans, self._places, slowness), _differ(self._first, slowness)
        costs = Costs(seconds, self._present, step_s, loop.steps - loop.step, start_s, tried, changed)
        best, saved_s = costs.best()
        self._in_a_row = self._in_a_row + 1 if best != self._present else 0
        if self._in_a_row < IN_A_ROW or best == self._next:
            return
        self._next = best
        expected_s = seconds[self._present] * costs.expected_s(best) / step_s
        change = PlanChange(
            loop.step, self._present, best, seconds[self._present], expected_s, step_s, saved_s, start_s
        )
        self._learning.change_plan(change)
        said = ""
        if restarts > KEPT_RESTARTS:
            self._stop.why, loop.last = MOVED, loop.step
        else:
            said = "; the next start does so, as torchrun has too few restarts left"
        tell(self._comm, f"{change}{said}")


def _differ(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether a rank is another number of times as slow as the fastest one than it was before."""
    then, today = ([slow / min(all_of) for slow in all_of] for all_of in (before, now))
    return any(max(a / b, b / a) > CHANGED for a, b in zip(then, today, strict=True))


def _restarts() -> int:
    """How often torchrun would start the workers again."""
    counts = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    most, count = (int(text) if text.isdecimal() else 0 for text in counts)
    return max(most - count, 0)
