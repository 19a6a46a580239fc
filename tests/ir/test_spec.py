"""Specs and meshes: printing reads back, local shapes multiply to the whole, groups partition the ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ShardingError
from autopar.ir.mesh import Mesh
from autopar.ir.spec import REDUCTIONS, Spec, parse_spec
from autopar.ir.types import TensorType

NAMES = ("dp", "tp", "cp", "ep")


@st.composite
def meshes(draw: st.DrawFn, least: int = 1) -> Mesh:
    names = draw(st.permutations(NAMES))[: draw(st.integers(least, 3))]
    return Mesh(tuple((n, draw(st.sampled_from((2, 3, 4, 1)))) for n in names), draw(st.integers(0, 5)))


@st.composite
def specs(draw: st.DrawFn, mesh: Mesh) -> Spec:
    """Every axis of the mesh shards some dim, is owed, or is unused."""
    rank = draw(st.integers(0, 4))
    dims: list[list[str]] = [[] for _ in range(rank)]
    owed = []
    for axis in draw(st.permutations(mesh.names)):
        where = draw(st.integers(-2, rank - 1))
        if where >= 0:
            dims[where].append(axis)
        elif where == -1:
            owed.append((axis, draw(st.sampled_from(REDUCTIONS))))
    return Spec(tuple(map(tuple, dims)), tuple(sorted(owed)))


@given(st.data())
def test_a_printed_spec_reads_back(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    spec = data.draw(specs(mesh))
    type_ = TensorType(
        tuple(12 for _ in spec.dims), data.draw(st.sampled_from((torch.float32, torch.bool, torch.int64)))
    )
    assert parse_spec(str(spec)) == spec
    assert parse_spec(spec.show(type_)) == spec
    assert hash(parse_spec(str(spec))) == hash(spec)
    assert spec.axes <= set(mesh.names)


@given(st.data())
def test_local_shapes_share_the_whole_evenly(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    spec = data.draw(specs(mesh))
    shape = tuple(mesh.product(axes) * data.draw(st.integers(1, 3)) for axes in spec.dims)
    local = spec.local_shape(shape, mesh)
    parts = math.prod(mesh.product(axes) for axes in spec.dims)
    assert math.prod(local) * parts == math.prod(shape)
    assert spec.divides(shape, mesh)
    type_ = TensorType(shape, torch.float32)
    assert spec.local_bytes(type_, mesh) == 4 * math.prod(local)


def test_a_spec_prints_as_in_the_design_page() -> None:
    spec = Spec((("dp",), (), ("tp",)), (("cp", "sum"),))
    assert spec.show(TensorType((8, 128, 4096), torch.float32)) == "f32[8@dp, 128, 4096@tp] ~sum(cp)"
    assert str(spec) == "[@dp, ., @tp] ~sum(cp)"
    assert str(Spec((("dp", "tp"),))) == "[@dp.tp]"
    assert Spec.replicated(2).is_replicated
    assert not spec.is_replicated
    assert spec.without_partial() == Spec(spec.dims)


def test_a_dim_that_does_not_divide_is_refused_with_what_would() -> None:
    with pytest.raises(ShardingError, match="30 cannot be split over tp=8; use axis sizes whose product divides 30"):
        Spec((("tp",),)).local_shape((30,), Mesh.of(tp=8))


@pytest.mark.parametrize("text", ["dp", "[@dp", "[.] sum(dp)", "[.] ~sum()", ""])
def test_text_that_is_no_spec_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ShardingError, match="is no spec; write for example"):
        parse_spec(text)


def test_an_unknown_reduction_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ShardingError, match="unknown reduction 'mean'; known are sum, max, min"):
        parse_spec("[.] ~mean(dp)")


# --- meshes -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_groups_along_any_axes_partition_the_ranks(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = tuple(data.draw(st.permutations(mesh.names))[: data.draw(st.integers(0, len(mesh.names)))])
    ranks = range(mesh.offset, mesh.offset + mesh.size)
    groups = {mesh.group(axes, r) for r in ranks}
    assert sorted(itertools.chain(*groups)) == list(ranks)
    assert {len(g) for g in groups} == {mesh.product(axes)}
    for rank in ranks:
        group = mesh.group(axes, rank)
        index = 0
        for axis in axes:
            index = index * mesh.sizes[axis] + mesh.coordinate(rank)[axis]
        assert group[index] == rank


@given(st.data())
def test_coordinates_number_ranks_row_major(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    for rank, where in enumerate(itertools.product(*(range(n) for _, n in mesh.axes))):
        assert tuple(mesh.coordinate(rank + mesh.offset)[n] for n in mesh.names) == where
        assert sum(i * mesh.stride(n) for n, i in zip(mesh.names, where, strict=True)) == rank


def test_the_last_axis_lies_on_neighbours() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    assert mesh.group(("tp",)) == (0, 1, 2, 3)
    assert mesh.group(("dp",), 5) == (1, 5)
    assert mesh.group(("dp", "tp")) == tuple(range(8))
    assert mesh.group(("tp", "dp")) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert str(mesh) == "dp=2×tp=4"
    assert str(Mesh(())) == "one rank"
    assert Mesh.from_dict({"dp": 2, "tp": 4}) == mesh


@given(st.data())
def test_runs_of_a_block_are_equal_and_hold_it_once(data: st.DataObject) -> None:
    """Less than an element a rank is made up, and what is printed reads back."""
    mesh = data.draw(meshes())
    block = data.draw(specs(mesh)).without_partial()
    free = [axis for axis in mesh.names if axis not in block.axes]
    if not block.dims or not free:
        return
    run = tuple(data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True)))
    spec = Spec(block.dims, (), run)
    assert parse_spec(str(spec)) == spec
    assert spec.block == block
    assert spec.refines(spec)
    assert spec.refines(block)
    assert not block.refines(spec)
    assert spec.axes == block.axes | set(run)
    shape = tuple(mesh.product(axes) * data.draw(st.integers(1, 5)) for axes in spec.dims)
    local, whole = spec.local_shape(shape, mesh), math.prod(block.local_shape(shape, mesh))
    assert len(local) == len(shape)
    assert set(local[1:]) <= {1}
    assert whole <= local[0] * mesh.product(run) < whole + mesh.product(run)
    assert spec.local_bytes(TensorType(shape, torch.float32), mesh) == 4 * local[0]
