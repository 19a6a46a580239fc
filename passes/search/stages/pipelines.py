"""Pipelines worth having: the most promising cuts become plans, are lowered, and their schedules simulated.

`autopar.passes.search.stages.cuts` proposes cuts; here the best of them are made to fit in memory and become plans of the
program as captured (`autopar.passes.search.stages.plan_of_draft`), each under its fastest schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.errors import NoRoomError
from autopar.ir.text import size_text
from autopar.passes.search.lower_bounds import least_bytes
from autopar.passes.search.stages.cuts import CutSearch
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.stages.limits import asks_for_pipeline
from autopar.passes.search.stages.plan_of_draft import (
    DraftInMemory,
    DraftPlan,
    drafts_in_memory,
    plan_that_fits,
    ranked,
    with_less_recompute,
)
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.stage import StageShortage

MOST_TRIED, MOST_PLANNED = 6, 3
"""Different cuts that are made to fit in memory, and plans that are lowered, at most."""
_ROUGHNESS = 1.03
"""A plan may take so many times the estimate of its draft within memory."""
_FASTER = 0.999
"""A cut is tried where it could be faster by more than this."""


def search_pipelines(submeshes: SubmeshPlans, best_s: float) -> Iterator[RankedPlans]:
    """Pipelines predicted faster than best_s (infinite where the options ask for one), best first, whenever there is a better
    one.

    submeshes: plans of the request on submeshes, which other searches may use afterwards. Raises InputError for stages that
    cannot be, InfeasibleError when the options ask for a pipeline and none fits.
    """
    task = submeshes.task
    search = CutSearch(submeshes, best_s)
    plans: list[DraftPlan] = []
    for promising in _promising(search):
        to_beat_s = plans[0].cost_s if plans else best_s
        if promising.draft.step_s >= to_beat_s or len(plans) >= MOST_PLANNED:
            break
        plan = plan_that_fits(search.exact, promising, to_beat_s)
        if plan is not None and plan.cost_s < to_beat_s:
            plans = [plan, *plans]
            yield ranked(plans)
    if plans:
        yield ranked([with_less_recompute(plans[0]), *plans[1:]])
    elif asks_for_pipeline(task.options):
        raise NoRoomError(_no_pipeline(task, search.shortages))


def _promising(search: CutSearch) -> list[DraftInMemory]:
    """The most promising cuts within memory, best first."""
    in_memory: list[DraftInMemory] = []
    best_s = search.best_s
    tried: set[tuple[object, ...]] = set()
    for rough in search.rough():
        if rough.step_s >= best_s * _FASTER or len(tried) >= MOST_TRIED:
            break
        if not search.within_reach(rough):
            continue
        tried.add(_kind(rough))
        for draft_in_memory in drafts_in_memory(search.exact, rough):
            in_memory.append(draft_in_memory)
            best_s = min(best_s, _ROUGHNESS * draft_in_memory.draft.step_s)
    return sorted(in_memory, key=lambda d: d.draft.step_s)


def _kind(rough: Draft) -> tuple[object, ...]:
    """What makes cuts different enough to be counted apart: microbatches and meshes."""
    return rough.microbatches, *sorted({mesh.axes for mesh in rough.used_meshes()})


def _no_pipeline(task: Task, shortages: list[StageShortage]) -> str:
    """Why none fits, and what would."""
    options = task.options
    asked = f"pp={options.pp}" if options.pp else f"stages at {list(options.stage_boundaries or ())}"
    if not shortages:
        resting, held = least_bytes(task)
        least = resting / task.cluster.size
        short = (
            f"parameters, gradients and optimizer state alone take {size_text(least)} however they are sharded; use "
            f"{math.ceil(task.cluster.size * least / task.limit)} ranks or more, or as much memory"
            if least > task.limit
            else f"they take {size_text(least)} at best and one microbatch holds {size_text(held / task.cluster.size)} beside; "
            "use more microbatches, another schedule, or leave them to the search"
        )
        return (
            f"no pipeline with {asked} fits in {size_text(task.limit)} per rank with microbatches="
            f"{options.microbatches or 'any'} and schedule={options.schedule}: {short}"
        )
    nearest = min(shortages, key=lambda s: s.ratio)
    return (
        f"no pipeline with {asked} fits: {nearest.describe()}. With {size_text(nearest.needed_bytes)} per rank it would; or "
        f"use {math.ceil(task.cluster.size * nearest.ratio)} ranks, more stages, or more microbatches of a smaller size"
    )
