"""Blocks between meshes: every target element arrives once, from a rank that has it; loads are spread."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.comm.mesh import box_of, boxes_of, mesh_index, mesh_size, slices_of
from autopar.runtime.program.layout import fill
from autopar.runtime.program.transfer import Placed, pieces

SHAPE = (4, 8)
AXES = ("a", "b", "c")


@st.composite
def placements(draw, first_ranks, runs=False):
    """A mesh of up to three axes of 1, 2 or 3 and a spec that divides SHAPE. runs: axes that shard no dim may cut elements."""
    mesh = {axis: draw(st.sampled_from((1, 2, 3))) for axis in AXES[: draw(st.integers(1, 3))]}
    spec = [[], []]
    for axis in draw(st.permutations(list(mesh))):
        dim = draw(st.sampled_from((None, 0, 1)))
        parts = {d: mesh_size({x: mesh[x] for x in spec[d]}) for d in (0, 1)}
        if dim is not None and SHAPE[dim] % (parts[dim] * mesh[axis]) == 0:
            spec[dim].append(axis)
    free = [axis for axis in mesh if runs and axis not in (*spec[0], *spec[1])]
    run = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    return Placed(mesh, draw(first_ranks), (*map(tuple, spec), *([tuple(run)] if run else [])))


def local(full: torch.Tensor, placed: Placed, rank: int) -> torch.Tensor:
    boxes = boxes_of(SHAPE, placed.spec, placed.mesh, mesh_index(placed.mesh, rank - placed.first_rank))
    shape = placed.local_shape(SHAPE, rank, "x")
    assert shape is not None
    value = full.new_full(shape, -1)
    fill(value, [full[slices_of(box)] for box in boxes])
    return value


def ranks(placed: Placed) -> range:
    return range(placed.first_rank, placed.first_rank + mesh_size(placed.mesh))


@given(placements(st.just(0), runs=True), placements(st.sampled_from((0, 1, 2, 8)), runs=True))
def test_every_element_arrives_exactly_once_from_a_rank_that_holds_it(source, target):
    full = torch.arange(1, 33).view(SHAPE)
    found = pieces(SHAPE, source, target)
    arrived = {rank: torch.zeros_like(local(full, target, rank)) for rank in ranks(target)}
    times = {rank: torch.zeros_like(value) for rank, value in arrived.items()}
    for piece in found:
        piece.arrives.of(arrived[piece.target]).copy_(piece.sent.of(local(full, source, piece.source)))
        piece.arrives.of(times[piece.target]).add_(1)
    for rank in ranks(target):
        assert torch.equal(arrived[rank], local(full, target, rank))
        assert torch.equal(times[rank], (local(full, target, rank) != 0).long())


@given(placements(st.just(0)), placements(st.sampled_from((0, 1, 2, 8))))
def test_one_message_per_pair_and_none_for_what_a_rank_has(source, target):
    found = pieces(SHAPE, source, target)
    assert max(Counter((p.source, p.target) for p in found).values()) == 1
    for rank in set(ranks(source)) & set(ranks(target)):
        full = torch.arange(32).view(SHAPE)
        own = set(local(full, source, rank).flatten().tolist())
        for piece in found:
            if piece.target == rank != piece.source:
                sent = piece.sent.of(local(full, source, piece.source))
                assert not own & set(sent.flatten().tolist())


@given(placements(st.just(0)), placements(st.just(8)))
def test_ranks_that_hold_the_same_share_the_work(source, target):
    """Between disjoint ranks, two holders of a box differ by one message at most."""
    sent = Counter(p.source for p in pieces(SHAPE, source, target))
    for a, b in itertools.combinations(ranks(source), 2):
        index = [mesh_index(source.mesh, rank) for rank in (a, b)]
        if box_of(SHAPE, source.spec, source.mesh, index[0]) == box_of(SHAPE, source.spec, source.mesh, index[1]):
            assert abs(sent[a] - sent[b]) <= 1
