"""Pipelines worth having: the most promising cuts become plans, are lowered, and their schedules simulated.

`autopar.passes.search.stages.cuts` proposes cuts; here the best of them are made to fit in memory and become plans of the
program as captured (`autopar.passes.search.stages.plan_of_draft`), each under its fastest schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from autopar.errors import NoRoomError
from autopar.ir.mesh import Mesh
from autopar.ir.text import size_text
from autopar.passes.search.lower_bounds import least_bytes
from autopar.passes.search.one_mesh.finer import finer_meshes_of
from autopar.passes.search.stages.cuts import CutSearch
from autopar.passes.search.stages.draft import Draft
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

Rival = Callable[[float, float], float]
"""Seconds of the best plan of another kind (infinite: there is none), given the best estimate and the seconds to beat."""

Drafts = Answers[Draft, tuple[list[DraftInMemory], StageShortage | None]]
"""The drafts within memory that every rough cut becomes."""

Tried = list[tuple[float, float]]
"""Estimates of cuts that were planned, and the seconds that their plans take at least."""

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


class PipelineSearch:
    """One search for pipelines of a request; what it looked at once it does not look at again.

    submeshes: plans of the request on submeshes, which other searches may use afterwards.
    """

    def __init__(self, submeshes: SubmeshPlans) -> None:
        self.submeshes, self.task = submeshes, submeshes.task
        self._search = CutSearch(submeshes, math.inf)
        self._cuts: list[Draft] | None = None
        self._drafts: Iterator[DraftInMemory] = iter(())
        self._tried: Tried = []

    def estimate_s(self, best_s: float, rival: Rival) -> float:
        """Estimated seconds of the first cut within memory that is to become a plan faster than best_s; infinite where none is.

        rival: looks for a plan of another kind that beats the best rough estimate, before any cut is made to fit in memory.
        """
        self._begin(best_s, rival)
        first = next(self._drafts, None)
        self._drafts = chain([] if first is None else [first], self._drafts)
        return math.inf if first is None else first.draft.step_s

    def plans(self, best_s: float) -> Iterator[RankedPlans]:
        """Pipelines predicted faster than best_s (infinite where the options ask for one), best first, whenever there is a better
        one.

        Raises InputError for stages that cannot be; when the options ask for a pipeline InfeasibleError or ConstraintError where
        strategy and constraints leave stages no choice, and NoRoomError where none fits.
        """
        self._begin(best_s)
        search, found = self._search, False
        for ranking in _ranked(_faster_and_faster(search, self._drafts, self._tried)):
            found = True
            yield ranking
        if not found and self.task.options.asks_for_pipeline:
            if not self._cuts and (reason := self.submeshes.without_choice()) is not None:
                raise reason
            error = NoRoomError(_no_pipeline(self.task, search.nearest))
            error.would_fit_bytes = search.nearest.needed_bytes if search.nearest is not None else None
            raise error

    def finer(self, best: PricedPlan) -> Iterator[RankedPlans]:
        """Pipelines with stages on finer meshes that are faster than the best plan so far, a pipeline, whenever there is a better
        one. Estimates are held against the estimate of such a cut as it is."""
        search, cuts = self._search, self._cuts
        sizes = {mesh.size for mesh in search.limits.submeshes(self.task)}
        if not cuts or search.limits.mixed or not any(finer_meshes_of(self.task, ranks) for ranks in sizes):
            return
        search.best_s = best.step_s
        kind = _kind(best.plan.microbatches, (stage.mesh for stage in best.plan.stages))
        estimate_s = min(
            (cut.step_s for cut in cuts if _kind(cut.microbatches, cut.used_meshes()) == kind), default=0.0
        )
        roughs = _roughs(search, search.finer(cuts, estimate_s))[:MOST_FINER]
        yield from plans_of(search, roughs)

    def _begin(self, best_s: float, rival: Rival | None = None) -> None:
        """Look for cuts that may become plans faster than best_s and than the rival's plan, unless that was done."""
        self._search.best_s = min(self._search.best_s, best_s)
        if self._cuts is None:
            self._cuts = self._search.rough()
            roughs = _roughs(self._search, self._cuts)
            if rival is not None and roughs:
                self._search.best_s = min(self._search.best_s, rival(roughs[0].step_s, best_s))
            self._drafts = _in_memory(self._search, roughs, self._tried)


def plans_of(search: CutSearch, roughs: Sequence[Draft]) -> Iterator[RankedPlans]:
    """Plans of the most promising of these rough cuts that are faster than the search's best_s, best first, whenever there is a
    better one. roughs: best first."""
    tried: Tried = []
    yield from _ranked(_faster_and_faster(search, _in_memory(search, roughs, tried), tried))


def _ranked(found: Iterable[DraftPlan]) -> Iterator[RankedPlans]:
    """The plans so far, best first, whenever there is a faster one; at last with as little recomputed by the best as fits."""
    plans: list[DraftPlan] = []
    for plan in found:
        plans = [plan, *plans]
        yield ranked(plans)
    if plans:
        yield ranked([relieved(plans[0]), *plans[1:]])


def _faster_and_faster(search: CutSearch, drafts: Iterator[DraftInMemory], tried: Tried) -> Iterator[DraftPlan]:
    """Plans of cuts within memory, each faster than those before it and than the search's best_s, which is then theirs."""
    planned = 0
    for in_memory in drafts:
        if in_memory.draft.step_s >= search.best_s or planned >= MOST_PLANNED:
            return
        plan = plan_that_fits(search.exact, in_memory, search.best_s)
        tried.append((in_memory.draft.step_s, search.best_s if plan is None else plan.cost_s))
        if plan is not None and plan.cost_s < search.best_s:
            search.best_s, planned = plan.cost_s, planned + 1
            yield plan


def estimate_to_beat_s(best_s: float, tried: Sequence[tuple[float, float]]) -> float:
    """Seconds that the estimate of a rough cut is to be below, so that its plan may beat best_s: where estimates of other cuts
    said too little, its own does. tried: as of `Tried`."""
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


def _in_memory(search: CutSearch, roughs: Sequence[Draft], tried: Tried) -> Iterator[DraftInMemory]:
    """Cuts within memory, the best estimate first; what is short of least in those that do not fit is noted. tried: those that
    were planned since."""
    tasks = [search.submeshes.tasks.at(M) for M in dict.fromkeys(rough.microbatches for rough in roughs)]

    def fitted(rough: Draft) -> tuple[list[DraftInMemory], StageShortage | None]:
        return list(drafts_in_memory(search.exact, rough)), search.nearest

    with search.task.workers.answers(fitted, roughs, tasks) as drafts:
        yield from _promising(search, roughs, drafts, lambda: estimate_to_beat_s(search.best_s, tried))


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
    if options.pp:
        asked = f"pp={options.pp}"
    elif options.stage_boundaries is not None:
        asked = f"stages at {list(options.stage_boundaries)}"
    else:
        asked = f"chunks={options.chunks}"
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
