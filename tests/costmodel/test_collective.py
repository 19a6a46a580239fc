"""Collectives: the choice of algorithm, against the formulas of the texts, and the laws that must hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.costmodel import collective as c
from autopar.errors import ClusterError
from autopar.ir.mesh import Mesh
from tests.oracles import collectives as textbook

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "broadcast", "p2p")


def two_levels(ranks: int = 32, node: int = 8, inner: float = 600e9, outer: float = 200e9, **how: float) -> ClusterSpec:
    return ClusterSpec.homogeneous(
        devices=ranks,
        device="a100",
        devices_per_node=node,
        intra_bandwidth_Bps=inner,
        inter_bandwidth_Bps=outer,
        intra_latency_s=how.get("latency", 0.0),
        inter_latency_s=how.get("latency", 0.0),
        intra_efficiency=1.0,
        inter_efficiency=1.0,
    )


def test_a_cluster_with_plain_links_gives_the_ring_formula():
    cluster = two_levels(8)
    assert c.collective_time_s(cluster, "all_reduce", 1e9, tuple(range(8))) == pytest.approx(
        textbook.ring_all_reduce_s(1e9, 8, 600e9)
    )


def test_worked_example_of_four_b200_nodes():
    cluster = two_levels(32, 8, 740.64e9, 50e9)
    shard_boundary_tensor = 2 * 3 / 4 * (2**32 / 8) / 50e9
    assert shard_boundary_tensor * 1e3 == pytest.approx(16.1, abs=0.05)
    time = c.collective_time_s(cluster, "all_reduce", 2**32, tuple(range(32)))
    assert time == pytest.approx(shard_boundary_tensor)
    assert time < textbook.flat_ring_s(cluster, "all_reduce", 2**32, tuple(range(32)))


def test_small_messages_go_by_tree_and_large_ones_by_ring():
    cluster = two_levels(64, 64, latency=5e-6)
    ranks = tuple(range(64))
    assert c.collective_time_s(cluster, "all_reduce", 1e3, ranks) == pytest.approx(
        textbook.tree_all_reduce_s(1e3, 64, 600e9, 5e-6)
    )
    assert c.collective_time_s(cluster, "all_reduce", 1e12, ranks) == pytest.approx(
        textbook.ring_all_reduce_s(1e12, 64, 600e9, 5e-6)
    )


def test_in_switch_reduction_beats_the_ring_on_hopper():
    with_switch, without = (
        ClusterSpec.preset("dgx-h100"),
        ClusterSpec.homogeneous(devices=8, device="h100", in_switch=False),
    )
    ranks = tuple(range(8))
    assert c.collective_time_s(with_switch, "all_reduce", 1e9, ranks) < c.collective_time_s(
        without, "all_reduce", 1e9, ranks
    )


def test_two_of_eight_fully_meshed_devices_use_one_link():
    cluster = ClusterSpec.preset("mi300x")
    pair = c.collective_time_s(cluster, "all_reduce", 1e9, (0, 1))
    assert pair > c.collective_time_s(cluster, "all_reduce", 1e9, tuple(range(8)))


def test_strided_groups_equal_listed_ones():
    cluster = ClusterSpec.preset("dgx-h100", nodes=8)
    for stride, count in ((1, 8), (1, 16), (8, 8), (4, 16), (2, 32), (16, 4)):
        ranks = tuple(range(0, stride * count, stride))
        for kind in KINDS[:5]:
            listed = c.collective_time_s(cluster, kind, 1e8, ranks)
            assert c.strided_time_s(cluster, kind, 1e8, stride, count) == pytest.approx(listed), (kind, stride, count)


@given(
    kind=st.sampled_from(KINDS),
    nbytes=st.floats(1, 1e11),
    faster=st.floats(1, 10),
    node=st.sampled_from([2, 4, 8]),
    nodes=st.integers(1, 8),
    outer=st.floats(1e9, 1e11),
)
def test_more_bandwidth_is_never_slower(kind, nbytes, faster, node, nodes, outer):
    slow = two_levels(node * nodes, node, outer * 4, outer, latency=1e-6)
    fast = two_levels(node * nodes, node, outer * 4 * faster, outer * faster, latency=1e-6)
    ranks = tuple(range(node * nodes))
    assert c.collective_time_s(fast, kind, nbytes, ranks) <= c.collective_time_s(slow, kind, nbytes, ranks) * (
        1 + 1e-12
    )


@given(nbytes=st.floats(1, 1e11), node=st.sampled_from([2, 4, 8]), nodes=st.integers(2, 8), ratio=st.floats(1, 20))
def test_hierarchical_is_never_slower_than_a_flat_ring(nbytes, node, nodes, ratio):
    cluster = two_levels(node * nodes, node, 50e9 * ratio, 50e9, latency=2e-6)
    ranks = tuple(range(node * nodes))
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert c.collective_time_s(cluster, kind, nbytes, ranks) <= textbook.flat_ring_s(
            cluster, kind, nbytes, ranks
        ) * (1 + 1e-9)


@given(kind=st.sampled_from(KINDS), small=st.floats(1, 1e9), more=st.floats(1, 100))
def test_more_bytes_are_never_faster(kind, small, more):
    cluster = ClusterSpec.preset("dgx-a100", nodes=2)
    ranks = tuple(range(16))
    assert (
        c.collective_time_s(cluster, kind, small, ranks)
        <= c.collective_time_s(cluster, kind, small * more, ranks) + 1e-15
    )


def test_sharing_a_link_costs():
    cluster = ClusterSpec.preset("dgx-a100", nodes=2)
    alone = c.collective_time_s(cluster, "all_gather", 1e9, (0, 8))
    assert c.collective_time_s(cluster, "all_gather", 1e9, (0, 8), concurrent=4) > 3 * alone


def measured_on(cluster: ClusterSpec, place: int, points: tuple[tuple[float, float], ...], *kinds: str) -> ClusterSpec:
    """One of its levels measured among 4 ranks."""
    levels = list(cluster.levels)
    levels[place] = replace(levels[place], measured=tuple((kind, 4, points) for kind in kinds))
    return replace(cluster, levels=tuple(levels))


@pytest.mark.parametrize("kind", c.COSTS)
def test_what_was_measured_wins_over_the_formula_for_every_kind(kind: str):
    points = ((1.0, 2e-3), (1e6, 3e-3), (4e6, 9e-3))
    cluster = measured_on(two_levels(4, 4), 0, points, kind)
    for nbytes, seconds in ((1e3, 2e-3), (1e6, 3e-3), (2.5e6, 6e-3), (8e6, 17e-3)):
        assert c.collective_time_s(cluster, kind, nbytes, (0, 1, 2, 3)) == pytest.approx(seconds, rel=2e-3)


@pytest.mark.parametrize("kind", ["all_to_all", "exchange"])
def test_levels_that_were_measured_and_not_each_carry_what_crosses_them(kind: str):
    """16 ranks in nodes of 4: a quarter of what a rank holds stays in its node, all of it goes by the level between."""
    plain, points = two_levels(16, 4, 600e9, 1e9, latency=1e-6), ((1.0, 1e-3), (1e9, 1.001))
    ranks, nbytes = tuple(range(16)), 4e8
    inner, outer = measured_on(plain, 0, points, kind), measured_on(plain, 1, points, kind)
    across_s = c.collective_time_s(plain, kind, nbytes, ranks)
    assert across_s == pytest.approx(0.75 * nbytes / 1e9, rel=0.01)
    assert c.collective_time_s(inner, kind, nbytes, ranks) == pytest.approx(across_s + 1e-3, rel=1e-3)
    assert c.collective_time_s(outer, kind, nbytes, ranks) == pytest.approx(0.4 + 1e-3, rel=1e-3)


def test_errors_name_the_mistake():
    cluster = ClusterSpec.local(4)
    with pytest.raises(ClusterError, match="unknown collective 'gossip'"):
        c.collective_time_s(cluster, "gossip", 1, (0, 1))
    with pytest.raises(ClusterError, match="rank 9 is outside"):
        c.collective_time_s(cluster, "all_reduce", 1, (0, 9))


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.integers(1, 5),
    st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_messages_are_priced_among_the_ranks_that_need_longest(node, nodes, sizes, offset):
    """By threes in nodes of four every group but the first one crosses nodes."""
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)), offset)
    cluster = two_levels(node * (nodes + -(-(mesh.size + offset) // node)), node)
    for axis in mesh.names:
        slowest = c.collective_time_s(cluster, "all_reduce", 1e8, c.slowest_group(cluster.levels, mesh, (axis,)))
        others = [mesh.group((axis,), rank) for rank in range(offset, offset + mesh.size)]
        assert slowest == max(c.collective_time_s(cluster, "all_reduce", 1e8, ranks) for ranks in others)
