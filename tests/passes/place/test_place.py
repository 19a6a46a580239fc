"""Placement: optimal against all permutations, near the optimum by packing, never worse than leaving ranks in order."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.cluster.device import device_preset
from autopar.cluster.link import LinkLevel
from autopar.errors import InputError
from autopar.passes.place import Placement, Traffic, mesh_traffic, packing, place, placement_cost
from autopar.passes.place.traffic import Tree

seeds = st.integers(0, 10**6)
TEXT = (1.0, 10.0, 100.0)


def cluster_of(*sizes: int, starts: tuple[int, ...] = ()) -> ClusterSpec:
    """Levels of the given group sizes; with `starts` the innermost groups begin there."""
    rates = [400e9, 50e9, 10e9]
    levels = tuple(LinkLevel(f"l{i}", n, rates[i], starts=starts if i == 0 else ()) for i, n in enumerate(sizes))
    return ClusterSpec("test", ((sizes[-1], device_preset("cpu")),), levels)


def mixed(cluster: ClusterSpec, seed: int) -> ClusterSpec:
    """The cluster with two kinds of devices, listed in turns."""
    kinds = device_preset("cpu"), replace(device_preset("cpu"), name="other")
    runs = np.random.default_rng(seed).integers(1, 4, cluster.size)
    counts = np.minimum(np.cumsum(runs), cluster.size)
    sizes = [int(n) for n in np.diff(counts, prepend=0) if n]
    return replace(cluster, devices=tuple((n, kinds[k % 2]) for k, n in enumerate(sizes)))


def random_traffic(seed: int, P: int) -> Traffic:
    rng = np.random.default_rng(seed)
    pairs = [(i, j, float(rng.integers(1, 9))) for i, j in itertools.combinations(range(P), 2) if rng.random() < 0.5]
    return Traffic.of(P, pairs)


def scrambled(traffic: Traffic, seed: int) -> tuple[Traffic, np.ndarray]:
    """The same traffic with logical ranks renamed; old rank i is new rank names[i]."""
    names = np.random.default_rng(seed).permutation(traffic.ranks)
    return traffic.contract(names, traffic.ranks), names


def test_cost_is_the_sum_of_weights_times_the_distances_of_the_text() -> None:
    cluster = cluster_of(2, 4, 8)
    traffic = Traffic.of(8, [(0, 1, 3.0), (0, 2, 5.0), (0, 7, 7.0), (1, 0, 1.0)])
    assert placement_cost(traffic, cluster, range(8), TEXT) == 4 * 1 + 5 * 10 + 7 * 100


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "sizes", [(4, 8), (2, 4, 8), (4, 12), (6, 12), pytest.param((2, 6, 12), marks=pytest.mark.slow)]
)
def test_packing_stays_within_two_percent_of_the_optimum(sizes: tuple[int, ...]) -> None:
    cluster = cluster_of(*sizes)
    for seed in range(6):
        traffic = random_traffic(seed, sizes[-1])
        exact = place(traffic, cluster, exact=True, time_limit_s=30)
        packed = place(traffic, cluster, exact=False)
        assert exact.proven
        assert exact.bound * (1 - 1e-9) <= exact.cost <= packed.cost * (1 + 1e-12) <= 1.02 * exact.cost


@given(seeds, st.integers(2, 40))
def test_never_worse_than_leaving_ranks_in_order(seed: int, P: int) -> None:
    cluster = cluster_of(4, 16, 40)
    found = place(random_traffic(seed, P), cluster, exact=False)
    assert sorted(found.physical) == list(range(P))
    assert found.bound <= found.cost <= found.identity_cost


@settings(max_examples=4)
@given(seeds, st.sampled_from([cluster_of(4, 16, 40), cluster_of(3, 40)]))
def test_swaps_that_are_not_summed_up_one_by_one_would_not_be_taken(seed: int, cluster: ClusterSpec) -> None:
    rng = np.random.default_rng(seed)
    traffic, tree, start = random_traffic(seed, 40), Tree.of(cluster, range(40)), rng.permutation(40)
    pruned = packing.swap_sparse(traffic, tree, start)
    with mock.patch.object(packing, "_gains", lambda *args: np.arange(len(args[-1]))):
        assert packing.swap_sparse(traffic, tree, start).tolist() == pruned.tolist()
    assert tree.cost(traffic, pruned) < tree.cost(traffic, start)


def groups_of(mesh: tuple[int, ...], axis: int) -> np.ndarray:
    return np.moveaxis(np.arange(math.prod(mesh)).reshape(mesh), axis, -1).reshape(-1, mesh[axis])


@pytest.mark.parametrize(
    ("mesh", "cluster"),
    [
        ((2, 2, 4), cluster_of(4, 16)),
        ((2, 2, 2), cluster_of(2, 4, 8)),
        ((4, 2, 8), cluster_of(8, 64)),
        ((4, 4, 8), cluster_of(8, 32, 128)),
        ((16, 8, 8), cluster_of(8, 64, 1024)),
    ],
)
def test_scrambled_meshes_are_found_again(mesh: tuple[int, ...], cluster: ClusterSpec) -> None:
    axes = dict(zip(("dp", "pp", "tp"), mesh, strict=True))
    ordered = mesh_traffic(axes, {"tp": 1000.0, "pp": 30.0, "dp": 1.0}, {"pp": "chain"})
    traffic, names = scrambled(ordered, 3)
    found = place(traffic, cluster)
    physical = np.array(found.physical)[names]
    inside, rack = cluster.levels[0].group_size, cluster.levels[1].group_size
    for group in groups_of(mesh, 2):
        assert len({physical[i] // inside for i in group}) == 1, "a tp group lies in one node"
    if len(cluster.levels) == 3:
        for group in groups_of(mesh, 1):
            blocks = math.ceil(mesh[1] * mesh[2] / rack)
            assert len({physical[i] // rack for i in group}) <= blocks, "neighbouring stages lie in one rack"
    assert found.cost <= placement_cost(ordered, cluster, range(ordered.ranks)) * (1 + 1e-9)
    if traffic.ranks <= 16:
        exact = place(traffic, cluster, exact=True, time_limit_s=20)
        packed = place(traffic, cluster, exact=False)
        assert packed.cost == pytest.approx(exact.cost, rel=1e-9)
        assert exact.proven


def test_chosen_ranks_are_used_and_no_others() -> None:
    traffic = mesh_traffic({"dp": 2, "tp": 2}, {"tp": 10.0, "dp": 1.0})
    found = place(traffic, cluster_of(4, 8), ranks=(1, 4, 2, 6))
    assert sorted(found.physical) == [1, 2, 4, 6]
    assert {frozenset(found.physical[:2]), frozenset(found.physical[2:])} == {frozenset({1, 2}), frozenset({4, 6})}
    assert isinstance(found, Placement)


def test_all_to_all_axes_pull_all_pairs_together() -> None:
    traffic = mesh_traffic({"ep": 4}, {"ep": 2.0}, {"ep": "all"})
    assert len(traffic.weight) == 6
    assert traffic.weight.sum() == 12


def test_wrong_input_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="need as many different ranks"):
        place(random_traffic(0, 9), cluster_of(4, 8))
    with pytest.raises(InputError, match="names rank 5"):
        Traffic.of(4, [(0, 5, 1.0)])
    with pytest.raises(InputError, match="one per level"):
        place(random_traffic(0, 8), cluster_of(4, 8), distance=(1.0,))


@pytest.mark.slow
def test_sixteen_thousand_ranks_are_placed_as_well_as_in_order() -> None:
    ordered = mesh_traffic({"dp": 128, "pp": 16, "tp": 8}, {"tp": 1000.0, "pp": 30.0, "dp": 1.0}, {"pp": "chain"})
    traffic, _ = scrambled(ordered, 0)
    cluster = cluster_of(8, 512, 16384)
    found = place(traffic, cluster)
    assert found.cost <= 1.02 * placement_cost(ordered, cluster, range(16384))
