"""Bounds of placements: never above the cheapest of all partitions, and reached where boxes of a grid fill groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.passes.place import Traffic, mesh_traffic, place
from autopar.passes.place.bounds import Lines, _by_lines, least_cost
from autopar.passes.place.boxes import cheapest_boxes
from autopar.passes.place.cover import few_ways
from autopar.passes.place.exact import place_exactly
from autopar.passes.place.traffic import Shape, Tree, grid_lines
from tests.passes.place.test_place import cluster_of, mixed, random_traffic

seeds = st.integers(0, 10**6)
GRIDS = [(6,), (7,), (8,), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2)]


def grid_traffic(seed: int, sizes: Sequence[int]) -> Traffic:
    """Rings, chains and all pairs along the axes, each line with weights of its own or with the axis's, and a few other pairs."""
    rng = np.random.default_rng(seed)
    ranks = int(np.prod(sizes))
    pairs: list[tuple[int, int, float]] = []
    lines = grid_lines(sizes)
    for line in lines:
        shape, alike, weight = rng.integers(4), rng.random() < 0.6, rng.choice([1.0, 3.0, 20.0])
        for first in np.unique(line):
            members = np.flatnonzero(line == first).tolist()
            one = weight if alike else float(rng.integers(0, 9))
            for k, j in itertools.combinations(range(len(members)), 2):
                near = j - k == 1 or (shape == 1 and j - k == len(members) - 1)
                if near or shape == 2 or (shape == 3 and rng.random() < 0.5):
                    pairs.append((members[k], members[j], one if alike else one + float(rng.integers(0, 3))))
    extra = rng.integers(0, ranks, (int(rng.integers(0, 4)), 2)).tolist()
    return replace(Traffic.of(ranks, [*pairs, *((a, b, 30.0) for a, b in extra)]), lines=lines)


@cache
def partitions(sizes: tuple[int, ...]) -> np.ndarray:
    """(ways, ranks) the group of each rank in every way to fill groups of these sizes."""
    ways = [np.empty(0, int)]
    for group, size in enumerate(sizes):
        before = sum(sizes[:group])
        chosen = list(itertools.combinations(range(before + size), size))
        places = np.zeros((len(chosen), before + size), bool)
        places[np.arange(len(chosen))[:, None], chosen] = True
        wider = np.full((len(chosen), len(ways), before + size), group)
        for k, place_of_new in enumerate(places):
            wider[k][:, ~place_of_new] = ways
        ways = wider.reshape(-1, before + size)
    return np.array(ways)


def cheapest(traffic: Traffic, tree: Tree) -> float:
    """The least cost of all that differs, who is in which innermost group, ranks on devices of their kind."""
    leaf = tree.groups[0]
    ways = partitions(tuple(np.bincount(leaf).tolist()))
    for kind in range(int(tree.kinds.max()) + 1):
        for group in range(int(leaf.max()) + 1):
            wanted = ((leaf == group) & (tree.kinds == kind)).sum()
            ways = ways[(ways[:, tree.kinds == kind] == group).sum(1) == wanted]
    level = np.zeros((len(ways), len(traffic.weight)), int)
    for row in tree.groups:
        group_of = row[[int(np.flatnonzero(leaf == g)[0]) for g in range(int(leaf.max()) + 1)]]
        level += group_of[ways[:, traffic.first]] != group_of[ways[:, traffic.second]]
    return float((tree.distance[level] @ traffic.weight).min())


@settings(max_examples=60)
@given(seeds, st.sampled_from(GRIDS), st.sampled_from([(2,), (3,), (4,), (2, 4), (2, 6)]), st.booleans())
def test_no_bound_is_above_the_cheapest_of_all_partitions(
    seed: int, grid: tuple[int, ...], inner: tuple[int, ...], several: bool
) -> None:
    traffic = grid_traffic(seed, grid)
    cluster = cluster_of(*inner, 8)
    tree = Tree.of(mixed(cluster, seed) if several else cluster, range(traffic.ranks))
    best = cheapest(traffic, tree)
    bound = least_cost(traffic, tree)
    assert bound <= best * (1 + 1e-9)
    assert bound >= least_cost(replace(traffic, lines=()), tree) * (1 - 1e-9), "lines only tell more"
    sizes, total = np.bincount(tree.groups[0]), traffic.weight.sum()
    inside = total - (best - total * tree.distance[0]) / (tree.distance[-1] - tree.distance[0])
    if len(tree.groups) == 2:
        assert _by_lines(Lines.of(traffic), sizes) >= inside * (1 - 1e-9), (
            "also where the bound by rank is the smaller one"
        )


