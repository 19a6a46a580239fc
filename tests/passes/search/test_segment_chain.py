"""The best chain of stages over segments, from which the branch solver starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.passes.branch import evaluate, solve_branches
from autopar.passes.search.stages.segment_chain import best_chain
from tests.passes.branch.test_branch import chains, sensors


@pytest.mark.parametrize("bandwidth_Bps", [1e8, 1e10])
def test_it_is_the_best_of_all_chains_where_segments_follow_each_other(bandwidth_Bps: float) -> None:
    problem = replace(sensors(bandwidth_Bps), devices=4, edges=tuple((u, u + 1, 8e6) for u in range(5)))
    problem = replace(problem, segments=tuple(options[:4] for options in problem.segments))
    chain = best_chain(problem)
    assert chain is not None
    best = min(evaluate(problem, groups).total_s for groups in chains(problem))
    assert chain.total_s == pytest.approx(best, rel=1e-9)


def test_without_time_the_solver_gives_nothing_worse_than_the_chain_it_is_handed() -> None:
    problem = replace(sensors(1e10), edges=tuple((u, u + 1, 8e6) for u in range(5)))
    chain = best_chain(problem)
    assert chain is not None
    assert solve_branches(problem, known=[chain], time_limit_s=1e-4).total_s <= chain.total_s


def test_no_chain_where_no_device_count_has_an_option() -> None:
    problem = replace(sensors(1e10), segments=tuple(options[1:] for options in sensors(1e10).segments), devices=1)
    assert best_chain(problem) is None
