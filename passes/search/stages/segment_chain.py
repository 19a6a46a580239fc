"""The best chain of stages over a program's segments, as a grouping that the branch solver starts from.

The segments, in program order, are the units of a stage problem with one option per number of devices; its solution is a
grouping like others, of consecutive segments.
"""

from __future__ import annotations

import numpy as np

from autopar.passes.branch import BranchProblem, BranchSolution, SegmentGroup, SegmentOption, evaluate
from autopar.passes.stage import StageOption, StageProblem, StageShortage, solve_stages

NEVER = 1e15
"""Bytes of a segment on a number of devices it has no option for."""


def best_chain(problem: BranchProblem) -> BranchSolution | None:
    """The best pipeline of consecutive segments, as the stage solver sees them: one after another. None where none fits."""
    L = len(problem.segments)
    sizes = problem.sizes
    if not sizes:
        return None
    entering_s = [
        sum(problem.hand_over_s(e) for e, (u, v, _) in enumerate(problem.edges) if u < l <= v) for l in range(L)
    ]
    fastest = {(kind, devices): problem.fastest_options(devices, kind) for kind, devices in sizes}
    limit = min(problem.limit_bytes, NEVER / 10)
    options = tuple(_stage_option(problem, size, chosen, limit) for size, chosen in fastest.items())
    stages = solve_stages(
        StageProblem(
            options,
            problem.available,
            problem.microbatches,
            np.array(entering_s),
            np.ones(L, bool),
            problem.in_flight,
            boundary_busy=problem.boundary_busy,
        ),
        mixed=True,
    )
    if isinstance(stages, StageShortage):
        return None
    groups = [
        SegmentGroup(tuple(range(first, end)), sizes[o][1], tuple(fastest[sizes[o]][first:end]), sizes[o][0])
        for first, end, o in stages.pieces
    ]
    return evaluate(problem, groups)


def _stage_option(problem: BranchProblem, size: tuple[int, int], chosen: list[int], limit: float) -> StageOption:
    """The chosen options of all segments as arrays. size: kind and number of devices."""
    kind, devices = size
    missing = SegmentOption(devices, 0.0, resting_bytes=NEVER)
    rows = [row[i] if i >= 0 else missing for row, i in zip(problem.segments, chosen, strict=True)]
    names = ("time_s", "step_s", "resting_bytes", "held_bytes", "peak_bytes")
    time, step, resting, held, peak = (np.array([getattr(o, n) for o in rows], float) for n in names)
    return StageOption(str(devices), devices, time, np.zeros(len(rows)), step, resting, held, peak, limit, kind)
