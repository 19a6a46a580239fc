"""Collectives of processes across nodes: which way they go, and what that is worth in bytes and seconds."""

from dataclasses import replace

import pytest

from autopar.cluster import ClusterSpec
from autopar.costmodel.by_node import FLAT, by_node_s, flat_s, gloo_time_s, least_bytes
from autopar.costmodel.calibrate import groups_of
from autopar.costmodel.calibrate_links import Sample, fit_links
from autopar.costmodel.collective import collective_time_s

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
LARGE = 2.0**30


def nodes(count: int, places: int, device: str = "cpu", latency_s: float = 0.0, inner: float = 1e12) -> ClusterSpec:
    return ClusterSpec.homogeneous(
        devices=count * places,
        device=device,
        devices_per_node=places,
        intra_bandwidth_Bps=inner,
        inter_bandwidth_Bps=1e8,
        intra_latency_s=latency_s,
        inter_latency_s=latency_s,
        inter_efficiency=1.0,
    )


@pytest.mark.parametrize(("k", "r"), [(2, 2), (2, 4), (4, 2), (3, 5)])
def test_what_leaves_a_node_is_what_the_texts_say(k: int, r: int) -> None:
    cluster, n = nodes(k, r), k * r
    ranks, node_Bps = tuple(range(n)), r * 1e8
    leaves = {kind: flat_s(cluster.levels, kind, LARGE, ranks) * node_Bps / LARGE for kind in KINDS}
    assert leaves["all_reduce"] == pytest.approx(2 * (n - 1) / n, rel=0.01)
    assert leaves["all_gather"] == leaves["reduce_scatter"] == pytest.approx(r * (k - 1) / k, rel=0.01)
    leaves = {kind: by_node_s(cluster.levels, kind, LARGE, ranks) * node_Bps / LARGE for kind in KINDS}
    assert leaves["all_reduce"] == pytest.approx(2 * (k - 1) / k, rel=0.01)
    assert leaves["all_gather"] == leaves["reduce_scatter"] == pytest.approx((k - 1) / k, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_small_messages_go_flat_and_large_ones_by_node(kind: str) -> None:
    cluster, ranks = nodes(2, 2, latency_s=1e-3), (0, 1, 2, 3)
    least = least_bytes(cluster.levels, kind, ranks)
    assert least is not None
    assert least > 2**14
    for nbytes in (least / 2, least, 4.0 * least):
        ways = flat_s(cluster.levels, kind, nbytes, ranks), by_node_s(cluster.levels, kind, nbytes, ranks)
        assert gloo_time_s(cluster, kind, nbytes, ranks) == ways[nbytes >= least] == min(ways)


@pytest.mark.parametrize("ranks", [(0, 1), (0, 4), (0, 1, 2, 4), (0, 1, 4, 8)])
def test_groups_that_are_no_grid_of_nodes_go_flat(ranks: tuple[int, ...]) -> None:
    assert least_bytes(nodes(3, 4).levels, "all_reduce", ranks) is None


def test_members_may_alternate_between_nodes() -> None:
    levels = nodes(2, 2).levels
    assert least_bytes(levels, "all_reduce", (0, 2, 1, 3)) == least_bytes(levels, "all_reduce", (0, 1, 2, 3))
    assert least_bytes(levels, "all_reduce", (0, 2, 3, 1)) is None


def test_inside_a_node_and_between_single_ranks_nothing_changes() -> None:
    cluster = nodes(2, 2, latency_s=1e-4)
    for kind in KINDS:
        for ranks in ((0, 1), (0, 2)):
            assert gloo_time_s(cluster, kind, 1e6, ranks) == collective_time_s(cluster, kind, 1e6, ranks)


def test_groups_of_gpus_have_the_price_of_nccl() -> None:
    cluster, ranks = nodes(2, 4, "h100"), tuple(range(8))
    for kind in KINDS:
        assert gloo_time_s(cluster, kind, 1e8, ranks) == collective_time_s(cluster, kind, 1e8, ranks)


def test_a_calibration_across_nodes_has_what_the_price_reads() -> None:
    measured = groups_of(2, 2)
    assert [(one.level, one.mesh["all"], one.way) for one in measured] == [
        ("node", 2, ""),
        ("cluster", 2, ""),
        ("cluster", 4, FLAT),
    ]
    assert [list(one.mesh) for one in measured] == [["blocks", "all"], ["all", "places"], ["all"]]
    samples = [
        Sample(way + kind, (nbytes, n), "float32", 1e-3 + nbytes * per_byte)
        for way, n, per_byte in (("", 2, 1e-8), (FLAT, 4, 3e-8))
        for kind in KINDS
        for nbytes in (2**10, 2**18, 2**24)
    ]
    links, _ = fit_links(samples, "cluster", tables=True)
    cluster, ranks = nodes(2, 2).with_profile({"links": links}), (0, 1, 2, 3)
    for kind in KINDS:
        assert flat_s(cluster.levels, kind, 2**24, ranks) == pytest.approx(1e-3 + 2**24 * 3e-8)
        assert by_node_s(cluster.levels, kind, 2**24, ranks) == pytest.approx(1e-3 + 2**23 * 1e-8, rel=0.01)
        assert least_bytes(cluster.levels, kind, ranks) is not None


def test_a_small_message_that_was_measured_slow_by_chance_does_not_decide() -> None:
    inner, outer = nodes(2, 2, latency_s=1e-3).levels
    measured = tuple((f"{FLAT}{kind}", 4, ((1.0, 1.0), (LARGE, 1.0 + LARGE / 5e7))) for kind in KINDS)
    levels = inner, replace(outer, measured=measured)
    for kind in KINDS:
        assert by_node_s(levels, kind, 2**10, (0, 1, 2, 3)) < flat_s(levels, kind, 2**10, (0, 1, 2, 3))
        least = least_bytes(levels, kind, (0, 1, 2, 3))
        assert least is not None
        assert least > 2**15


def test_what_was_measured_of_either_way_decides() -> None:
    cluster, ranks = nodes(2, 2), (0, 1, 2, 3)
    inner, outer = cluster.levels
    slow = replace(outer, measured=(("all_reduce", 2, ((1.0, 1e-9), (2.0, 1.0), (LARGE, 1.0))),))
    assert least_bytes((inner, slow), "all_reduce", ranks) == 2**27, "a ring of 1.5 times that takes a second"
    quick = replace(outer, measured=((f"{FLAT}all_reduce", 4, ((1.0, 1e-9), (2 * LARGE, 2e-9))),))
    assert least_bytes((inner, quick), "all_reduce", ranks) is None
    assert flat_s((inner, quick), "all_reduce", 1.0, ranks) == pytest.approx(1e-9)
