"""Finer meshes of stages, where a pipeline is the best plan so far: those of three axes, and of two across nodes.

They are those of one mesh (`autopar.passes.search.one_mesh.finer`), tried where the best cut on two axes takes little more than
the best on one, around the inner axes and in the sizes that submeshes of good cuts have, and with what ops took along the axes
of the first meshes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

from autopar.ir.mesh import Mesh
from autopar.passes.search.one_mesh.finer import finer_meshes_of
from autopar.passes.search.stages.draft import Draft
from autopar.passes.search.task import Task

NEAR = 1.05
"""Cuts are good whose estimates are within this of the best one."""
NEARLY = 1.01
"""A third axis is tried where a second one makes the step no longer than by this."""
_SIZES = 2
"""Sizes of submeshes that are tried at most."""


def finer_submeshes(task: Task, cuts: Sequence[Draft]) -> list[Mesh]:
    """The finer meshes on which cuts may be better than these, of which the best is the first one; small ones first, as a mesh
    is left out where half of it is busy for too long."""
    if not _second_axis_paid(cuts):
        return []
    good = list(takewhile(lambda cut: cut.step_s < NEAR * cuts[0].step_s, cuts))
    used = [mesh for cut in good for mesh in cut.used_meshes()]
    inner = {mesh.axes[-1][1] if len(mesh.axes) > 1 else 1 for mesh in used}
    planned = {plan.mesh for cut in cuts for plan in cut.submesh_plans}
    return [
        mesh
        for ranks in sorted(list(dict.fromkeys(mesh.size for mesh in used))[:_SIZES])
        for mesh in finer_meshes_of(task, ranks)
        if mesh.sizes.get("tp", 1) in inner and mesh not in planned and not task.sharing(mesh).uneven
    ]


def _second_axis_paid(cuts: Sequence[Draft]) -> bool:
    """Whether the best of these cuts with a submesh of two axes takes little more than the best with one of one axis."""
    least_s = dict.fromkeys((1, 2), math.inf)
    for cut in cuts:
        for mesh in cut.used_meshes():
            axes = sum(size > 1 for _, size in mesh.axes)
            least_s[axes] = min(least_s.get(axes, math.inf), cut.step_s)
    return least_s[2] < NEARLY * least_s[1]
