"""The best grouping: CP-SAT, started from (and never worse than) one group and the best chain of stages."""

from __future__ import annotations

import numpy as np

from autopar.errors import InfeasibleError
from autopar.passes.branch.model import Model
from autopar.passes.branch.problem import BranchProblem, BranchSolution, Group, SegmentOption, evaluate
from autopar.passes.stage import Option, StageProblem, StageShortage, solve_stages

NEVER = 1e15
"""Bytes of a segment on a number of devices it has no option for."""


def solve_branches(
    problem: BranchProblem, *, max_groups: int | None = None, time_limit_s: float = 10.0
) -> BranchSolution:
    """The grouping with the least predicted step time. Raises InfeasibleError, saying what is short, when none fits.

    max_groups: at most so many groups (default: as many as there are segments, up to 8). When the time runs out, the best
    of what was found, of one group, and of the best chain of stages; `bound` says how far off it can be.
    """
    G = min(len(problem.segments), problem.devices, max_groups or 8)
    model = Model(problem, G)
    known = [
        s
        for s in (_one_group(problem), _chain(problem))
        if s is not None and len(s.groups) <= G and problem.serves(s.groups)
    ]
    if known:
        model.hint(min(known, key=lambda s: s.total_s))
    found, lower = model.solve(time_limit_s)
    solutions = [*known, found] if found is not None else known
    if not solutions:
        raise InfeasibleError(_shortage(problem, G, time_limit_s))
    best = min(solutions, key=lambda s: s.total_s)
    return BranchSolution(**{**best.__dict__, "bound": min(max(lower, 0.0), best.total_s)})


def _one_group(problem: BranchProblem) -> BranchSolution | None:
    """Everything on the same devices, the fastest way that fits."""
    best: BranchSolution | None = None
    for devices in {o.devices for o in problem.segments[0] if o.devices <= problem.devices}:
        ways = [[i for i, o in enumerate(options) if o.devices == devices] for options in problem.segments]
        if not all(ways):
            continue
        options = tuple(
            min(way, key=lambda i, s=s: problem.segments[s][i].time_s)
            for s, way in enumerate(ways)  # type: ignore[misc]
        )
        found = evaluate(problem, [Group(tuple(range(len(ways))), devices, options)])
        if found.memory[0] <= problem.limit_bytes and (best is None or found.total_s < best.total_s):
            best = found
    return best


def _chain(problem: BranchProblem) -> BranchSolution | None:
    """The best pipeline of consecutive segments, as the stage solver sees them: one after another."""
    L = len(problem.segments)
    limit = min(problem.limit_bytes, NEVER / 10)
    enter = np.array(
        [sum(problem.hand_over_s(e) for e, (u, v, _) in enumerate(problem.edges) if u < l <= v) for l in range(L)]
    )
    ways: dict[int, list[int]] = {}
    options = []
    for devices in sorted({o.devices for w in problem.segments for o in w if o.devices <= problem.devices}):
        picks = [
            min((i for i, o in enumerate(w) if o.devices == devices), key=lambda i, w=w: w[i].time_s, default=-1)  # type: ignore[misc]
            for w in problem.segments
        ]
        missing = SegmentOption(devices, 0.0, resting_bytes=NEVER)
        row = [w[i] if i >= 0 else missing for w, i in zip(problem.segments, picks, strict=True)]
        ways[devices] = picks
        names = ("time_s", "step_s", "resting_bytes", "held_bytes", "peak_bytes")
        time, step, resting, held, peak = (np.array([getattr(o, n) for o in row], float) for n in names)
        options.append(Option(str(devices), devices, time, np.zeros(L), step, resting, held, peak, limit))
    if not options:
        return None
    found = solve_stages(
        StageProblem(
            tuple(options),
            (problem.devices,),
            problem.microbatches,
            enter,
            np.ones(L, bool),
            problem.in_flight,
            boundary_busy=problem.boundary_busy,
        ),
        mixed=True,
    )
    if isinstance(found, StageShortage):
        return None
    groups = []
    for i, j, o in found.pieces:
        devices = options[o].devices
        groups.append(Group(tuple(range(i, j)), devices, tuple(ways[devices][i:j])))
    answer = evaluate(problem, groups)
    return answer if max(answer.memory) <= problem.limit_bytes else None


def _shortage(problem: BranchProblem, G: int, time_limit_s: float) -> str:
    for s, options in enumerate(problem.segments):
        if all(o.devices > problem.devices for o in options):
            least = min(o.devices for o in options)
            return f"{problem.name(s)} needs at least {least} devices and there are {problem.devices}"
    found, _ = Model(problem, G, memory=True).solve(time_limit_s)
    if found is None:
        return (
            f"no grouping of {len(problem.segments)} segments fits {problem.devices} devices in {G} groups; segments of one "
            "group need an option for the same number of devices"
        )
    worst = max(range(len(found.groups)), key=lambda g: found.memory[g])
    names = ", ".join(problem.name(s) for s in found.groups[worst].segments)
    return (
        f"no grouping fits in memory: at the best one, the group of {names} on {found.groups[worst].devices} devices needs "
        f"{found.memory[worst] / 2**30:.2f} GiB of {problem.limit_bytes / 2**30:.2f} GiB"
    )
