"""Units over ranks of different speed, against every way there is."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.runtime.step.apportion import apportioned


def best_s(total: int, seconds: list[float], most: int) -> float:
    """The least seconds of the slowest rank, of all ways."""
    ways = itertools.product(range(1, min(most, total) + 1), repeat=len(seconds))
    return min(max(n * s for n, s in zip(way, seconds, strict=True)) for way in ways if sum(way) == total)


@pytest.mark.parametrize("seed", range(60))
def test_no_way_ends_sooner(seed):
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    total = rng.randint(ranks, 11)
    most = rng.randint(-(-total // ranks), total)
    seconds = [rng.choice((1.0, 3.0, rng.uniform(0.01, 9.0))) for _ in range(ranks)]
    units = apportioned(total, seconds, most)
    assert sum(units) == total
    assert all(1 <= n <= most for n in units)
    assert max(n * s for n, s in zip(units, seconds, strict=True)) == best_s(total, seconds, most)


def test_equal_ranks_share_equally():
    assert apportioned(12, [0.5] * 4, 12) == (3, 3, 3, 3)


def test_a_rank_of_a_third_of_the_speed_has_a_seventh():
    assert apportioned(21, [1.0, 1.0, 3.0], 21) == (9, 9, 3)


def test_room_for_few_units_leaves_the_rest_to_slower_ranks():
    assert apportioned(12, [1.0, 9.0, 9.0], 6) == (6, 3, 3)


@pytest.mark.parametrize(("total", "most"), [(2, 9), (10, 3)])
def test_what_cannot_be_shared_is_refused(total, most):
    with pytest.raises(ValueError, match=f"{total} units over 3 ranks"):
        apportioned(total, [1.0] * 3, most)
