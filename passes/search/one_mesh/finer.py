"""Finer meshes, where the first ones gave reason to plan them: those of three axes, and of two across nodes.

Of what more axes can win the second one wins most. So a third is tried only where that nearly paid: where the best plan on two
axes takes little more than the best on one. On one node, where any two ranks are as near, it is tried for experts alone: 300
layers of which none is like another took 1.7 times as long to plan with it, for the same plan. These meshes are planned with
what ops took along the axes of the first ones (`autopar.passes.rules.per_axis`), which takes a tenth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.ir.mesh import Mesh
from autopar.passes.search.task import Task
from autopar.passes.shard.meshes import CONTEXT, finer_meshes
from autopar.passes.shard.uneven import EXPERTS, numbers_of_experts, rows_of

NEARLY = 1.01
"""A third axis is tried where a second one makes the step no longer than by this."""


def meshes_worth_trying(task: Task, steps: Iterable[tuple[Mesh, float]]) -> list[Mesh]:
    """The finer meshes that may be faster than those that were tried. steps: these, with the seconds that a plan takes there
    at least (infinite where none fits)."""
    if not second_axis_paid(steps):
        return []
    meshes = finer_meshes_of(task, task.cluster.size, rows_of(task.program))
    return [mesh for mesh in map(task.sharing, meshes) if not mesh.uneven]


def second_axis_paid(steps: Iterable[tuple[Mesh, float]]) -> bool:
    """Whether the best of these plans on two axes takes little more than the best on one. steps: as of `meshes_worth_trying`."""
    least = dict.fromkeys((1, 2), math.inf)
    for mesh, seconds in steps:
        axes = sum(size > 1 for _, size in mesh.axes)
        least[axes] = min(least.get(axes, math.inf), seconds)
    return least[2] < NEARLY * least[1]


def finer_meshes_of(task: Task, ranks: int, rows: int | None = None) -> list[Mesh]:
    """The finer meshes of so many ranks. rows: of a microbatch, where they are known."""
    if task.options.strategy != "auto" or task.layout is not None:
        return []
    middle = EXPERTS if numbers_of_experts(task.program, task.rules) else CONTEXT
    if middle == CONTEXT and ranks <= task.cluster.levels[0].group_size:
        return []
    return finer_meshes(task.cluster, task.options, middle, ranks, rows)
