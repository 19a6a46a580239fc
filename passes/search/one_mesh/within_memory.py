"""The fastest plan of one mesh that fits: sharding and recompute chosen together, lowered, and its peak looked at.

`autopar.passes.search.one_mesh.joint` counts bytes that rest and that backward waits for; bytes that live for a moment
are known after lowering only. So what the joint search may use is looked for along the line through the peaks of a plan
that fits and of one that does not, at first as if plans needed as much beside what is counted as the one that fits.
Budgets under which there is nothing new are followed by larger ones, half of what is left. It ends where the limit is
nearly filled, or the plan that does not fit is hardly faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.passes.rules.per_axis import PerAxis
from autopar.passes.search.by_microbatch import finished, least_over
from autopar.passes.search.one_mesh.joint import CLOSE, JointSearch, Point
from autopar.passes.search.recompute_levels import with_less_recompute
from autopar.passes.search.task import Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage, Solution
from autopar.passes.shard.solve_mesh import build_problem
from autopar.plan import Plan

_TRIES = 6
NEAR = 1.03
"""Plans that are slower than the best one by less than this are kept beside it."""
HOPELESS = 1.1
"""A plan that by the joint search's count takes so many times the limit is not lowered to see that it does not fit."""
UNLIKE = 0.2
"""The share of the bytes that live for a moment in one plan by which another one on the mesh may need less."""
_LARGE = 0.1
"""The share of the limit that an op reads and makes at least which is held to fewer bytes where no plan fits."""
_NEAR = 0.01
"""Budgets that differ by less than this share of the limit are not told apart."""
_LITTLE = 0.005
"""A plan that could be faster by no more than this, relative, is not looked for."""


def joint_on(
    task: Task,
    mesh: Mesh,
    setting: Setting | None = None,
    close: float = CLOSE,
    per_axis: PerAxis | None = None,
    room_bytes: float = math.inf,
) -> JointSearch:
    """Sharding and recompute of the whole program on a mesh. setting: by default the task's. close: as of `JointSearch`.
    per_axis, room_bytes: as of `Task.on`."""
    on, options = task.on(mesh, setting, per_axis, room_bytes), task.options
    return JointSearch(
        task.program,
        lambda sets: build_problem(on, options.strategy, sets),
        options.solver_time_limit_s,
        0.02 * on.pricer.copy_s,
        None if options.recompute == "auto" else options.recompute,
        close,
    )


@dataclass(frozen=True)
class _Peak:
    """The peak of a plan, in bytes (nan: not known), whose point counts nbytes."""

    nbytes: float
    peak: float

    def likely_within(self, limit: float, other: _Peak) -> float:
        """The bytes to be counted for a peak of the limit: on the line to another plan's peak; where that is not known, as if
        every plan needed as much beside what is counted."""
        slope = (other.peak - self.peak) / (other.nbytes - self.nbytes)
        return self.nbytes + (limit - self.peak) / (slope if slope > 0 else 1.0)

    def most_within(self, limit: float) -> float:
        """The most bytes that a plan is taken to count whose peak is within the limit."""
        moment = self.peak - self.nbytes
        return limit - moment + UNLIKE * abs(moment)


def fastest_within_limit(
    task: Task, joint: JointSearch, useless_from_s: float = math.inf
) -> PricedPlan | Shortage | None:
    """The fastest plan that was found on the joint search's mesh, lowered and within the limit; or the least peak of any; None
    where the smallest may fit, but nothing on the way to it is of interest.

    useless_from_s: a plan that takes so many seconds or more is of no interest. Peaks are more than the joint search counts, so
    plans that count far too many bytes are not lowered: their peaks are taken to be that, and none is looked for between them.
    """
    best: PricedPlan | None = None
    too_large: Point | None = None
    least_peak, without_more, peak_too_large = math.inf, 0.0, math.nan
    point, first = joint.fastest, 0
    limit, is_new = task.limit_at(point.problem.mesh), True
    if point.nbytes > limit * HOPELESS:
        too_large, point, first = point, joint.smallest(), 1
    for attempt in range(first, _TRIES + 1):
        if is_new:
            peak = point.nbytes
            if peak <= limit * HOPELESS:
                candidate = task.finish(candidate_at(task, point, joint.fastest.seconds))
                surely_short = least_over(task, candidate) if best is None else 0.0
                if surely_short <= 0:
                    if best is None and attempt and _is_useless(joint, candidate, limit, useless_from_s):
                        return None
                    candidate = finished(task, candidate)
                peak = limit + surely_short if surely_short > 0 else account_of(candidate).peak_bytes
            least_peak = min(least_peak, peak)
            if peak > limit:
                if too_large is None or point.nbytes < too_large.nbytes:
                    too_large, peak_too_large = point, peak if point.nbytes <= limit * HOPELESS else math.nan
            elif best is None or candidate.step_s < best.step_s:
                best, fits = candidate, _Peak(point.nbytes, peak)
        if best is None:
            smallest = joint.smallest()
            if attempt or smallest is point:
                break
            point = smallest
            continue
        if attempt == _TRIES or too_large is None or _little_to_gain(best, too_large):
            break
        if limit - fits.peak <= _NEAR * limit:
            break
        least, most = max(fits.nbytes, without_more), min(too_large.nbytes, limit * HOPELESS, fits.most_within(limit))
        if most - least <= _NEAR * limit:
            break
        useless_s = useless_from_s / share_s(best)
        if best.step_s >= useless_from_s and joint.hull_bound_s(most, useless_s) >= useless_s:
            break
        likely = fits.likely_within(limit, _Peak(too_large.nbytes, peak_too_large))
        budget = likely if least < likely < most else (least + most) / 2
        result = joint.within(budget, useless_from_s=useless_from_s)
        following = point if isinstance(result, Shortage) else result
        is_new = following is not point and following.nbytes > fits.nbytes
        if is_new:
            point = following
        else:
            without_more = budget
    return best if best is not None else Shortage(least_peak, ())


