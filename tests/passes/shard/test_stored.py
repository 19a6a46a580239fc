"""The specs in which parameters may rest are found once for all that are cut alike."""

from __future__ import annotations

import itertools

import pytest

from autopar.ir.mesh import Mesh
from autopar.passes.shard.factors.stored import possible_states

SIZES = (1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 40, 64, 65, 72, 73, 100, 144, 216)


@pytest.mark.parametrize("mesh", [Mesh.of(dp=1), Mesh.of(dp=8), Mesh.of(dp=2, tp=4), Mesh.of(replica=3, dp=2)], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_shapes_that_are_cut_alike_may_rest_alike(mesh: Mesh, whole: bool) -> None:
    shapes = [*itertools.product(SIZES), *itertools.product(SIZES, SIZES[::2])]
    for shape in shapes:
        states = possible_states(mesh.axes, shape, True, whole, True).states
        assert states == possible_states(mesh.axes, mesh.cut_alike(shape), True, whole, True).states
    assert len({mesh.cut_alike(shape) for shape in shapes}) < len(shapes)
