"""Plans without a pipeline where memory is short: mesh, microbatches, sharding, recompute and offload chosen together.

More microbatches hold less for backward and pay for it in smaller products, and in parameters gathered again for each;
where the devices have memory tiers, what rests there costs its transfers.
Every mesh is tried with growing microbatch counts; the fastest plan that memory left out would allow is a bound, and a
mesh is left as soon as its bound is no better than what was found, or nothing needs to be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.memory_levers import OFFLOAD_KINDS
from autopar.ir.mesh import Mesh
from autopar.passes.search.spmd import Short, Task
from autopar.passes.search.submesh import Capture, least_bytes, microbatch_counts, same_structure
from autopar.passes.search.within_memory import fitting, joint_on
from autopar.passes.shard.meshes import candidate_meshes
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage

_WORTH = 0.995
"""A plan is looked for where it could be faster by more than this."""
At = Callable[[int], Task | None]


def search_fitting(
    task: Task, batch: int, recapture: Capture, at: At, best_s: float
) -> tuple[list[tuple[Task, PricedPlan]], list[Short]]:
    """Plans predicted faster than best_s, best first, the first one of the program as captured; and what did not fit.

    at: the task for so many microbatches, for pricing. recapture: the same as captured.
    """
    found: list[tuple[Task, PricedPlan]] = []
    short: list[Short] = []
    price = beside = (
        0.0  # of a byte, and bytes of a moment, where the best plan was found: what is too dear so is left out
    )
    counts = microbatch_counts(task, batch)
    if task.options.microbatches is None:
        counts = [1, *(m for m in counts if m > 1)]
    for offload in _kinds(task):
        for mesh, bound in _meshes(task):
            for M in counts:
                priced = at(M)
                if bound >= best_s * _WORTH:
                    break
                if priced is None or not (offload or _within_reach(priced)):
                    continue
                owner = priced.offloading(offload)
                joint = joint_on(owner, mesh)
                try:
                    bound = joint.free.seconds
                except (InfeasibleError, ConstraintError):  # too small a batch for the mesh and so many microbatches
                    break
                if bound >= best_s * _WORTH:
                    break
                if price and joint.bound_s(price, owner.limit - beside) >= best_s * _WORTH:
                    continue
                try:
                    made = fitting(owner, mesh, joint, best_s)
                except InfeasibleError:  # memory tiers too small
                    continue
                if isinstance(made, Shortage):
                    short.append((task.options.strategy, mesh, made))
                    continue
                if made.step_s < best_s:
                    best_s, price = made.step_s, joint.price
                    assert made.account is not None
                    beside = 0.8 * max(made.account.peak_bytes - made.solution.memory, 0.0)
                    found.append((owner, made))
                if not any(t.recompute for t in made.plan.stages[0].templates.values()):
                    break
    found.sort(key=lambda row: row[1].step_s)
    return _settled(found, recapture), short


def _kinds(task: Task) -> list[frozenset[str]]:
    """What may rest in memory tiers: the forced kinds; or, where the choice is free and there are tiers, nothing, then more."""
    if task.options.offload != "auto" or not task.cluster.device(0).tiers:
        return [task.setting.offload]
    return [kind.moves for kind in OFFLOAD_KINDS.values() if kind.tried]


def _meshes(task: Task) -> list[tuple[Mesh, float]]:
    """Meshes with the least seconds that any plan on them takes, best first."""
    found = []
    for mesh in candidate_meshes(task.cluster, task.options):
        try:
            found.append((mesh, joint_on(task, mesh).free.seconds))
        except (InfeasibleError, ConstraintError):
            continue
    return sorted(found, key=lambda row: row[1])


def _within_reach(task: Task) -> bool:
    """Whether it could fit if everything were sharded over all ranks."""
    resting, held = least_bytes(task)
    return (resting + held) / task.cluster.size <= task.limit


def _settled(found: list[tuple[Task, PricedPlan]], recapture: Capture) -> list[tuple[Task, PricedPlan]]:
    """The best for the program as captured in its microbatches, and the others of as many microbatches."""
    made: list[tuple[Task, PricedPlan]] = []
    for priced, candidate in found:
        M = candidate.plan.microbatches
        if made and made[0][1].plan.microbatches != M:
            continue
        owner = recapture(M).offloading(priced.setting.offload)
        if owner.program is priced.program:
            made.append((owner, candidate))
            continue
        if same_structure(owner.program, priced.program):
            plan = replace(candidate.plan, program=owner.program.fingerprint)
            again = replace(candidate, plan=plan, lowered=None, account=None)
            again = owner.finish(again) if not made else again
            if again.account is None or again.account.peak_bytes <= owner.limit:
                made.append((owner, again))
                continue
        mesh = candidate.plan.stages[0].mesh
        fresh = fitting(owner, mesh, joint_on(owner, mesh)) if not made else None
        if isinstance(fresh, PricedPlan):
            made.append((owner, fresh))
    return made
