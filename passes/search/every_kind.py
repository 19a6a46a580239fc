"""Everything that is searched for one compilation: plans without a pipeline, pipelines, branches; best first.

Each kind is bounded by the best that was found before it. On small clusters plans without a pipeline come first, on large
ones pipelines: whoever is likely to win goes first, and the other is soon ruled out.
"""

from __future__ import annotations

from typing import Any

from autopar.passes.search.branches import search_branches
from autopar.passes.search.cuts import Search
from autopar.passes.search.pipelines import asks_for_pipeline, check_pipeline_options, search_pipelines
from autopar.passes.search.short_memory import search_fitting
from autopar.passes.search.spmd import Task, memory_is_short, search_spmd
from autopar.passes.search.submesh import Capture
from autopar.passes.shard.priced_plan import PricedPlan

Found = list[tuple[Task, PricedPlan]]
MANY = 64
"""Ranks from which on pipelines are looked for before recompute and accumulation without one."""


def search_plans(task: Task, batch: int, recapture: Capture) -> tuple[Found, list[Any]]:
    """Plans with the task each belongs to, best first, and what did not fit. batch: size of the global batch.

    recapture(M): the task for M microbatches as captured. Raises InputError for options that cannot be, InfeasibleError
    where the options ask for a pipeline and none fits.
    """
    options = task.options
    check_pipeline_options(task)
    search = Search(task, batch, recapture, float("inf"))
    if asks_for_pipeline(options):
        return search_pipelines(task, batch, recapture, float("inf"), search), []
    plain, shortages = search_spmd(task)
    rows: list[Found] = [[(task, c) for c in plain]]
    alone = task.cluster.size == 1 or options.pp == 1 or options.strategy != "auto" or options.mesh is not None
    tight = task.program.training and memory_is_short(task, plain, shortages)

    def fit() -> None:
        made, short = search_fitting(task, batch, recapture, search.at, _best_s(rows))
        rows.append(made)
        shortages.extend(short)

    if tight and (alone or task.cluster.size <= MANY):
        fit()
    if not alone:
        search.best_s = _best_s(rows)
        rows.append(search_pipelines(task, batch, recapture, search.best_s, search))
        rows.append(search_branches(task, batch, recapture, _best_s(rows), search))
        if tight and task.cluster.size > MANY:
            fit()
    rows = sorted(filter(None, rows), key=lambda row: row[0][1].step_s)
    return [pair for row in rows for pair in row], shortages


def _best_s(rows: list[Found]) -> float:
    return min((row[0][1].step_s for row in rows if row), default=float("inf"))
