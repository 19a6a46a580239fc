"""Finer meshes: those of three axes, and of two across nodes.

There are many, and the best of the first meshes does not tell which is fast: one axis over all ranks may be better than two
inside nodes, and two across nodes better than both. But the seconds over the sizes of axes have hardly more than one valley. So
those of two axes, which take little time, are all planned, and of three a walk goes from the best mesh so far as long as that
gets better: over sizes of the axis in the middle, then over those of the one inside the fast links. On one node, where any two
ranks are as near, a third axis is tried for experts alone: 300 layers of which none is like another took 1.7 times as long to
plan with it, for the same plan. All are planned with what ops took along the axes of the first meshes
(`autopar.passes.rules.per_axis`), which takes a tenth of the time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from autopar.ir.mesh import Mesh
from autopar.passes.search.lower_bounds import least_step_s
from autopar.passes.search.task import Task
from autopar.passes.shard.meshes import CONTEXT, finer_meshes
from autopar.passes.shard.uneven import EXPERTS, numbers_of_experts, rows_of

WORTH = 0.995
"""A plan is looked for where it could be faster by more than this."""

Seconds = Callable[[Mesh], float]
"""The seconds of the best plan on a mesh, as the solver counts them; infinite where there is none."""


def meshes_worth_trying(task: Task, best_s: float) -> list[Mesh]:
    """The finer meshes of a task; none where a step of so many seconds is as fast as if all work were perfectly shared."""
    if least_step_s(task) >= WORTH * best_s:
        return []
    meshes = finer_meshes_of(task, task.cluster.size, rows_of(task.program))
    return [mesh for mesh in map(task.sharing, meshes) if not mesh.uneven]


def finer_meshes_of(task: Task, ranks: int, rows: int | None = None) -> list[Mesh]:
    """The finer meshes of so many ranks. rows: of a microbatch, where they are known."""
    if task.options.strategy != "auto" or task.layout is not None:
        return []
    middle = EXPERTS if numbers_of_experts(task.program, task.rules) else CONTEXT
    if middle == CONTEXT and ranks <= task.cluster.levels[0].group_size:
        return []
    return finer_meshes(task.cluster, task.options, middle, ranks, rows)


def walked(meshes: Sequence[Mesh], first: Mapping[Mesh, float], seconds: Seconds) -> dict[Mesh, float]:
    """The finer meshes that the walk comes to, with their seconds. meshes: all of them; first: the seconds of the meshes that
    were tried before, some of which may be among the finer ones."""
    lines: dict[int, list[Mesh]] = defaultdict(list)
    for mesh in sorted(meshes, key=lambda mesh: mesh.axes[1][1]):
        lines[math.prod(_sizes(mesh)[2:])].append(mesh)
    found = {mesh: seconds(mesh) for mesh in lines.pop(1, [])}
    known = {**first, **found}
    best = min(known, key=lambda mesh: known[mesh])
    best_two = min((mesh for mesh in first if len(mesh.axes) > 1), key=lambda mesh: first[mesh], default=best)

    def walk(inner: int) -> Mesh:
        return _valley(lines.pop(inner), _inside(best) / inner, known, seconds)

    gets_better = True
    while lines and gets_better:
        lowest = walk(min(lines))
        gets_better = known[lowest] < known[best]
        best = lowest if gets_better else best
    if _sizes(best_two)[-1] in lines:
        walk(_sizes(best_two)[-1])
    return {mesh: known[mesh] for mesh in meshes if mesh in known and mesh not in first}


def _inside(mesh: Mesh) -> int:
    """How many ranks differ in other places than the first axis; all where there is one axis."""
    return math.prod(_sizes(mesh)[1:]) if len(mesh.axes) > 1 else mesh.size


def _sizes(mesh: Mesh) -> list[int]:
    return [n for _, n in mesh.axes]


def _valley(line: Sequence[Mesh], middle: float, known: dict[Mesh, float], seconds: Seconds) -> Mesh:
    """The fastest mesh of those that differ in the axis in the middle, going both ways from about this size of it. What is asked
    becomes known."""

    def ask(place: int) -> float:
        if line[place] not in known:
            known[line[place]] = seconds(line[place])
        return known[line[place]]

    start = min(range(len(line)), key=lambda place: abs(math.log2(line[place].axes[1][1] / middle)))
    lowest = start
    for way in (1, -1):
        place = start
        while 0 <= place + way < len(line) and ask(place + way) < ask(place):
            place += way
        lowest = min(lowest, place, key=ask)
    return line[lowest]
