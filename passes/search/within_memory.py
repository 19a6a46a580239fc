"""The fastest plan of one mesh that fits: sharding and recompute chosen together, lowered, and its peak looked at.

`autopar.passes.search.joint` counts what rests and what backward waits for; what lives for a moment is known after
lowering. Where that breaks the limit the budget shrinks by as much.
"""

from __future__ import annotations

import math

from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.passes.search.joint import Joint, Point
from autopar.passes.search.spmd import Task
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage, Solution
from autopar.passes.shard.solve_mesh import OnMesh, build_problem
from autopar.plan import Plan

_TRIES = 6


def joint_on(task: Task, mesh: Mesh, setting: Setting | None = None) -> Joint:
    """Sharding and recompute of the whole program on a mesh."""
    pricer, options = task.pricers[mesh], task.options
    on = OnMesh(task.program, pricer, task.rules, setting or task.setting, options)
    return Joint(
        task.program,
        lambda sets: build_problem(on, options.strategy, sets),
        options.solver_time_limit_s,
        0.02 * pricer.copy_s,
        None if options.recompute == "auto" else options.recompute,
    )


def solution_of(point: Point, bound: float) -> Solution:
    """What a report says of a point."""
    size = point.problem.graph.size
    return Solution(
        point.choice, point.seconds, point.nbytes, min(bound, point.seconds), "sharding with recompute", size, size
    )


def fitting(task: Task, mesh: Mesh, joint: Joint, worth: float = math.inf) -> PricedPlan | Shortage:
    """The plan without a pipeline on this mesh, lowered and within the limit; or what it falls short. worth: from so many
    seconds on no plan is of interest."""
    fits: tuple[float, PricedPlan] | None = None  # with the bytes that the point counts
    over = math.inf  # bytes of a point that does not fit
    least = math.inf
    point = joint.free
    for turn in range(_TRIES):
        found = task.finish(_candidate(task, point, joint.free.seconds))
        assert found.account is not None
        peak = found.account.peak_bytes
        least = min(least, peak)
        if peak > task.limit:
            over = min(over, point.nbytes)
        elif fits is None or found.solution.cost < fits[1].solution.cost:
            fits = point.nbytes, found
        if over == math.inf or (fits is None and turn) or (fits is not None and _near(joint, *fits, over)):
            break
        if fits is None:
            before, point = point, joint.least()
        else:
            made = joint.within((fits[0] + over) / 2, worth=worth)
            before, point = point, joint.smallest if isinstance(made, Shortage) else made
        if point is before or (fits is not None and point.nbytes <= fits[0]):
            break
    return fits[1] if fits is not None else Shortage(least, ())


def _near(joint: Joint, nbytes: float, found: PricedPlan, over: float) -> bool:
    """Whether more bytes, up to those that are known to be too many, would make it no more than a little faster."""
    gain = min(found.solution.cost - joint.free.seconds, joint.price * (over - nbytes) if joint.price else math.inf)
    return gain <= 0.005 * found.solution.cost


def _candidate(task: Task, point: Point, bound: float) -> PricedPlan:
    plan = Plan(
        task.program.fingerprint,
        task.cluster.fingerprint(),
        point.problem.mesh.size,
        (point.plan,),
        task.setting.microbatches,
        origin="solver",
        predicted={"step_time_s": point.seconds},
    )
    return PricedPlan(plan, solution_of(point, bound))
