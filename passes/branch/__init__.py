"""Branches side by side: models whose segments form a DAG (camera, lidar and radar encoders, fusion, heads).

A group of devices runs a set of segments. Groups are numbered so that every edge u -> v has group(u) <= group(v): then
the groups form a DAG too, and any grouping that does can be numbered so. Chains of stages, and everything in one group,
are groupings like others, so the answer is never worse than those. For M microbatches

    total = longest path over groups of (group time + hand-over)  +  (M - 1) * busiest group  +  longest step_s

is minimised by CP-SAT over x[segment, group, option], with times as integers; `evaluate` says the exact figure.
"""

from autopar.passes.branch.best_grouping import solve_branches
from autopar.passes.branch.grouping import BranchProblem, BranchSolution, SegmentGroup, SegmentOption, evaluate

__all__ = ["BranchProblem", "BranchSolution", "SegmentGroup", "SegmentOption", "evaluate", "solve_branches"]