def _is_useless(joint: JointSearch, smallest: PricedPlan, limit: float, useless_from_s: float) -> bool:
    """Whether the smallest plan of a mesh is of no interest, nor what fits on the hull between it and the fastest, if their steps
    take the same share of the seconds that are counted."""
    if smallest.step_s < NEAR * useless_from_s:
        return False
    useless_s = useless_from_s / share_s(smallest)
    return joint.hull_bound_s(limit, useless_s) >= useless_s


def tighter_room(joint: JointSearch, limit: float, least_peak: float, room: float = math.inf) -> float:
    """The bytes to which what an op reads and makes is to be held where none of a joint search's plans fits: those of its
    smallest plan's largest op, less by as much as a moment's bytes are too many; infinite where no op takes much of the limit, or
    the largest cannot be held to the room that it was given.

    The solver does not count what lives for a moment, so what it finds cheap may have no room: products that are cut by their
    inputs, say, whose sums every rank makes whole.
    """
    small = joint.smallest_so_far
    largest, moment = small.problem.largest_moment_bytes(small.choice), least_peak - small.nbytes
    if small.nbytes >= limit or not _LARGE * limit <= largest <= room or moment <= limit - small.nbytes:
        return math.inf
    return largest * (limit - small.nbytes) / moment


def share_s(candidate: PricedPlan) -> float:
    """The share that a step takes of the seconds that the solver counts, which are all of its messages'."""
    return min(candidate.step_s / candidate.solution.cost, 1.0)


def _little_to_gain(candidate: PricedPlan, too_large: Point) -> bool:
    """Whether a plan is hardly slower than a point that may take more bytes than fit, which what lies between does not beat."""
    return candidate.solution.cost - too_large.seconds <= _LITTLE * candidate.solution.cost


def relieved(task: Task, joint: JointSearch, candidate: PricedPlan) -> PricedPlan:
    """A plan of the joint search's mesh that fits with as little recomputed as fits (`recompute_levels`), where that could be
    much faster. What rests in memory tiers was chosen with what is kept, so a plan that has values there stays as it is."""
    parks = any(t.offload for stage in candidate.plan.stages for t in stage.templates.values())
    if parks or _little_to_gain(candidate, joint.fastest):
        return candidate
    less = with_less_recompute(task, candidate)
    return candidate if less is None else replace(candidate, plan=less[0], lowered=None, account=less[1])


def candidate_at(task: Task, point: Point, bound_s: float) -> PricedPlan:
    """A point of the joint search as a plan. bound_s: no plan of the mesh is faster."""
    plan = Plan(
        task.program.fingerprint,
        task.cluster.fingerprint(),
        point.problem.mesh.size,
        (point.plan,),
        task.setting.microbatches,
        origin="solver",
        predicted={"step_time_s": task.pricers.least_step_s(point.seconds)},
        gradient_compression=task.options.gradient_compression or "",
    )
    return PricedPlan(plan, solution_of(point, bound_s))


def solution_of(point: Point, bound_s: float) -> Solution:
    """The solution that a report tells of a point."""
    size = point.problem.graph.size
    return Solution(
        point.choice, point.seconds, point.nbytes, min(bound_s, point.seconds), "sharding with recompute", size, size
    )
