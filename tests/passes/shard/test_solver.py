"""The solver against brute force: same optimum, with and without a memory row, on every path it can take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.passes.shard import eliminate, ilp, messages, padded, polish
from autopar.passes.shard import solve as solving
from autopar.passes.shard.eliminate import eliminated, elimination_order, order_beside
from autopar.passes.shard.factors.graph import FactorGraph
from autopar.passes.shard.messages import Passing, bound
from autopar.passes.shard.padded import padded_states
from autopar.passes.shard.polish import polished
from autopar.passes.shard.reduce import copy_of, reduce_graph, restore, start
from autopar.passes.shard.solve import (
    Shortage,
    Solution,
    _along_chains,
    _exact,
    _prune,
    better_within,
    greedy,
    priced,
    solve,
)

NEVER = 1e9
"""A deadline that does not come."""


def random_graph(
    seed: int, nodes: int = 6, states: int = 3, density: float = 0.5, ties: bool = False, close: bool = False
) -> FactorGraph:
    """close: bytes of states that differ by little."""
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(0, 4, shape).astype(float) if ties else rng.random(shape)

    graph = FactorGraph()
    for v in range(nodes):
        n = int(rng.integers(1, states + 1))
        graph.add(
            ("v", str(v)),
            list(range(n)),
            numbers(n),
            1 + (rng.random(n) / 5 if close else rng.integers(0, 5, n).astype(float)),
        )
    for u, v in itertools.combinations(range(nodes), 2):
        if rng.random() < density:
            graph.connect(u, v, numbers(len(graph.states[u]), len(graph.states[v])))
    return graph


@contextmanager
def by_messages() -> Iterator[None]:
    """No graph is solved by elimination alone."""
    with (
        mock.patch.object(eliminate, "MOST", 0),
        mock.patch.object(solving, "NARROW", 0),
        mock.patch.object(solving, "_PER_VARIABLE", 0),
    ):
        yield


def ladder(seed: int, steps: int, states: int, ties: bool) -> FactorGraph:
    """Two variables a step, each beside the other and those of the next step."""
    rng = np.random.default_rng(seed)
    graph = FactorGraph()

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(0, 4, shape).astype(float) if ties else rng.random(shape)

    for v in range(2 * steps):
        graph.add(("v", str(v)), tuple(range(states)), numbers(states), np.zeros(states))
        for u in range(2 * (v // 2) - 2, v):
            if u >= 0:
                graph.connect(u, v, numbers(states, states) / 4)
    return graph


def brute_force(graph: FactorGraph, budget: float | None) -> float | None:
    best = None
    for choice in itertools.product(*(range(len(s)) for s in graph.states)):
        if budget is None or graph.memory_of(list(choice)) <= budget:
            value = graph.value(list(choice))
            best = value if best is None else min(best, value)
    return best


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([0.2, 0.5, 0.9]))
def test_solver_finds_the_brute_force_optimum(seed: int, ties: bool, density: float) -> None:
    graph = random_graph(seed, density=density, ties=ties)
    solution = solve(graph)
    assert isinstance(solution, Solution)
    assert solution.cost == pytest.approx(brute_force(graph, None), abs=1e-9)
    assert solution.gap <= 1e-6


@given(st.integers(0, 10_000), st.booleans())
def test_message_passing_path_finds_the_same_optimum(seed: int, ties: bool) -> None:
    graph = random_graph(seed, ties=ties)
    with by_messages():
        solution = solve(graph)
    assert isinstance(solution, Solution)
    assert solution.cost == pytest.approx(brute_force(graph, None), rel=2e-6, abs=1e-9)


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([0.2, 0.5, 0.9]))
def test_elimination_finds_the_brute_force_optimum_and_says_what_it_costs(
    seed: int, ties: bool, density: float
) -> None:
    graph = random_graph(seed, density=density, ties=ties)
    whole = start(graph)
    order = elimination_order({v: len(c) for v, c in whole.cost.items()}, whole.near)
    assert order is not None
    chosen, value = eliminated(whole, order)
    assert graph.value([chosen[v] for v in range(len(graph.keys))]) == pytest.approx(value, abs=1e-9)
    assert value == pytest.approx(brute_force(graph, None), abs=1e-9)


def test_elimination_is_left_where_its_tables_would_be_large() -> None:
    everyone = {v: [u for u in range(12) if u != v] for v in range(12)}
    chain = {v: [u for u in (v - 1, v + 1) if 0 <= u < 12] for v in range(12)}
    assert elimination_order(dict.fromkeys(everyone, 5), everyone) is None
    assert sorted(elimination_order(dict.fromkeys(chain, 5), chain) or []) == list(range(12))


@given(st.integers(0, 10_000), st.booleans())
def test_long_and_narrow_graphs_have_the_brute_force_optimum_without_messages(seed: int, ties: bool) -> None:
    graph = ladder(seed, 3, 3, ties)
    found = _along_chains(start(graph))
    assert found is not None
    choice, value, _ = found
    assert graph.value(choice) == pytest.approx(value, abs=1e-9)
    assert value == pytest.approx(brute_force(graph, None), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_long_and_narrow_graphs_cost_what_they_do_by_messages(seed: int) -> None:
    graph = ladder(seed, 12, 9, ties=False)
    alone = solve(graph)
    with mock.patch.object(solving, "NARROW", 0):
        passed = solve(graph)
    assert isinstance(alone, Solution)
    assert isinstance(passed, Solution)
    assert alone.cost == pytest.approx(passed.cost, rel=1e-6)
    assert alone.gap == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_what_messages_leave_open_is_eliminated_where_the_mip_would_take_longer(seed: int) -> None:
    """The tables of a graph of few variables with many states have fewer numbers than branches of the MIP would read, if there is
    memory for each."""
    graph = random_graph(seed, nodes=8, states=16, density=0.5)
    left = reduce_graph(start(graph))
    with mock.patch.object(solving, "solve_ilp", side_effect=AssertionError("no LP")):
        choice, value, _ = _exact(copy_of(left), NEVER)
    with mock.patch.object(eliminate, "WIDEST", 4):
        by_mip, bound_s, size = _exact(copy_of(left), NEVER)
    assert size["variables"] > 1
    assert choice is not None
    assert by_mip is not None
    assert graph.value(choice) == pytest.approx(value, abs=1e-9)
    assert bound_s <= value * (1 + 1e-9) <= graph.value(by_mip) * (1 + 2e-9)


@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_large_models_are_left_within_a_thousandth_and_their_bounds_hold(seed: int, times_lp: float) -> None:
    """A MIP that ends early leaves a whole assignment, and a bound below the optimum."""
    graph = random_graph(seed, density=0.9)
    with mock.patch.object(ilp, "_MANY", 0), mock.patch.object(ilp, "_TIMES_LP", times_lp):
        answer = ilp.solve_ilp(start(graph), None, 60.0)
    assert answer.chosen is not None
    value, optimum = graph.value([answer.chosen[v] for v in range(len(graph.keys))]), brute_force(graph, None)
    assert answer.bound * (1 - 1e-9) <= optimum <= value * (1 + 1e-9)


def test_wide_graphs_are_left_to_messages() -> None:
    star = FactorGraph()
    for v in range(20):
        star.add(("v", str(v)), (0, 1), np.zeros(2), np.zeros(2))
        if v:
            star.connect(0, v, np.eye(2))
    assert _along_chains(start(star)) is None


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([3.0, 6.0, 18.0]))
def test_polishing_makes_no_assignment_worse_and_says_what_it_costs(seed: int, ties: bool, widest: float) -> None:
    graph = random_graph(seed, density=0.9, ties=ties)
    whole = start(graph)
    first = dict.fromkeys(whole.cost, 0)
    with mock.patch.object(polish, "WIDEST", widest):
        chosen, cost = polished(whole, first, -float("inf"))
    assert cost <= graph.value([0] * len(graph.keys)) + 1e-12
    assert graph.value([chosen[v] for v in range(len(graph.keys))]) == pytest.approx(cost, abs=1e-9)
    if widest == 18.0:
        assert cost == pytest.approx(brute_force(graph, None), abs=1e-9)


@given(st.integers(0, 10_000), st.sampled_from([3.0, 5.0]))
def test_variables_are_kept_where_tables_would_be_larger(seed: int, widest: float) -> None:
    graph = random_graph(seed, density=0.9)
    whole = start(graph)
    sizes = {v: len(cost) for v, cost in whole.cost.items()}
    order, kept = order_beside(sizes, whole.near, {v: v for v in sizes}, widest, float("inf"))
    assert sorted([*order, *kept]) == [v for v in sizes if sizes[v] > 1]
    left = {v: {u for u in whole.near[v] if u not in kept and sizes[u] > 1} for v in order}
    for v in order:
        around = left.pop(v)
        assert sizes[v] * np.prod([sizes[u] for u in around]) <= 2**widest * (1 + 1e-9)
        for u in around:
            left[u] = (left[u] | around) - {u, v}


@given(st.integers(0, 10_000), st.floats(0.0, 1.0), st.booleans())
def test_memory_row_is_kept_and_the_optimum_under_it_is_found(seed: int, share: float, close: bool) -> None:
    graph = random_graph(seed, close=close)
    least = sum(float(m.min()) for m in graph.memory)
    most = sum(float(m.max()) for m in graph.memory)
    budget = least + share * (most - least)
    solution = solve(graph, budget)
    assert isinstance(solution, Solution)
    assert solution.memory <= budget * (1 + 1e-9)
    expected = brute_force(graph, budget)
    assert expected is not None
    assert solution.cost == pytest.approx(expected, rel=1.1e-3)
    assert solution.bound <= expected + 1e-9


@given(st.integers(0, 10_000))
def test_too_little_memory_is_a_shortage_that_says_the_least(seed: int) -> None:
    graph = random_graph(seed)
    least = sum(float(m.min()) for m in graph.memory)
    result = solve(graph, least - 0.5)
    assert isinstance(result, Shortage)
    assert result.least_bytes == least


@given(st.integers(0, 10_000), st.booleans())
def test_reduction_keeps_the_optimum(seed: int, ties: bool) -> None:
    graph = random_graph(seed, nodes=5, ties=ties)
    reduced = reduce_graph(start(graph))
    assert sum(map(len, reduced.cost.values())) <= sum(map(len, graph.cost))
    best = min(
        graph.value(restore(reduced, dict(zip(reduced.cost, chosen, strict=True))))
        for chosen in itertools.product(*(range(len(c)) for c in reduced.cost.values()))
    )
    assert best == pytest.approx(brute_force(graph, None), abs=1e-9)


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_reduction_keeps_the_optimum_within_every_amount_of_memory(seed: int, close: bool) -> None:
    graph = random_graph(seed, nodes=4, close=close)
    reduced = reduce_graph(start(graph), with_memory=True)

    def best(choices: Iterable[list[int]]) -> list[tuple[float, float]]:
        """(bytes, least cost within them), where more bytes cost less."""
        found: list[tuple[float, float]] = []
        for memory, value in sorted((graph.memory_of(choice), graph.value(choice)) for choice in choices):
            if not found or value < found[-1][1] - 1e-9:
                found.append((memory, value))
        return found

    left = [
        restore(reduced, dict(zip(reduced.cost, chosen, strict=True)))
        for chosen in itertools.product(*(range(len(c)) for c in reduced.cost.values()))
    ]
    every = list(map(list, itertools.product(*(range(len(s)) for s in graph.states))))
    np.testing.assert_allclose(best(left), best(every), atol=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_pruning_by_what_a_bound_leaves_keeps_the_optimum(seed: int) -> None:
    """The bound of one round is far from the optimum, so that some state of the optimum takes up nearly all of the slack."""
    graph = random_graph(seed, nodes=5, density=0.9)
    optimum = brute_force(graph, None)
    assert optimum is not None
    r = start(graph)
    with mock.patch.object(eliminate, "MOST", 0):
        found = bound(r, 1, math.inf)
    pruned = copy_of(r)
    _prune(pruned, found, optimum - found.lower)
    left = [pruned.alive[v] for v in range(len(graph.keys))]
    assert min(graph.value(list(c)) for c in itertools.product(*left)) == pytest.approx(optimum, abs=1e-9)


@given(st.integers(0, 10_000))
def test_message_bounds_enclose_the_optimum_and_never_prune_it(seed: int) -> None:
    graph = random_graph(seed, nodes=6, density=0.8)
    reduced = start(graph)
    with mock.patch.object(eliminate, "MOST", 0):
        found = bound(reduced, 50, float("inf"))
    optimum = brute_force(graph, None)
    assert optimum is not None
    assert found.lower <= optimum + 1e-9 <= found.upper + 2e-9
    left = [reduced.alive[v] for v in range(len(graph.keys))]
    assert min(graph.value(list(c)) for c in itertools.product(*left)) == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_of_every_sweep_is_below_the_optimum_and_never_falls(seed: int) -> None:
    graph = random_graph(seed, nodes=5, states=4, density=0.8, ties=seed % 2 == 0)
    optimum = brute_force(graph, None)
    assert optimum is not None
    passing, bounds = Passing(start(graph)), []
    for _ in range(20):
        passing.round()
        bounds.append(passing.swept)
    assert bounds == pytest.approx(np.maximum.accumulate(bounds), abs=1e-9)
    assert bounds[-1] <= optimum + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_a_round_gives_a_bound_whatever_messages_it_meets(seed: int) -> None:
    graph = random_graph(seed, nodes=5, states=4, density=0.8)
    optimum = brute_force(graph, None)
    assert optimum is not None
    passing = Passing(start(graph))
    met = np.random.default_rng(seed).normal(0.0, 5.0, passing.messages.shape)
    met[-1] = 0.0  # the silent one
    passing.messages = np.take_along_axis(met, padded_states(passing.sizes)[passing.edges.target], 1)
    passing.round()
    assert passing.swept <= optimum + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_large_tables_of_pair_costs_are_those_that_small_ones_are(seed: int) -> None:
    passing = Passing(start(random_graph(seed, nodes=6, states=9, density=0.7)))
    states = padded_states(passing.sizes)
    edges = np.arange(passing.edges.silent)
    ends = states[passing.edges.source[edges]], states[passing.edges.target[edges]]
    at_once = passing.edges.matrices(edges, *ends)
    with mock.patch.object(padded, "_LARGE", 0):
        assert (passing.edges.matrices(edges, *ends) == at_once).all()


def test_momentum_reaches_higher_bounds_in_as_many_rounds() -> None:
    def reached(slow: float) -> float:
        total = 0.0
        for seed in range(5):
            passing = Passing(start(random_graph(seed, nodes=30, states=6, density=0.2)))
            with mock.patch.object(messages, "_SLOW", slow):
                for _ in range(20):
                    passing.round()
            total += passing.swept
        return total

    assert reached(3) > reached(math.inf) * (1 + 1e-4)


def test_what_a_state_adds_is_told_from_the_bound_that_is_given() -> None:
    """Messages of later rounds may mean a lower bound than those of an earlier one; what states add then is less too."""
    for seed in range(20):
        graph = random_graph(seed, nodes=5, states=4, density=0.9)
        optimum = brute_force(graph, None)
        assert optimum is not None
        r = start(graph)
        with mock.patch.object(eliminate, "MOST", 0):
            found = bound(r, 10, math.inf)
        _prune(r, found, optimum - found.lower)
        left = [r.alive[v] for v in range(len(graph.keys))]
        assert min(graph.value(list(c)) for c in itertools.product(*left)) == pytest.approx(optimum, abs=1e-9)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_an_assignment_that_is_known_is_improved_on_and_never_stands_in_the_way(seed: int, known_seed: int) -> None:
    graph = random_graph(seed, density=0.8)
    rng = np.random.default_rng(known_seed)
    known = [int(rng.integers(len(states))) for states in graph.states]
    with by_messages():
        choice, lower, _ = priced(graph, 0.0, NEVER, known=known)
        rough, rough_lower, _ = priced(graph, 0.0, NEVER, close=0.05, known=known)
    optimum = brute_force(graph, None)
    assert optimum is not None
    assert choice is not None
    assert rough is not None
    assert graph.value(choice) == pytest.approx(optimum, rel=1e-4)
    assert max(lower, rough_lower) <= optimum + 1e-9
    assert graph.value(rough) <= min(1.05 * optimum, graph.value(known)) + 1e-9


@given(st.integers(0, 10_000), st.sampled_from([0.2, 0.5, 0.8]), st.sampled_from([0.0, 0.1, 1.0]))
def test_a_bound_at_any_price_leaves_what_is_better_within_the_budget(seed: int, part: float, price: float) -> None:
    graph = random_graph(seed, density=0.8)
    budget = part * sum(float(m.min()) for m in graph.memory) + (1 - part) * sum(float(m.max()) for m in graph.memory)
    every = [list(c) for c in itertools.product(*(range(len(s)) for s in graph.states))]
    fitting = sorted(graph.value(c) for c in every if graph.memory_of(c) <= budget)
    cost = fitting[len(fitting) // 2]
    with mock.patch.object(eliminate, "MOST", 0):
        left = better_within(graph, budget, price, cost, math.inf)
    assert sum(map(len, left.cost.values())) <= sum(map(len, graph.cost))
    best = min(
        graph.value(restored)
        for chosen in itertools.product(*(range(len(c)) for c in left.cost.values()))
        if graph.memory_of(restored := restore(left, dict(zip(left.cost, chosen, strict=True)))) <= budget
    )
    assert best == pytest.approx(fitting[0], abs=1e-9)


@given(st.integers(0, 10_000))
def test_greedy_fallback_is_a_full_assignment(seed: int) -> None:
    graph = random_graph(seed)
    choice = greedy(graph)
    assert len(choice) == len(graph.keys)
    assert graph.value(choice) >= solve(graph).cost - 1e-9  # type: ignore[union-attr]
