"""Blocks between meshes: every target element arrives once, from a rank that has it; loads are spread."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.comm.mesh import box_of, mesh_index, mesh_size
from autopar.runtime.program.transfer import Placed, pieces

SHAPE = (4, 8)
AXES = ("a", "b", "c")


@st.composite
def placements(draw, first_ranks):
    """A mesh of up to three axes of 1, 2 or 4 and a spec that divides SHAPE."""
    mesh = {axis: draw(st.sampled_from((1, 2))) for axis in AXES[: draw(st.integers(1, 3))]}
    spec = [[], []]
    for axis in draw(st.permutations(list(mesh))):
        dim = draw(st.sampled_from((None, 0, 1)))
        parts = {d: mesh_size({x: mesh[x] for x in spec[d]}) for d in (0, 1)}
        if dim is not None and SHAPE[dim] % (parts[dim] * mesh[axis]) == 0:
            spec[dim].append(axis)
    return Placed(mesh, draw(first_ranks), tuple(map(tuple, spec)))


def local(full: torch.Tensor, placed: Placed, rank: int) -> torch.Tensor:
    box = box_of(SHAPE, placed.spec, placed.mesh, mesh_index(placed.mesh, rank - placed.first_rank))
    return full[tuple(slice(*interval) for interval in box)]


def ranks(placed: Placed) -> range:
    return range(placed.first_rank, placed.first_rank + mesh_size(placed.mesh))


@given(placements(st.just(0)), placements(st.sampled_from((0, 1, 2, 8))))
def test_every_element_arrives_exactly_once_from_a_rank_that_holds_it(source, target):
    full = torch.arange(32).view(SHAPE)
    found = pieces(SHAPE, source, target)
    arrived = {rank: torch.zeros_like(local(full, target, rank)) for rank in ranks(target)}
    times = {rank: torch.zeros_like(value) for rank, value in arrived.items()}
    for piece in found:
        arrived[piece.target][piece.target_slices] = local(full, source, piece.source)[piece.source_slices]
        times[piece.target][piece.target_slices] += 1
    for rank in ranks(target):
        assert torch.equal(arrived[rank], local(full, target, rank))
        assert (times[rank] == 1).all()


@given(placements(st.just(0)), placements(st.sampled_from((0, 1, 2, 8))))
def test_one_message_per_pair_and_none_for_what_a_rank_has(source, target):
    found = pieces(SHAPE, source, target)
    assert max(Counter((p.source, p.target) for p in found).values()) == 1
    for rank in set(ranks(source)) & set(ranks(target)):
        full = torch.arange(32).view(SHAPE)
        own = set(local(full, source, rank).flatten().tolist())
        for piece in found:
            if piece.target == rank != piece.source:
                sent = local(full, source, piece.source)[piece.source_slices]
                assert not own & set(sent.flatten().tolist())


@given(placements(st.just(0)), placements(st.just(8)))
def test_ranks_that_hold_the_same_share_the_work(source, target):
    """Between disjoint ranks, two holders of a box differ by one message at most."""
    sent = Counter(p.source for p in pieces(SHAPE, source, target))
    for a, b in itertools.combinations(ranks(source), 2):
        index = [mesh_index(source.mesh, rank) for rank in (a, b)]
        if box_of(SHAPE, source.spec, source.mesh, index[0]) == box_of(SHAPE, source.spec, source.mesh, index[1]):
            assert abs(sent[a] - sent[b]) <= 1
