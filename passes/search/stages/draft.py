"""A cut into stages, or a grouping of branches, before it is lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.passes.search.stages.submesh import SubmeshPlan, possible_schedules
from autopar.passes.search.task import Task
from autopar.passes.stage import StageSolution


@dataclass(frozen=True)
class Draft:
    """A cut into stages before it is lowered.

    chunks: stages per group of ranks. shape: how they lie on the groups: "loop", "v", or "any" where groups form a DAG.
    solution: the stages; their options are indices of submesh_plans.
    """

    task: Task
    microbatches: int
    chunks: int
    shape: str
    solution: StageSolution
    submesh_plans: tuple[SubmeshPlan, ...]

    @property
    def step_s(self) -> float:
        """Estimated seconds of a step: the slowest group's work, and what is left of filling the pipeline.

        Chunks divide the fill; with one stage per group the schedule's row says how much is left of it.
        """
        found = self.solution
        fill = sum(s.seconds for s in found.stages) - found.t_max_s
        left = 1 / self.chunks
        if self.chunks == 1 and self.task.program.training:
            left = min(row.fill_left for row in possible_schedules(self.task))
        return self.task.pricers.least_step_s(float(self.microbatches * found.t_max_s + fill * left + found.step_s))

    def used_meshes(self) -> list[Mesh]:
        """Submeshes of the stages, each once, in the order of the stages."""
        return list(dict.fromkeys(self.submesh_plans[s.option].mesh for s in self.solution.stages))


Exact = Callable[[Draft, float, str | None], Draft | None]
"""The best draft with the microbatch count of a rough one (which left memory out) that fits in a share of the memory, under
a recompute policy ("auto": chosen with the sharding; None: the one that the options force)."""
