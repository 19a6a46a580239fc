"""Runs of a block: the boxes of all ranks are its elements in their order, each once, and they are few."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.comm.mesh import boxes_of, mesh_index, mesh_size, run_boxes, run_shape, slices_of

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_a_run_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    block = torch.arange(math.prod(shape)).view(shape)
    start, stop = sorted(data.draw(st.tuples(*2 * [st.integers(0, block.numel())])))
    boxes = run_boxes(shape, start, stop)
    found = [n for box in boxes for n in block[slices_of(box)].flatten().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


@given(SHAPES, st.sampled_from([{"a": 2, "b": 3}, {"a": 3, "b": 2}, {"a": 5, "b": 1}]))
def test_ranks_hold_the_runs_of_their_block_one_after_another(shape: list[int], mesh: dict[str, int]) -> None:
    """Dim 0 of twice the size is cut over one axis, and its blocks over the other."""
    first, other = mesh
    shape = [shape[0] * mesh[first], *shape[1:]]
    whole, found = torch.arange(math.prod(shape)).view(shape), []
    for rank in range(mesh_size(mesh)):
        boxes = boxes_of(shape, ((first,), *((),) * (len(shape) - 1), (other,)), mesh, mesh_index(mesh, rank))
        own = [n for box in boxes for n in whole[slices_of(box)].flatten().tolist()]
        assert len(own) <= run_shape([shape[0] // mesh[first], *shape[1:]], mesh[other])[0]
        found += own
    assert found == whole.flatten().tolist()
