"""Plans with the stages of another plan: the same calls on the same ranks, every parameter stored as it is there.

A program for another shape of batch computes with the tensors of the first one (`Task.layout`), so its cut and its meshes
are given. What is left is chosen as for any pipeline: microbatches, how values are sharded, recompute and the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.ir.actions import StageGraph
from autopar.ir.mesh import Mesh
from autopar.passes.rules.structure import parameter_groups
from autopar.passes.search.layout import Layout, Place
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.stages.cuts import CutSearch
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.stages.pipelines import plans_of
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.stage import evaluate
from autopar.plan import ParameterPlan, StagePlan

MOST_TRIED = 3
"""Numbers of microbatches that become plans at most."""


def search_laid_out(submeshes: SubmeshPlans, layout: Layout, best_s: float) -> Iterator[RankedPlans]:
    """Plans with the stages of a layout that are faster than best_s, whenever there is a better one. Raises InfeasibleError or
    ConstraintError where constraints leave a stage no choice."""
    search = _GivenCut(submeshes, layout, best_s)
    counts = search.counts_on(search.meshes, best_s)
    several = [M for M in counts if M > 1]
    roughs = [rough for M in several or counts if (rough := search.draft(M)) is not None]
    fewest = min(roughs, key=lambda rough: rough.step_s, default=None)
    if several and fewest is not None and fewest.microbatches == several[0] != counts[0]:
        in_one = search.draft(counts[0])
        roughs += [in_one] if in_one is not None else []
    reasons = (reason for planned in search.planned_by if (reason := planned.without_choice()) is not None)
    if not roughs and (reason := next(reasons, None)) is not None:
        raise reason
    yield from plans_of(search, sorted(roughs, key=lambda rough: rough.step_s)[:MOST_TRIED])


class _GivenCut(CutSearch):
    """The search whose only cut is that of a layout."""

    def __init__(self, submeshes: SubmeshPlans, layout: Layout, best_s: float) -> None:
        super().__init__(submeshes, best_s)
        self.layout, self.groups = layout, groups_of(layout.stages)
        self.meshes, self.planned_by = _meshes(self.task, layout), _planned_by(submeshes, layout)

    def draft(self, M: int, share: float = 0.0, policy: str | None = None) -> Draft | None:
        """The cut in M microbatches within a share of the memory (0: any), under a recompute policy."""
        stages = zip(self.planned_by, self.meshes, strict=True)
        of_stages = [submeshes.within(M, (mesh,), share, policy) for submeshes, mesh in stages]
        if not all(of_stages):
            return None
        plans = [*{id(plan): plan for (plan,) in of_stages}.values()]
        place = {id(plan): i for i, plan in enumerate(plans)}
        own, chunks = self.submeshes.tasks.at(M), max(map(len, self.groups))
        problem = self.stage_problem(own, M, plans, share or math.inf, chunks)
        ranges = self.layout.ranges(own.program)
        pieces = [(*calls, place[id(plan)]) for calls, (plan,) in zip(ranges, of_stages, strict=True)]
        return Draft(own, M, chunks, shape_of(self.groups), evaluate(problem, pieces, self.groups), tuple(plans))

    def exact(self, rough: Draft, share: float, policy: str | None) -> Draft | None:
        """The cut of a rough draft within that share of the memory, under a recompute policy."""
        return self.draft(rough.microbatches, share, policy)


def _planned_by(submeshes: SubmeshPlans, layout: Layout) -> list[SubmeshPlans]:
    """The plans of each stage's submesh: one for all, or, of stages on such meshes that store in several ways what a
    program on one mesh stores alike (layers of a kind, or a tied parameter), or have other shares, one for each."""
    groups = parameter_groups(submeshes.task.program).values()
    first_of = {name: group.names[0] for group in groups for name in group.names}
    ways: dict[tuple[Any, str], set[ParameterPlan]] = {}
    cut: dict[Any, set[Any]] = {}
    for stage in layout.stages:
        cut.setdefault(stage.mesh.ranks, set()).add(stage.mesh.axes)
        for name, parameter in stage.parameters.items():
            ways.setdefault((stage.mesh.ranks, first_of[name]), set()).add(parameter)
    several = {ranks for (ranks, _), different in ways.items() if len(different) > 1 or len(cut[ranks]) > 1}

    def of_one(stage: StagePlan, places: tuple[Place, ...]) -> SubmeshPlans:
        task = submeshes.task.changed(layout=Layout((stage,), (places,)))
        return SubmeshPlans(TasksByCount(task, submeshes.tasks.batch))

    return [
        of_one(stage, places) if stage.mesh.ranks in several else submeshes
        for stage, places in zip(layout.stages, layout.places, strict=True)
    ]


def groups_of(stages: Sequence[StagePlan]) -> tuple[tuple[int, ...], ...]:
    """The stages of every group of ranks, in the order of the ranks."""
    groups: dict[int, list[int]] = {}
    for s, stage in enumerate(stages):
        groups.setdefault(stage.mesh.offset, []).append(s)
    return tuple(tuple(groups[first]) for first in sorted(groups))


def shape_of(groups: Sequence[Sequence[int]]) -> str:
    """How stages lie on groups: "loop" (round after round), "v" (there and back), or "any"."""
    chains = {shape: StageGraph.chain(len(groups), len(groups[0]), shape) for shape in ("loop", "v")}
    return next((shape for shape, chain in chains.items() if chain.groups == tuple(map(tuple, groups))), "any")


def _meshes(task: Task, layout: Layout) -> list[Mesh]:
    """The submesh of every stage as it is planned for: at the first of its kind of devices."""
    kinds = task.cluster.kind_starts
    return [Mesh(s.mesh.axes, max(first for first in kinds if first <= s.mesh.offset)) for s in layout.stages]
