"""Plans on one mesh where memory is short: mesh, microbatches, sharding, recompute and offload chosen together.

More microbatches hold less for backward and pay for it in smaller products, and in parameters gathered again for each;
what rests in memory tiers costs its transfers. For every kind of offload, every mesh is tried with growing microbatch
counts. The fastest plan that any memory would allow bounds what a mesh can give, so a mesh is left as soon as its bound
is no better than the best plan so far, or as soon as its plan runs nothing again: then memory was enough.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.memory_levers import OFFLOAD_KINDS
from autopar.ir.mesh import Mesh
from autopar.passes.search.lower_bounds import could_fit, least_bytes
from autopar.passes.search.microbatches import TasksByCount, microbatch_counts
from autopar.passes.search.one_mesh.joint import JointSearch
from autopar.passes.search.one_mesh.within_memory import fastest_within_limit, joint_on
from autopar.passes.search.task import RankedPlans, Task, account_of
from autopar.passes.shard.meshes import candidate_meshes
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage
from autopar.passes.shard.uneven import rows_of

_WORTH = 0.995
"""A plan is looked for where it could be faster by more than this."""
_MOMENT = 0.8
"""The share of the bytes that live for a moment in one plan that another one is taken to need as well."""


def search_short_memory(tasks: TasksByCount, best_s: float) -> Iterator[RankedPlans]:
    """Plans that are predicted faster than best_s, best first, whenever there is another one."""
    task = tasks.task
    counts = microbatch_counts(task, tasks.batch)
    if task.options.microbatches is None:
        counts = [1, *(M for M in counts if M > 1)]
    search = _FasterPlans(tasks, counts, best_s)
    meshes = _meshes_by_bound(task)
    for offload in _offload_kinds(task):
        for mesh, bound_s in meshes:
            for _ in search.look_on(mesh, bound_s, offload):
                yield sorted(search.faster, key=lambda plan: plan[1].step_s)


class _FasterPlans:
    """Plans that were each faster than all before.

    best_s: seconds of a step to beat. byte_price: seconds per byte at the best plan so far. moment_bytes: about what lives
    for a moment there, beside the bytes that the solver counts.
    """

    def __init__(self, tasks: TasksByCount, counts: list[int], best_s: float) -> None:
        self.tasks, self.counts, self.best_s = tasks, counts, best_s
        self.byte_price = self.moment_bytes = 0.0
        self.faster: RankedPlans = []

    def look_on(self, mesh: Mesh, bound_s: float, offload: frozenset[str]) -> Iterator[PricedPlan]:
        """Faster plans on one mesh in growing microbatch counts. bound_s: none of the whole batch on this mesh takes less."""
        for M in self.counts:
            if not self._may_win(bound_s):
                return
            task = self.tasks.at(M)
            if not (offload or could_fit(task, least_bytes(task), [task.limit * task.cluster.size], [1.0])):
                continue
            task = task.offloading(offload)
            joint = joint_on(task, mesh)
            try:
                bound_s = joint.fastest.seconds
            except (InfeasibleError, ConstraintError):  # too small a batch for the mesh and so many microbatches
                return
            if not self._may_win(bound_s):
                return
            if self.byte_price and not self._may_win(joint.bound_s(self.byte_price, task.limit - self.moment_bytes)):
                continue
            candidate = self._plan(task, joint)
            if candidate is None:
                continue
            if candidate.step_s < self.best_s:
                self._keep(task, joint, candidate)
                yield candidate
            if not any(t.recompute for t in candidate.plan.stages[0].templates.values()):
                return

    def _may_win(self, bound_s: float) -> bool:
        return bound_s < self.best_s * _WORTH

    def _plan(self, task: Task, joint: JointSearch) -> PricedPlan | None:
        """The fastest plan that fits; None where none does, or memory tiers are too small."""
        try:
            result = fastest_within_limit(task, joint, self.best_s)
        except InfeasibleError:
            return None
        return None if isinstance(result, Shortage) else result

    def _keep(self, task: Task, joint: JointSearch, candidate: PricedPlan) -> None:
        self.best_s, self.byte_price = candidate.step_s, joint.price
        self.moment_bytes = _MOMENT * max(account_of(candidate).peak_bytes - candidate.solution.memory, 0.0)
        self.faster.append((task, candidate))


def _offload_kinds(task: Task) -> list[frozenset[str]]:
    """The kinds of state that may rest in memory tiers: those of the options; or, where they leave it open and there
    are tiers, none, then more."""
    if task.options.offload != "auto" or not task.cluster.pace(0, task.cluster.size).tiers:
        return [task.setting.offload]
    return [kind.moves for kind in OFFLOAD_KINDS.values() if kind.tried]


def _meshes_by_bound(task: Task) -> list[tuple[Mesh, float]]:
    """Meshes with the least seconds that any plan on them takes, the best bound first."""
    bounds_s: list[tuple[Mesh, float]] = []
    for mesh in map(task.sharing, candidate_meshes(task.cluster, task.options, rows=rows_of(task.program))):
        try:
            bounds_s.append((mesh, joint_on(task, mesh).fastest.seconds))
        except (InfeasibleError, ConstraintError):
            continue
    return sorted(bounds_s, key=lambda mesh_and_bound: mesh_and_bound[1])
