"""Stages: where to cut a chain of units into pipeline stages, and on which submesh each stage runs.

`solve_stages` is the planner's question; `min_max_partition` and `additive_partition` are the textbook recurrences.
Everything works on arrays of seconds and bytes.
"""

from autopar.passes.stage.chain import additive_partition, min_max_partition
from autopar.passes.stage.problem import Option, Stage, StageProblem, StageShortage, StageSolution, evaluate
from autopar.passes.stage.solve import solve_stages

__all__ = [
    "Option",
    "Stage",
    "StageProblem",
    "StageShortage",
    "StageSolution",
    "additive_partition",
    "evaluate",
    "min_max_partition",
    "solve_stages",
]
