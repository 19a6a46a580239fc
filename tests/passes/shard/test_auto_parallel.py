"""AutoParallel's solvers, restated in the benchmark, and this one agree on small lists; brute force is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autopar.passes.shard.factors.graph import FactorGraph
from autopar.passes.shard.solve import Solution, solve
from benchmarks.auto_parallel_lists import FORBIDDEN_US, list_step, moved_us
from benchmarks.auto_parallel_solvers import by_messages, by_program
from benchmarks.auto_parallel_step import EINSUM, traced_step
from benchmarks.dtensor_strategies import OWED, REPLICATED, axis_rows
from benchmarks.models import Llama, LlamaShape
from tests.passes.shard.test_solver import brute_force, random_graph


def optimum(graph: FactorGraph) -> float:
    solution = solve(graph)
    assert isinstance(solution, Solution)
    return solution.cost


@pytest.mark.parametrize("seed", range(4))
def test_all_solvers_find_the_brute_force_optimum(seed: int) -> None:
    graph = random_graph(seed, density=0.3)
    best = brute_force(graph, None)
    program, _ = by_program(graph, True, 10.0, FORBIDDEN_US)
    relaxed, _ = by_program(graph, False, 10.0, FORBIDDEN_US)
    assert program is not None
    assert relaxed is not None
    assert relaxed.bound is not None
    assert program.cost == pytest.approx(best, abs=1e-6)
    assert relaxed.bound <= program.cost + 1e-6
    assert by_messages(graph).cost == pytest.approx(best, abs=1e-6)
    assert optimum(graph) == pytest.approx(best, abs=1e-6)


@pytest.fixture(scope="module")
def lists() -> dict[bool, FactorGraph]:
    """The lists of two layers on 2 × 2 ranks, with layers clustered and apart."""
    with torch.device("meta"):
        model = Llama(LlamaShape(2, 64, 128, 4, 4, 256), 16).to(torch.bfloat16)
        ids = torch.zeros(4, 16, dtype=torch.long)
    step = traced_step(model, ids)
    return {clustered: list_step(step, (2, 2), clustered) for clustered in (True, False)}


@pytest.mark.slow
def test_both_searches_agree_on_the_lists_of_a_llama(lists: dict[bool, FactorGraph]) -> None:
    """Small tensors: every launch takes as long, so that the lists are full of ties."""
    best = optimum(lists[False])
    assert best < FORBIDDEN_US
    found = by_messages(lists[False], seen=lambda cost: cost <= best * 1.005)
    assert best - 1e-6 <= found.cost <= best * 1.005
    assert optimum(lists[True]) >= best - 1e-6  # layers that are to be alike are no faster
    assert len(lists[True].keys) < len(lists[False].keys) * 0.7


def test_rows_of_dtensor() -> None:
    x, w, y = torch.empty(4, 8, 16, device="meta"), torch.empty(32, 16, device="meta"), torch.empty(4, 8, 16)
    rows = set(axis_rows(EINSUM, ("bsi,oi->bso", x, w), {}, 1))  # result, then operands
    assert rows == {(REPLICATED,) * 3, (0, 0, REPLICATED), (1, 1, REPLICATED), (2, REPLICATED, 0), (OWED, 2, 1)}
    added = axis_rows(torch.ops.aten.add.Tensor, (x, y.to("meta")), {}, 1)
    assert set(added) == {(p,) * 3 for p in (REPLICATED, 0, 1, 2, OWED)}
    heads = set(axis_rows(torch.ops.aten.view.default, (x, [4, 8, 4, 4]), {}, 1))
    assert heads == {(p, p) for p in (REPLICATED, 0, 1, 2, OWED)}
    with pytest.raises(NotImplementedError, match="no strategy"):
        axis_rows(torch.ops.aten.searchsorted.Tensor, (y.to("meta"), x), {}, 1)


def test_messages_cost_what_their_bytes_say() -> None:
    """A tensor of 1 GiB on an axis of 4 inside a node: gathering whole takes 3/4 GiB over the link and a pass over
    both ends."""
    placements = np.array([[REPLICATED], [0], [1], [OWED]])
    took = moved_us(placements, placements, 2.0**30, (4,))
    link_us, pass_us = 1e6 * 0.75 / 87.7, 1e6 * 2 * 2**30 / (3.35 * 2**40) / 0.7
    assert np.diagonal(took) == pytest.approx(np.zeros(4))
    assert took[0, 1] == took[0, 2] == 1.0
    assert took[1, 0] == pytest.approx(link_us + 6.6 + 3 * 0.6 + 1)
    assert took[2, 0] == pytest.approx(took[1, 0] + pass_us)
    assert took[3, 0] == pytest.approx(2 * link_us + 6.6 + 6 * 0.6 + 1)
    assert took[3, 1] == pytest.approx(took[1, 0])
    assert (took[:3, 3] == FORBIDDEN_US).all()
