"""Stages: where to cut a chain of units into pipeline stages, and on which submesh each stage runs.

`solve_stages` is the planner's question; `min_max_partition` and `additive_partition` are the textbook recurrences.
Everything works on arrays of seconds and bytes.
"""

from autopar.passes.stage.best_cut import solve_stages, solve_stages_below
from autopar.passes.stage.partition import additive_partition, min_max_partition
from autopar.passes.stage.stage_problem import (
    StageChoice,
    StageOption,
    StageProblem,
    StageShortage,
    StageSolution,
    evaluate,
)

__all__ = [
    "StageChoice",
    "StageOption",
    "StageProblem",
    "StageShortage",
    "StageSolution",
    "additive_partition",
    "evaluate",
    "min_max_partition",
    "solve_stages",
    "solve_stages_below",
]
