"""The plans without a pipeline that need about the fewest bytes: whether a request can be met at all, soon known.

On every mesh sharding and recompute are chosen for the fewest bytes, in one microbatch and in the most that the options
allow, lowered and accounted as any plan is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.errors import AutoparError, InputError
from autopar.ir.mesh import Mesh
from autopar.passes.search.joint import Joint
from autopar.passes.search.spmd import Task
from autopar.passes.search.submesh import derived, microbatch_counts
from autopar.passes.search.within_memory import joint_on
from autopar.passes.shard.meshes import candidate_meshes
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Solution
from autopar.plan import Plan


@dataclass(frozen=True)
class Small:
    """A plan with about the fewest bytes on a mesh, of a task in so many microbatches; joint: other plans there."""

    task: Task
    mesh: Mesh
    joint: Joint
    candidate: PricedPlan

    @property
    def peak_bytes(self) -> float:
        assert self.candidate.account is not None
        return self.candidate.account.peak_bytes

    @property
    def step_time_s(self) -> float:
        assert self.candidate.account is not None
        return self.candidate.account.step_time_s


def smallest_plans(task: Task, batch: int) -> Iterator[Small]:
    """One per mesh and microbatch count for which there is any."""
    if not task.program.training:
        pricers, task = task.pricers, replace(task, options=replace(task.options, recompute="none"))
        task.pricers = pricers
    owners = [task]
    if task.options.microbatches is None and task.program.training:
        most = max(microbatch_counts(task, batch))
        more = derived(task, most, no_capture) if most > 1 else None
        owners += [more] if more is not None else []
    for owner in reversed(owners):
        for mesh in candidate_meshes(task.cluster, task.options):
            try:
                joint = joint_on(owner, mesh)
                joint.within(0.0)
                point = joint.smallest
                plan = Plan(
                    owner.program.fingerprint,
                    owner.cluster.fingerprint(),
                    mesh.size,
                    (point.plan,),
                    owner.setting.microbatches,
                    origin="solver",
                    predicted={"step_time_s": point.seconds},
                )
            except AutoparError:  # a batch too small for this mesh, tiers too small
                continue
            solution = Solution(point.choice, point.seconds, point.nbytes, point.seconds, "smallest", {}, {})
            yield Small(owner, mesh, joint, owner.finish(PricedPlan(plan, solution)))


def pricing(task: Task) -> Callable[[int], Task]:
    """Tasks for other microbatch counts, without capturing the model again: what a search takes as `recapture`."""

    def recapture(M: int) -> Task:
        if M not in known:
            known[M] = derived(task, M, no_capture) or no_capture(M)
        return known[M]

    known = {task.setting.microbatches: task}
    return recapture


def no_capture(M: int) -> Task:
    """Raises InputError."""
    raise InputError(f"{M} microbatches need the model to be captured again")
