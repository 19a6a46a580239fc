"""Pipelines worth having: the most promising cuts become plans, are lowered, and their schedules simulated.

`autopar.passes.search.stages.cuts` proposes cuts; here the best of them are made to fit in memory and become plans of the
program as captured (`autopar.passes.search.stages.plan_of_draft`), each under its fastest schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from autopar.errors import NoRoomError
from autopar.ir.mesh import Mesh
from autopar.ir.text import size_text
from autopar.passes.search.lower_bounds import least_bytes
from autopar.passes.search.one_mesh.finer import finer_meshes_of
from autopar.passes.search.stages.cuts import CutSearch
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.stages.limits import asks_for_pipeline
from autopar.passes.search.stages.plan_of_draft import (
    DraftInMemory,
    DraftPlan,
    drafts_in_memory,
    plan_that_fits,
    ranked,
    relieved,
)
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.search.workers import Answers
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.stage import StageShortage

Drafts = Answers[Draft, tuple[list[DraftInMemory], StageShortage | None]]
"""The drafts within memory that every rough cut becomes."""

Rival = Callable[[float, float], float]
"""Seconds of the best plan of another kind (infinite: there is none), given the best estimate and the seconds to beat."""

MOST_TRIED, MOST_PLANNED = 6, 3
"""Different cuts that are made to fit in memory, and plans that are lowered, at most."""
MOST_FINER = 2
"""Cuts on finer meshes that are made to fit in memory at most."""
_ROUGHNESS = 1.03
"""A plan may take so many times the estimate of its draft within memory."""
_OFF_ALIKE = 0.5
"""The share of what the estimates lacked of cuts that were tried that other estimates lack at least."""
_FASTER = 0.999
"""A cut is tried where it could be faster by more than this."""


def search_pipelines(submeshes: SubmeshPlans, best_s: float, rival: Rival | None = None) -> Iterator[RankedPlans]:
    """Pipelines predicted faster than best_s (infinite where the options ask for one), best first, whenever there is a better
    one.

    submeshes: plans of the request on submeshes, which other searches may use afterwards. rival: looks for a plan of another kind
    that beats the best estimate, before any cut is made to fit in memory. Raises InputError for stages that
    cannot be, InfeasibleError when the options ask for a pipeline and none fits.
    """
    task = submeshes.task
    search = CutSearch(submeshes, best_s)
    roughs = _roughs(search, search.rough())
    if rival is not None and roughs:
        search.best_s = min(best_s, rival(roughs[0].step_s, best_s))
    plans: list[DraftPlan] = []
    for plan in _faster_and_faster(search, roughs):
        plans = [plan, *plans]
        yield ranked(plans)
    if plans:
        yield ranked([relieved(plans[0]), *plans[1:]])
    elif asks_for_pipeline(task.options):
        error = NoRoomError(_no_pipeline(task, search.nearest))
        error.would_fit_bytes = search.nearest.needed_bytes if search.nearest is not None else None
        raise error


def search_finer(submeshes: SubmeshPlans, best: PricedPlan) -> Iterator[RankedPlans]:
    """Pipelines with stages on finer meshes that are faster than the best plan so far, whenever there is a better one.

    submeshes: after the search that found this plan, a pipeline. Estimates are held against the estimate of such a cut as it is.
    """
    search = CutSearch(submeshes, best.step_s)
    sizes = {mesh.size for mesh in search.limits.submeshes(search.task)}
    if search.limits.mixed or not any(finer_meshes_of(search.task, ranks) for ranks in sizes):
        return
    cuts = search.rough()
    kind = _kind(best.plan.microbatches, (stage.mesh for stage in best.plan.stages))
    estimate_s = min((cut.step_s for cut in cuts if _kind(cut.microbatches, cut.used_meshes()) == kind), default=0.0)
    plans: list[DraftPlan] = []
    for plan in _faster_and_faster(search, _roughs(search, search.finer(cuts, estimate_s))[:MOST_FINER]):
        plans = [plan, *plans]
        yield ranked(plans)
    if plans:
        yield ranked([relieved(plans[0]), *plans[1:]])


def _faster_and_faster(search: CutSearch, roughs: Sequence[Draft]) -> Iterator[DraftPlan]:
    """Plans of rough cuts, each faster than those before it and than the search's best_s."""
    steps_s, tried = [search.best_s], list[tuple[float, float]]()
    with _drafts(search, roughs) as drafts:
        for in_memory in _promising(search, roughs, drafts, lambda: estimate_to_beat_s(steps_s[-1], tried)):
            if in_memory.draft.step_s >= steps_s[-1] or len(steps_s) > MOST_PLANNED:
                return
            plan = plan_that_fits(search.exact, in_memory, steps_s[-1])
            tried.append((in_memory.draft.step_s, steps_s[-1] if plan is None else plan.cost_s))
            if plan is not None and plan.cost_s < steps_s[-1]:
                steps_s.append(plan.cost_s)
                yield plan


