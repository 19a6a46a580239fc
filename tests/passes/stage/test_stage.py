"""Stage partition against brute force over all cuts and options: totals, memory, kinds of devices, what the user fixed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, InputError, PlanError
from autopar.ir.schedules import interleaved
from autopar.passes.stage import (
    StageOption,
    StageProblem,
    StageShortage,
    StageSolution,
    additive_partition,
    evaluate,
    min_max_partition,
    solve_stages,
)
from autopar.passes.stage.bottleneck import distinct
from autopar.passes.stage.mixed import DeviceSpan
from autopar.passes.stage.uniform import runs_between

from .brute_force import check_against_brute_force, cuts_of, random_problem, with_weights_apart

seeds = st.integers(0, 10**6)


@given(seeds, st.integers(1, 7), st.booleans(), st.booleans())
def test_chain_recurrences_find_the_brute_force_optimum(seed: int, L: int, per_device: bool, boundary: bool) -> None:
    rng = np.random.default_rng(seed)
    p = int(rng.integers(1, L + 1))
    costs = rng.random((p, L) if per_device else L)
    enter = rng.random(L) if boundary else None
    for solver, join in ((min_max_partition, max), (additive_partition, sum)):
        starts, value = solver(costs, p, boundary=enter)

        def value_of(runs: list, join=join) -> float:
            rows = costs if per_device else np.tile(costs, (p, 1))
            return join(
                float(rows[j, a:b].sum()) + (float(enter[a]) if enter is not None and a else 0.0)
                for j, (a, b) in enumerate(runs)
            )

        marks = (0, *starts, L)
        assert value == pytest.approx(min(map(value_of, cuts_of(L, p))), rel=1e-12)
        assert value == pytest.approx(value_of(list(itertools.pairwise(marks))), rel=1e-12)


def test_chain_partition_refuses_more_runs_than_units() -> None:
    with pytest.raises(InputError, match="3 units cannot be cut into 4"):
        min_max_partition([1, 2, 3], 4)


@given(seeds, st.integers(1, 5))
def test_mixed_stages_equal_brute_force(seed: int, L: int) -> None:
    check_against_brute_force(random_problem(seed, L), mixed=True)


@given(seeds, st.integers(1, 5))
def test_kinds_of_devices_are_taken_in_order(seed: int, L: int) -> None:
    check_against_brute_force(random_problem(seed, L, kinds=2), mixed=True)


@given(seeds, st.integers(1, 5), st.integers(1, 2))
def test_stages_with_weights_apart_equal_brute_force(seed: int, L: int, kinds: int) -> None:
    check_against_brute_force(with_weights_apart(random_problem(seed, L, kinds=kinds), seed), mixed=True)


@given(seeds, st.integers(2, 6), st.integers(1, 3))
def test_as_many_stages_as_asked_for_with_weights_apart_equal_brute_force(seed: int, L: int, stages: int) -> None:
    problem = with_weights_apart(random_problem(seed, L, stages=stages), seed)
    check_against_brute_force(problem, mixed=True)


@given(seeds, st.integers(2, 5), st.booleans(), st.booleans())
def test_fixed_stages_and_boundaries_are_kept(seed: int, L: int, boundaries: bool, mixed: bool) -> None:
    problem = random_problem(seed, L) if mixed else random_problem(seed, L, no_idle=False, link_groups=())
    rng = np.random.default_rng(seed + 1)
    places = tuple(int(x) for x in np.flatnonzero(problem.cuts) if x > 0)
    if boundaries:
        starts = tuple(x for x in places if rng.random() < 0.5)
        problem = replace(problem, boundaries=starts)
    else:
        problem = replace(problem, stages=int(rng.integers(1, 4)))
    check_against_brute_force(problem, mixed=mixed)


@given(seeds, st.integers(1, 6))
def test_alike_stages_equal_brute_force(seed: int, L: int) -> None:
    check_against_brute_force(random_problem(seed, L, no_idle=False, link_groups=()), mixed=False)


@pytest.mark.parametrize(
    "seed", [seed if seed == 189 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(300)]
)
def test_more_problems_equal_brute_force(seed: int) -> None:
    check_against_brute_force(random_problem(seed, 6, kinds=1 + seed % 2), mixed=True)
    check_against_brute_force(with_weights_apart(random_problem(seed, 6, kinds=1 + seed % 2), seed), mixed=True)
    check_against_brute_force(random_problem(seed, 7, no_idle=False, link_groups=()), mixed=False)


@given(seeds)
def test_alike_stages_are_the_mixed_answer_restricted_to_one_option(seed: int) -> None:
    problem = random_problem(seed, 8, no_idle=False, link_groups=())
    problem = replace(problem, options=problem.options[:1])
    S = problem.available[0] // problem.options[0].devices
    if not 1 <= S <= 1 + int(problem.cuts[1:].sum()):
        return
    one, other = solve_stages(problem, mixed=False, gap=0), solve_stages(replace(problem, stages=S), mixed=True, gap=0)
    assert type(one) is type(other)
    if isinstance(one, StageSolution) and isinstance(other, StageSolution):
        assert one.total_s == pytest.approx(other.total_s, rel=1e-12)


def layers(L: int, S: int, M: int = 32, **changes) -> StageProblem:
    """An embedding, equal layers and a heavy head, as in a decoder; bytes in GB."""
    forward = np.full(L, 1e-3)
    forward[0], forward[-1] = 1e-5, 2.3e-3
    resting = np.full(L, 1.0)
    resting[0] = resting[-1] = 2.0
    option = StageOption(
        "tp8", 8, forward, 2 * forward, resting * 1e-3, resting, np.full(L, 0.05), np.full(L, 0.5), 80.0
    )
    return replace(StageProblem((option,), (8 * S,), M, np.full(L, 2e-5), np.ones(L, bool)), **changes)


@pytest.mark.parametrize("mixed", [True, False])
def test_never_worse_than_an_equal_split(mixed: bool) -> None:
    problem = layers(34, 4)
    equal = evaluate(problem, [(0, 9, 0), (9, 18, 0), (18, 26, 0), (26, 34, 0)])
    found = solve_stages(problem, mixed=mixed, gap=0)
    assert isinstance(found, StageSolution)
    assert found.total_s < equal.total_s
    assert found.stages[-1].end - found.stages[-1].start < 8, "the heavy head takes layers off the last stage"


def test_memory_of_1f1b_moves_units_away_from_the_first_stage() -> None:
    held = np.full(12, 1.0)
    option = StageOption("one", 1, held, held, held * 0, held * 0, held, held * 0, 12.0)
    problem = StageProblem((option,), (3,), 8, held * 0, np.ones(12, bool))
    found = solve_stages(problem, mixed=False, gap=0)
    assert isinstance(found, StageSolution)
    assert [s.end - s.start for s in found.stages] == [4, 4, 4]
    short = solve_stages(replace(problem, options=(replace(option, limit_bytes=7.0),)), mixed=False, gap=0)
    assert isinstance(short, StageSolution)
    assert [s.end - s.start for s in short.stages] == [2, 3, 7]


def test_shortage_says_the_least_limit_that_would_do() -> None:
    problem = layers(34, 4)
    tight = replace(problem, options=(replace(problem.options[0], limit_bytes=5.0),))
    found = solve_stages(tight)
    assert isinstance(found, StageShortage)
    assert "stage" in found.describe()
    enough = replace(tight, options=(replace(tight.options[0], limit_bytes=found.needed_bytes),))
    assert isinstance(solve_stages(enough), StageSolution)
    little = replace(tight, options=(replace(tight.options[0], limit_bytes=found.needed_bytes * 0.999),))
    assert isinstance(solve_stages(little), StageShortage)


def test_two_speeds_of_devices_share_the_work_by_speed() -> None:
    slow = np.full(9, 2.0)
    zero = slow * 0
    options = tuple(
        StageOption(name, 1, slow / speed, zero, zero, zero, zero, zero, 1.0, kind=k)
        for k, (name, speed) in enumerate([("old", 1), ("new", 2)])
    )
    found = solve_stages(StageProblem(options, (1, 1), 64, zero, np.ones(9, bool)), gap=0)
    assert isinstance(found, StageSolution)
    assert found.pieces == ((0, 3, 0), (3, 9, 1))


@given(seeds, st.sampled_from([("loop", 2), ("loop", 3), ("v", 2)]))
def test_chunks_are_near_the_best_cut_and_never_below_the_bound(seed: int, form: tuple[str, int]) -> None:
    shape, V = form
    rng = np.random.default_rng(seed)
    L, S = 9, 2
    groups = (
        tuple((g, 2 * S - 1 - g) for g in range(S))
        if shape == "v"
        else tuple(tuple(range(g, S * V, S)) for g in range(S))
    )
    problem = random_problem(seed, L, cuts=np.ones(L, bool), boundary_s=rng.random(L) * 0.01, in_flight=interleaved(V))
    problem = replace(problem, available=(S * problem.options[0].devices,), options=(problem.options[0],))
    every = [evaluate(problem, [(a, b, 0) for a, b in runs], groups) for runs in cuts_of(L, S * V)]
    fitting = [e.total_s for e in every if e.fits]
    found = solve_stages(problem, chunks=V, shape=shape)
    if isinstance(found, StageShortage):
        assert found.needed_bytes > found.limit_bytes
        return
    assert found.fits
    assert found.groups == groups
    assert found.bound_s * (1 - 1e-9) <= min(fitting) <= found.total_s * (1 + 1e-12) <= 1.5 * min(fitting)


def test_interleaved_rule_adds_up_to_the_warm_up() -> None:
    p, V, M = 4, 2, 16
    for group in range(p):
        total = sum(interleaved(V)(p * V - 1 - chunk, p * V, M) for chunk in range(group, p * V, p))
        assert total == 2 * (p - 1 - group) + (V - 1) * p + 1


def test_large_uniform_clusters_cut_a_thousand_units() -> None:
    problem = layers(1000, 64, 512)
    found = solve_stages(problem)
    assert isinstance(found, StageSolution)
    assert len(found.stages) == 64
    assert found.t_max_s <= 17 * 3e-3


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"boundaries": (5, 3)}, PlanError, "cannot start"),
        ({"boundaries": (3,), "stages": 3}, PlanError, "do not agree"),
        ({"stages": 9}, InfeasibleError, "9 stages cannot be cut"),
        ({"available": (4,)}, InfeasibleError, "no option fits the cluster"),
        ({"boundary_s": np.zeros(34), "microbatches": 0}, InputError, "at least one"),
    ],
)
def test_impossible_wishes_are_refused_in_words(changes: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        solve_stages(layers(34, 4, **changes))


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_equal_layers_take_the_seconds_of_all_runs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unit_s = rng.choice([0.1, 0.2, 1 / 3], 12)[np.sort(rng.integers(0, 12, 24))]
    enter_s = rng.choice([0.0, 0.7], 24) if seed % 2 else np.full(24, 0.7)
    every = [float(unit_s[l:e].sum() + enter_s[l]) for l in range(24) for e in range(l + 1, 25)]
    found = runs_between(unit_s, enter_s, 0.5, 4.0)
    expected = distinct(np.array([x for x in every if 0.5 * (1 - 1e-12) <= x <= 4.0 * (1 + 1e-12)]))
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_stage_on_small_nodes_lies_across_as_many_as_it_has_to() -> None:
    """Eight devices on nodes of four, beside nodes of eight of another kind."""
    span = DeviceSpan.of(8, 16, 24, ((0, 8, 16, 20),))
    assert span.starts.tolist() == [False] * 16 + [True]
    assert DeviceSpan.of(4, 16, 24, ((0, 8, 16, 20),)).starts.nonzero()[0].tolist() == [16, 20]
    assert DeviceSpan.of(4, 0, 16, ((0, 8, 16, 20),)).starts.nonzero()[0].tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
    assert DeviceSpan.of(24, 0, 24, ((0, 8, 16, 20),)).starts.tolist() == [True]
