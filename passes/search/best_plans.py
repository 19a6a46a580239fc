"""Every kind of plan that is searched for one request, best first.

The kinds are: the solver's plans on one mesh of all ranks; on one mesh too, with microbatches, recompute and offload
chosen together where memory is short; pipelines; and branches side by side. Each kind is bounded by the best plan of
those before it, so whichever is likely to win goes first and the others are soon ruled out: on small clusters plans on
one mesh, on large ones pipelines.
"""

from __future__ import annotations

import math

from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.one_mesh.by_strategy import search_strategies
from autopar.passes.search.one_mesh.short_memory import search_short_memory
from autopar.passes.search.stages.branches import search_branches
from autopar.passes.search.stages.limits import asks_for_pipeline, check_pipeline_options
from autopar.passes.search.stages.pipelines import search_pipelines
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import RankedPlans, Task

MANY_RANKS = 64
"""On larger clusters pipelines are looked for before microbatches and recompute on one mesh."""


def search_plans(task: Task, batch: int) -> RankedPlans:
    """Plans with the task that each is a plan of, best first; none where nothing fits.

    batch: size of the global batch. Raises InputError
    for options that cannot be, InfeasibleError where the options ask for a pipeline and none fits.
    """
    check_pipeline_options(task)
    submeshes = SubmeshPlans(TasksByCount(task, batch))
    if asks_for_pipeline(task.options):
        return search_pipelines(submeshes, math.inf)
    candidates, memory_short = search_strategies(task)
    kinds: list[RankedPlans] = [[(task, candidate) for candidate in candidates]]
    stages = _stages_allowed(task)
    memory_short = memory_short and task.program.training
    many_ranks = stages and task.cluster.size > MANY_RANKS
    if memory_short and not many_ranks:
        kinds.append(search_short_memory(submeshes.tasks, _best_s(kinds)))
    if stages:
        kinds.append(search_pipelines(submeshes, _best_s(kinds)))
        kinds.append(search_branches(submeshes.copy(), _best_s(kinds)))
    if memory_short and many_ranks:
        kinds.append(search_short_memory(submeshes.tasks, _best_s(kinds)))
    kinds = sorted(filter(None, kinds), key=lambda ranked: ranked[0][1].step_s)
    return [plan for ranked in kinds for plan in ranked]


def _stages_allowed(task: Task) -> bool:
    """Whether the options leave it to the search how many stages there are."""
    options = task.options
    return task.cluster.size > 1 and options.pp != 1 and options.strategy == "auto" and options.mesh is None


def _best_s(kinds: list[RankedPlans]) -> float:
    """Seconds of a step of the best plan so far."""
    return min((ranked[0][1].step_s for ranked in kinds if ranked), default=math.inf)
