"""Conversions between specs: every path, run on real blocks, gives the spec and the value it promises."""

from __future__ import annotations

import functools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.ir.lines import Convert, Line
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.lower.convert import Converter
from autopar.passes.lower.names import Names
from autopar.passes.price.pricer import Pricer
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.threads import run_threads

MESHES = (Mesh.of(dp=2, tp=2), Mesh.of(dp=2, tp=2, cp=2), Mesh.of(tp=4))
SHAPE = (8, 8)


@functools.lru_cache
def pricer(index: int) -> Pricer:
    return Pricer(ClusterSpec.local(MESHES[index].size), MESHES[index])


def block(whole: torch.Tensor, spec: Spec, comm: Comm, mesh: Mesh) -> torch.Tensor:
    """The block of `whole` on this rank: its slice, and for partial axes a random-looking term of the sum."""
    local = whole
    for dim, axes in enumerate(spec.dims):
        if axes:
            local = comm.shard(local, dim, axes)
    for axis, _ in spec.partial:
        n, i = mesh.sizes[axis], comm.axis_index(axis)
        local = local * (2.0 * (i + 1) / (n * (n + 1)))
    return local.clone()


def apply(line: Line, x: torch.Tensor, comm: Comm) -> torch.Tensor:
    assert isinstance(line, Convert)
    step = line.step
    if step.kind == "shard":
        return comm.shard(x, step.dim, step.axis)
    if step.kind == "to_partial":
        return x if comm.axis_index(step.axis) == 0 else torch.zeros_like(x)
    if step.kind == "all_reduce":
        return comm.all_reduce(x, step.axis, op=step.reduction)
    if step.kind == "reduce_scatter":
        return comm.reduce_scatter(x, step.dim, step.axis, op=step.reduction)
    if step.kind == "all_gather":
        return comm.all_gather(x, step.dim, step.axis)
    return comm.all_to_all(x, step.to_dim, step.dim, step.axis)


@given(st.integers(0, len(MESHES) - 1), st.data())
def test_every_conversion_gives_what_it_promises(index: int, data: st.DataObject) -> None:
    mesh, prices = MESHES[index], pricer(index)
    type_ = TensorType(SHAPE, torch.float64)
    specs = prices.lattice(type_).specs
    before, after = data.draw(st.sampled_from(specs)), data.draw(st.sampled_from(specs))
    lines: list[Line] = []
    Converter(prices, Names(), lines.append).convert("x", "x", type_, before, after, "F", "")
    whole = torch.arange(64, dtype=torch.float64).reshape(SHAPE) + 1

    def rank(comm: Comm) -> bool:
        x = block(whole, before, comm, mesh)
        for line in lines:
            x = apply(line, x, comm)
            assert x.shape == line.specs[0].local_shape(SHAPE, mesh)  # type: ignore[union-attr]
        for axis, op in after.partial:
            x = comm.all_reduce(x, axis, op=op)
        expected = block(whole, after.without_partial(), comm, mesh)
        return torch.allclose(x, expected, rtol=1e-12)

    assert all(run_threads(mesh.size, mesh.sizes, rank, timeout_s=60))


@given(st.integers(0, len(MESHES) - 1), st.data())
def test_conversion_costs_obey_the_triangle_inequality(index: int, data: st.DataObject) -> None:
    lattice = pricer(index).lattice(TensorType(SHAPE, torch.float32))
    a, b, c = (data.draw(st.sampled_from(lattice.specs)) for _ in range(3))
    assert lattice.cost(a, c) <= lattice.cost(a, b) + lattice.cost(b, c) + 1e-12


@given(st.integers(0, len(MESHES) - 1), st.data())
def test_path_costs_what_the_lattice_says(index: int, data: st.DataObject) -> None:
    prices = pricer(index)
    type_ = TensorType(SHAPE, torch.float32)
    lattice = prices.lattice(type_)
    a, b = data.draw(st.sampled_from(lattice.specs)), data.draw(st.sampled_from(lattice.specs))
    total, spec = 0.0, a
    for _, following in lattice.path(a, b):
        total += lattice.cost(spec, following)
        spec = following
    assert spec == b
    assert abs(total - lattice.cost(a, b)) <= 1e-12


def test_costs_between_many_specs_are_those_of_every_pair() -> None:
    """The same numbers as a row, as a column and as a square, each asked for twice."""
    lattice = pricer(1).lattice(TensorType(SHAPE, torch.float32))
    specs = lattice.specs[:4]
    numbers = np.array([lattice.letters.number[spec] for spec in specs])
    pairs = [[lattice.cost(a, b) for b in specs] for a in specs]
    alone = [lattice.cost(a, a) for a in specs]
    for _ in range(2):
        assert lattice.between(numbers[:, None], numbers).tolist() == pairs
        assert lattice.between(numbers[:, None], numbers[:, None]).tolist() == [[cost] for cost in alone]
        assert lattice.between(numbers[:, None], numbers[None, :]).tolist() == pairs
        assert lattice.between(numbers, numbers).tolist() == alone


def test_prices_belong_to_their_mesh() -> None:
    """Two meshes priced in either order cost the same as alone: nothing is cached across meshes."""
    type_ = TensorType((64, 64), torch.float32)
    cluster = ClusterSpec.preset("dgx-a100", nodes=2)
    slow, fast = Mesh.of(dp=16), Mesh.of(dp=2, tp=8)

    def price(mesh: Mesh, axis: str) -> float:
        return Pricer(cluster, mesh).convert_s(type_, Spec(((axis,), ())), Spec.replicated(2))

    first = (price(slow, "dp"), price(fast, "dp"), price(fast, "tp"))
    again = (price(fast, "tp"), price(slow, "dp"), price(fast, "dp"))
    assert first == (again[1], again[2], again[0])
    assert len(set(first)) == 3
