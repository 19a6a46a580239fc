"""A run goes on under another of its program's plans, from a save on, where machines turned out to be slower than described.

`program.save(OUT, slower=[2, 3])` writes plans for slower machines beside the program: their stages are cut so that a slow one
has less to do. Stages, and what rests of them, cannot move in the middle of a step, but a checkpoint loads under any plan. So at
a save all ranks compare the predicted seconds of every plan (`step/paced.py`) under the speeds that they told each other last:

    saved    =  measured seconds of a step · (1 - predicted of the best plan / predicted of the present one) · steps that are left
    moves    where the present plan  >  BETTER · the best  and  saved  >  MARGIN · seconds of a start,  IN_A_ROW times

The run then ends after that save, torchrun starts its workers again, and these take the plan that `learned.json` names. Losses
are those of an undisturbed run, as they are under any plan. Where torchrun has no restart left, the next start takes that plan.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
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
MOST_TIMES = 2
"""Times that a run goes on under each plan, as predictions that err about a stage would send it back and forth."""
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


def paying(seconds: Sequence[float], present: int, step_s: float, steps: int, cost_s: float) -> tuple[int, float]:
    """The place of the plan that pays, the present one where none does, and the seconds that the steps which are left take less.
    seconds: predicted of a step, by plan; step_s: measured; cost_s: of a start."""
    best = min(range(len(seconds)), key=lambda k: (seconds[k], k != present))
    saved_s = step_s * (1 - seconds[best] / seconds[present]) * steps
    pays = seconds[present] > BETTER * seconds[best] and saved_s > MARGIN * cost_s
    return (best, saved_s) if pays else (present, 0.0)


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
        self._seconds = list[float]()

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
        step_s, cost_s, restarts = told[0][0], told[0][1], min(restarts for *_, restarts in told)
        slowness, place_of = self._own.slowness, self._places[self._present]
        seconds = seconds_at(self._plans, self._places, [slowness[rank] for rank in place_of])
        best, saved_s = paying(seconds, self._present, step_s, loop.steps - loop.step, cost_s)
        self._in_a_row = self._in_a_row + 1 if best != self._present else 0
        if self._in_a_row < IN_A_ROW or best == self._next or self._learning.times_under(best) >= MOST_TIMES:
            return
        self._next = best
        change = PlanChange(loop.step, self._present, best, seconds[self._present], seconds[best], saved_s, cost_s)
        self._learning.change_plan(change)
        if restarts:
            self._stop.why, loop.last = MOVED, loop.step
        tell(self._comm, f"{change}{'' if restarts else '; the next start does so, as torchrun has no restart left'}")


def _restarts() -> int:
    """How often torchrun would start the workers again."""
    counts = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    most, count = (int(text) if text.isdecimal() else 0 for text in counts)
    return max(most - count, 0)