@settings(max_examples=25)
@given(
    seeds, st.sampled_from([cluster_of(2, 7), cluster_of(2, 4, 7), cluster_of(3, 7), cluster_of(4, 7)]), st.booleans()
)
def test_what_is_proven_is_the_cheapest(seed: int, cluster: ClusterSpec, several: bool) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(4, 8))
    pairs = [
        (i, j, float(rng.integers(1, 9))) for i, j in itertools.combinations(range(ranks), 2) if rng.random() < 0.5
    ]
    traffic = Traffic.of(ranks, pairs)
    cluster = mixed(cluster, seed) if several else cluster
    found, tree = place(traffic, cluster), Tree.of(cluster, range(ranks))
    assert found.proven
    assert found.cost == pytest.approx(cheapest(traffic, tree), rel=1e-9)
    assert (tree.kinds[list(found.physical)] == tree.kinds).all()


@settings(max_examples=12)
@given(seeds, st.sampled_from([(2,), (3,), (4,), (2, 4)]), st.booleans())
def test_cp_sat_finds_and_proves_the_cheapest_from_any_start(seed: int, inner: tuple[int, ...], several: bool) -> None:
    traffic, cluster = random_traffic(seed, 8), cluster_of(*inner, 8)
    tree = Tree.of(mixed(cluster, seed) if several else cluster, range(8))
    start = tree.seated(tree.groups[0].tolist())
    found, lower = place_exactly(traffic, tree, start, 20.0)
    best = cheapest(traffic, tree)
    assert few_ways(tree) == (len(inner) == 1 and inner[0] < 4)
    assert (tree.kinds[found] == tree.kinds).all()
    assert tree.cost(traffic, found) == pytest.approx(best, rel=1e-9)
    assert lower == pytest.approx(best, rel=1e-6)
    assert lower <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("axes", "weights", "shapes", "levels"),
    [
        ({"dp": 64}, {"dp": 1.0}, {}, (8, 64)),
        ({"dp": 16, "tp": 4}, {"tp": 3.0, "dp": 2.0}, {}, (8, 64)),
        ({"dp": 8, "ep": 8}, {"dp": 1.0, "ep": 1.0}, {"ep": "all"}, (8, 64)),
        ({"pp": 8, "dp": 128, "tp": 8}, {"tp": 900.0, "dp": 30.0, "pp": 1.0}, {"pp": "chain"}, (8, 64, 8192)),
        ({"dp": 1024, "tp": 8}, {"tp": 9.0, "dp": 1.0}, {}, (8, 256, 8192)),
    ],
)
def test_meshes_whose_inner_axes_fill_groups_are_proven_in_order(
    axes: dict[str, int], weights: dict[str, float], shapes: dict[str, Shape], levels: tuple[int, ...]
) -> None:
    traffic = mesh_traffic(axes, weights, shapes)
    found = place(traffic, cluster_of(*levels))
    assert (found.method, found.proven) == ("identity", True)
    tree = Tree.of(cluster_of(*levels), range(traffic.ranks))
    moved = np.arange(traffic.ranks)
    moved[[0, -1]] = moved[[-1, 0]]
    assert tree.cost(traffic, moved) > found.bound * (1 + 1e-6), "a bound that no placement is above proves nothing"


def test_boxes_over_stages_beat_packing_and_are_proven() -> None:
    """A node takes two by two ranks of two stages; growing a node rank by rank ends elsewhere."""
    axes, weights = {"pp": 2, "dp": 8, "tp": 2}, {"pp": 70.0, "dp": 30.0, "tp": 27.0}
    traffic = mesh_traffic(axes, weights, {"pp": "chain"})
    cluster = cluster_of(8, 32)
    found, without = place(traffic, cluster), place(replace(traffic, lines=()), cluster, exact=False)
    assert found.proven
    assert found.cost < without.cost
    assert without.gap > found.gap
    first = {i for i, device in enumerate(found.physical) if device < 8}
    assert {i // 16 for i in first} == {0, 1}, "both stages"
    assert {i % 2 for i in first} == {0, 1}


def test_boxes_want_a_grid_and_groups_alike() -> None:
    traffic = mesh_traffic({"dp": 4, "tp": 2}, {"dp": 1.0, "tp": 2.0})
    tree = Tree.of(cluster_of(4, 8), range(8))
    assert cheapest_boxes(traffic, tree) is not None
    assert cheapest_boxes(replace(traffic, lines=()), tree) is None
    assert cheapest_boxes(replace(traffic, lines=(np.arange(8), traffic.lines[1])), tree) is None
    assert cheapest_boxes(traffic, Tree.of(cluster_of(4, 8, starts=(0, 3)), range(8))) is None
