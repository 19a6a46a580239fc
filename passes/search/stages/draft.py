"""A cut into stages, or a grouping of branches, before it is lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.passes.search.stages.submesh import SubmeshPlan
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
        """Estimated seconds of a step: what the stage solver says, where chunks divide what fills the pipeline."""
        cut = self.solution
        fill_s = cut.total_s - self.microbatches * cut.t_max_s - cut.step_s
        return self.task.pricers.least_step_s(float(cut.total_s - fill_s * (1 - 1 / self.chunks)))

    def used_meshes(self) -> list[Mesh]:
        """Submeshes of the stages, each once, in the order of the stages."""
        return list(dict.fromkeys(self.submesh_plans[s.option].mesh for s in self.solution.stages))


Exact = Callable[[Draft, float, str | None], Draft | None]
"""The best draft with the microbatch count of a rough one (which left memory out) that fits in a share of the memory, under
a recompute policy ("auto": chosen with the sharding; None: the one that the options force)."""
