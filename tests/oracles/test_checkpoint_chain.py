"""Checkpoints along a chain of blocks: the recurrences against brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from tests.oracles.checkpoint_chain import Block, Keep, checkpoints, run_chain, segments


@pytest.mark.parametrize("seed", range(20))
def test_segments_are_those_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 8)
    table = {(j, i): (rng.random(), rng.random()) for i in range(1, n + 1) for j in range(i)}
    least = math.inf
    for inner in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)):
        ends = [0, *inner, n]
        least = min(least, sum(sum(table[j, i]) for j, i in itertools.pairwise(ends)))
    cost, ends = segments(n, lambda j, i: table[j, i][0], lambda j, i: table[j, i][1])
    assert cost == pytest.approx(least)
    assert sum(sum(table[j, i]) for j, i in itertools.pairwise([0, *ends])) == pytest.approx(cost)


def test_equal_layers_are_cut_every_square_root_of_their_number() -> None:
    """One checkpoint per segment, and the largest segment's tape: least at segments of sqrt(L) layers."""
    layers = 36
    best = min(
        range(1, layers + 1),
        key=lambda k: len(segments(layers, lambda j, i, k=k: 1.0 if i - j <= k else math.inf, lambda j, i: 0.0)[1]) + k,
    )
    assert best == math.isqrt(layers)


def every_keep(first: int, last: int) -> Iterator[Keep | None]:
    if first > last:
        yield None
        return
    for rest in every_keep(first + 1, last):
        yield Keep(first, None, rest)
    for at in range(first + 1, last + 1):
        for rest in every_keep(at, last):
            for again in every_keep(first, at - 1):
                yield Keep(first, at, rest, again)


@pytest.mark.parametrize("seed", range(12))
def test_checkpoints_of_a_chain_are_those_of_playing_every_schedule(seed: int) -> None:
    rng = random.Random(seed)
    blocks = tuple(
        Block(rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 4), rng.randint(4, 9))
        for _ in range(rng.randint(1, 5))
    )
    played = [run_chain(blocks, keep) for keep in every_keep(0, len(blocks) - 1) if keep is not None]
    for budget in range(0, 46, 3):
        fitting = [seconds for seconds, nbytes in played if nbytes <= budget]
        found = checkpoints(blocks, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found[0] == min(fitting)
            assert run_chain(blocks, found[1]) == (found[0], pytest.approx(run_chain(blocks, found[1])[1]))
            assert run_chain(blocks, found[1])[1] <= budget