def estimate_to_beat_s(best_s: float, tried: Sequence[tuple[float, float]]) -> float:
    """Seconds that the estimate of a rough cut is to be below, so that its plan may beat best_s: where estimates of other cuts
    said too little, its own does. tried: estimates, and the seconds that their plans take at least."""
    if not tried:
        return best_s
    off = max(min(seconds / estimate_s for estimate_s, seconds in tried), 1.0)
    least_s = min(estimate_s for estimate_s, _ in tried)
    return min(best_s, max(best_s / (1 + _OFF_ALIKE * (off - 1)), _ROUGHNESS * least_s))


def _roughs(search: CutSearch, cuts: Sequence[Draft]) -> list[Draft]:
    """The most promising cuts that might fit in memory. cuts: best first."""
    tried: set[tuple[object, ...]] = set()
    roughs: list[Draft] = []
    for rough in cuts:
        if rough.step_s >= search.best_s * _FASTER or len(tried) >= MOST_TRIED:
            break
        if search.within_reach(rough):
            tried.add(_kind(rough.microbatches, rough.used_meshes()))
            roughs.append(rough)
    return roughs


def _drafts(search: CutSearch, roughs: Sequence[Draft]) -> Drafts:
    """The drafts within memory of the cuts, each with what was short of least so far where that was found."""
    tasks = [search.submeshes.tasks.at(M) for M in search.submeshes.tasks.counts()]
    return search.task.workers.answers(
        lambda rough: (list(drafts_in_memory(search.exact, rough)), search.nearest), roughs, tasks
    )


def _promising(
    search: CutSearch, roughs: Sequence[Draft], drafts: Drafts, to_beat_s: Callable[[], float]
) -> Iterator[DraftInMemory]:
    """Cuts within memory, the best estimate first.

    A rough cut is made to fit in memory only when none that was made to fit has a better estimate than it, so plans that
    are made of those that this gives (to_beat_s: what estimates are to be below for the best one so far) spare most rough cuts
    that. A cut that is still to become a plan is expected to take little more than its estimate.
    """
    in_memory: list[DraftInMemory] = []
    known: set[tuple[object, ...]] = set()
    for k, rough in enumerate(roughs):
        while in_memory and in_memory[0].draft.step_s <= rough.step_s:
            yield in_memory.pop(0)
        expected_s = min((_ROUGHNESS * d.draft.step_s for d in in_memory), default=math.inf)
        if rough.step_s >= min(_FASTER * min(search.best_s, expected_s), to_beat_s()):
            break
        of_rough, shortage = drafts[k]
        search.note(shortage)
        different = [d for d in of_rough if _cut(d) not in known]
        known.update(map(_cut, different))
        in_memory = sorted([*in_memory, *different], key=lambda d: d.draft.step_s)
    yield from in_memory


def _kind(microbatches: int, meshes: Iterable[Mesh]) -> tuple[object, ...]:
    """The kind of a cut, by which different cuts are counted apart: microbatches and meshes."""
    return microbatches, *sorted({mesh.axes for mesh in meshes})


def _cut(in_memory: DraftInMemory) -> tuple[object, ...]:
    """The plan of a draft within memory; drafts that are equal in it are the same plan."""
    draft = in_memory.draft
    stages = ((s.start, s.end, draft.submesh_plans[s.option].mesh) for s in draft.solution.stages)
    return draft.microbatches, draft.chunks, draft.shape, in_memory.policy, *stages


def _no_pipeline(task: Task, nearest: StageShortage | None) -> str:
    """Why none fits, and what would. nearest: of the cuts that did not fit the one that is short of least."""
    options = task.options
    asked = f"pp={options.pp}" if options.pp else f"stages at {list(options.stage_boundaries or ())}"
    if nearest is None:
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
    return (
        f"no pipeline with {asked} fits: {nearest.describe()}. With {size_text(nearest.needed_bytes)} per rank it would; or "
        f"use {math.ceil(task.cluster.size * nearest.ratio)} ranks, more stages, or more microbatches of a smaller size"
    )
