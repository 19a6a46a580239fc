"""The plans without a pipeline that need about the fewest bytes: they tell quickly whether a request can be met at all.

On every mesh, sharding and recompute are chosen for the fewest bytes, once in the most microbatches that the options
allow and once in one. Each plan is then lowered and accounted for as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.passes.account.program import Account
from autopar.passes.search.by_microbatch import smallest
from autopar.passes.search.microbatches import microbatch_counts
from autopar.passes.search.one_mesh.joint import JointSearch
from autopar.passes.search.one_mesh.within_memory import candidate_at, joint_on, tighter_room
from autopar.passes.search.task import Task, account_of
from autopar.passes.shard.meshes import candidate_meshes
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.uneven import rows_of

SOLVER_S = 3.0
"""Seconds for one question to the solver, at most, while an error is explained."""


@dataclass(frozen=True)
class SmallPlan:
    """A plan with about the fewest bytes on a mesh, lowered. joint: the search that found it, for other plans there."""

    task: Task
    joint: JointSearch
    candidate: PricedPlan

    @property
    def account(self) -> Account:
        """Seconds and bytes of the plan."""
        return account_of(self.candidate)


def smallest_plans(task: Task, batch: int) -> Iterator[SmallPlan]:
    """One per mesh and microbatch count for which there is any. batch: of the whole step."""
    if not task.program.training:
        task = task.changed(options=replace(task.options, recompute="none"))
    for owner in [*_in_most_microbatches(task, batch), task]:
        for mesh in map(owner.sharing, candidate_meshes(task.cluster, task.options, rows=rows_of(owner.program))):
            with suppress(AutoparError):  # a batch too small for this mesh, tiers too small
                yield _smallest_on(owner, mesh)


def _smallest_on(task: Task, mesh: Mesh, room_bytes: float = math.inf) -> SmallPlan:
    """The smallest plan of a mesh; where what an op reads and makes does not fit, one in which this takes less. room_bytes: what
    an op may read and make. Raises AutoparError where there is none."""
    joint = joint_on(task, mesh, room_bytes=room_bytes)
    joint.within(0.0)
    point = joint.smallest_so_far
    small = SmallPlan(task, joint, smallest(task, candidate_at(task, point, point.seconds)))
    tighter = tighter_room(joint, task.limit_at(mesh), small.account.peak_bytes, room_bytes)
    if tighter >= room_bytes:
        return small
    return min(small, _smallest_on(task, mesh, tighter), key=lambda plan: plan.account.peak_bytes)


def _in_most_microbatches(task: Task, batch: int) -> list[Task]:
    """The task in the most microbatches, where their number is open and there may be more than one."""
    if task.options.microbatches is not None or not task.program.training:
        return []
    most = max(microbatch_counts(task, batch))
    return [task.at(most)] if most > 1 else []
