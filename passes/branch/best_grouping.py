"""The best grouping: CP-SAT, started from (and never worse than) one group and the groupings that the caller knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.passes.branch.grouping import BranchProblem, BranchSolution, SegmentGroup, evaluate
from autopar.passes.branch.integer_model import GroupingModel


def solve_branches(
    problem: BranchProblem,
    *,
    known: Sequence[BranchSolution] = (),
    max_groups: int | None = None,
    time_limit_s: float = 10.0,
) -> BranchSolution:
    """The grouping with the least predicted step time. Raises InfeasibleError, saying what is short, when none fits.

    known: groupings to start from, such as the best chain of stages; those that do not fit are left out. max_groups: at
    most so many groups (default: as many as there are segments, up to 8). When the time runs out, the answer is the best
    of what the solver has found, of one group, and of the known groupings; `bound` says how far off it can be.
    """
    G = min(len(problem.segments), problem.devices, max_groups or 8)
    model = GroupingModel(problem, G)
    together = _one_group(problem)
    starts = [s for s in (*([together] if together else []), *known) if len(s.groups) <= G and problem.admits(s)]
    if starts:
        model.hint(min(starts, key=lambda s: s.total_s))
    solved, lower_bound_s = model.solve(time_limit_s)
    solutions = [*starts, solved] if solved is not None else starts
    if not solutions:
        raise InfeasibleError(_shortage(problem, G, time_limit_s))
    best = min(solutions, key=lambda s: s.total_s)
    return replace(best, bound=min(max(lower_bound_s, 0.0), best.total_s))


def _one_group(problem: BranchProblem) -> BranchSolution | None:
    """All segments in one group, on the number of devices that is fastest and fits; None where none fits."""
    best: BranchSolution | None = None
    for kind, devices in problem.sizes:
        options = problem.fastest_options(devices, kind)
        if -1 in options:
            continue
        one_group = evaluate(problem, [SegmentGroup(tuple(range(len(options))), devices, tuple(options), kind)])
        if one_group.memory[0] <= problem.limit_bytes and (best is None or one_group.total_s < best.total_s):
            best = one_group
    return best


def _shortage(problem: BranchProblem, G: int, time_limit_s: float) -> str:
    for s, options in enumerate(problem.segments):
        if all(o.devices > problem.devices for o in options):
            least = min(o.devices for o in options)
            return f"{problem.name(s)} needs at least {least} devices and there are {problem.devices}"
    leanest, _ = GroupingModel(problem, G, memory=True).solve(time_limit_s)
    if leanest is None:
        return (
            f"no grouping of {len(problem.segments)} segments fits {problem.devices} devices in {G} groups; segments of one "
            "group need an option for the same number of devices"
        )
    worst = max(range(len(leanest.groups)), key=lambda g: leanest.memory[g])
    names = ", ".join(problem.name(s) for s in leanest.groups[worst].segments)
    return (
        f"no grouping fits in memory: at the best one, the group of {names} on {leanest.groups[worst].devices} devices needs "
        f"{leanest.memory[worst] / 2**30:.2f} GiB of {problem.limit_bytes / 2**30:.2f} GiB"
    )
