"""Groups of segments side by side, against brute force over all groupings, device counts and options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, InputError, PlanError
from autopar.ir.schedules import one_f_one_b
from autopar.passes.branch import BranchProblem, SegmentGroup, SegmentOption, evaluate, solve_branches

seeds = st.integers(0, 10**6)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [items[0], *rest[k]], *rest[k + 1 :]]


def brute_force(problem: BranchProblem) -> tuple[float | None, float | None]:
    """(least total that fits, least largest memory): from first principles, path by path."""
    best = least = None
    n, M = len(problem.segments), problem.microbatches
    for blocks in partitions(list(range(n))):
        home = {s: b for b, block in enumerate(blocks) for s in block}
        links: dict[tuple[int, int], float] = {}
        for u, v, size in problem.edges:
            if home[u] != home[v]:
                cost = problem.latency_s + size / problem.bandwidth_Bps
                links[home[u], home[v]] = links.get((home[u], home[v]), 0.0) + cost
        paths = [
            p
            for k in range(1, len(blocks) + 1)
            for p in itertools.permutations(range(len(blocks)), k)
            if all(pair in links for pair in itertools.pairwise(p))
        ]
        if any((p[-1], p[0]) in links for p in paths if len(p) > 1):
            continue
        for choice in itertools.product(*(range(len(o)) for o in problem.segments)):
            options = [problem.segments[s][choice[s]] for s in range(n)]
            counts = [{(options[s].kind, options[s].devices) for s in block} for block in blocks]
            taken = [sum(n for c in counts for k, n in c if k == kind) for kind in range(len(problem.available))]
            if any(len(c) > 1 for c in counts) or any(
                n > most for n, most in zip(taken, problem.available, strict=True)
            ):
                continue
            time = [sum(options[s].time_s for s in block) for block in blocks]
            latency = max(sum(time[b] for b in p) + sum(links[q] for q in itertools.pairwise(p)) for p in paths)
            busy = max(
                t + problem.boundary_busy * sum(c for (_, to), c in links.items() if to == b)
                for b, t in enumerate(time)
            )
            memory = 0.0
            for b, block in enumerate(blocks):
                flight = problem.in_flight(max(len(p) - 1 for p in paths if p[0] == b), 0, M)
                memory = max(
                    memory,
                    sum(options[s].resting_bytes + flight * options[s].held_bytes for s in block)
                    + max(options[s].peak_bytes for s in block),
                )
            least = memory if least is None else min(least, memory)
            if memory <= problem.limit_bytes:
                total = latency + (M - 1) * busy + max(sum(options[s].step_s for s in block) for block in blocks)
                best = total if best is None else min(best, total)
    return best, least


def random_problem(seed: int, n: int) -> BranchProblem:
    rng = np.random.default_rng(seed)
    segments = tuple(
        tuple(
            SegmentOption(
                d,
                float(rng.random() + 0.1) / d,
                float(rng.random()) * 0.3,
                float(rng.integers(1, 9)),
                float(rng.integers(0, 4)),
                float(rng.integers(0, 4)),
            )
            for d in rng.choice([1, 1, 2, 4], size=int(rng.integers(1, 4))).tolist()
        )
        for _ in range(n)
    )
    edges = tuple((u, v, float(rng.random())) for u, v in itertools.combinations(range(n), 2) if rng.random() < 0.5)
    return BranchProblem(
        segments,
        edges,
        int(rng.integers(2, 6)),
        int(rng.choice([1, 2, 8])),
        float(rng.choice([2.0, 50.0])),
        float(rng.choice([0.0, 0.05])),
        float(rng.choice([8.0, 20.0, 1e9])),
        float(rng.choice([0.0, 1.0])),
        (one_f_one_b, all_at_once)[int(rng.integers(0, 2))],
    )


def all_at_once(after: int, stages: int, M: int) -> float:
    return M


def check(problem: BranchProblem) -> None:
    best, least = brute_force(problem)
    if best is None:
        with pytest.raises(InfeasibleError, match="in memory" if least is not None else "devices"):
            solve_branches(problem)
        return
    found = solve_branches(problem)
    assert found.total_s == pytest.approx(best, rel=1e-6)
    assert found.total_s >= best * (1 - 1e-12)
    assert found.bound <= best * (1 + 1e-9)
    assert max(found.memory) <= problem.limit_bytes
    assert found.total_s == evaluate(problem, found.groups).total_s


@given(seeds, st.integers(1, 4))
def test_groups_equal_brute_force(seed: int, n: int) -> None:
    check(random_problem(seed, n))


@given(seeds, st.integers(1, 4))
def test_groups_on_devices_of_two_kinds_equal_brute_force(seed: int, n: int) -> None:
    problem, rng = random_problem(seed, n), np.random.default_rng(seed)
    segments = tuple(tuple(replace(o, kind=int(rng.integers(0, 2))) for o in row) for row in problem.segments)
    kinds = (int(rng.integers(1, 5)), int(rng.integers(1, 5)))
    check(replace(problem, segments=segments, devices=sum(kinds), kinds=kinds))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_six_segments_equal_brute_force(seed: int) -> None:
    problem = random_problem(seed, 6)
    check(replace(problem, segments=tuple(options[:2] for options in problem.segments)))


def sensors(bandwidth_Bps: float, latency_s: float = 1e-5) -> BranchProblem:
    """Camera, lidar, radar -> fusion -> two heads, on 8 devices; more devices help each segment less and less."""
    work = [8e-3, 4e-3, 2e-3, 3e-3, 1e-3, 1e-3]
    segments = tuple(tuple(SegmentOption(d, w / d**0.6, 1e-4) for d in (1, 2, 3, 4, 5, 6, 7, 8)) for w in work)
    edges = ((0, 3, 8e6), (1, 3, 4e6), (2, 3, 2e6), (3, 4, 2e6), (3, 5, 2e6))
    names = ("camera", "lidar", "radar", "fusion", "boxes", "lanes")
    return BranchProblem(segments, edges, 8, 8, bandwidth_Bps, latency_s, names=names)


def chains(problem: BranchProblem) -> Iterator[list[SegmentGroup]]:
    """All pipelines of consecutive segments, and everything on all devices."""
    n = len(problem.segments)
    for p in range(1, n + 1):
        for inner in itertools.combinations(range(1, n), p - 1):
            marks = (0, *inner, n)
            for devices in itertools.product(range(1, problem.devices + 1), repeat=p):
                if sum(devices) <= problem.devices:
                    yield [
                        SegmentGroup(tuple(range(a, b)), d, (d - 1,) * (b - a))
                        for (a, b), d in zip(itertools.pairwise(marks), devices, strict=True)
                    ]


def test_encoders_of_different_cost_go_side_by_side_when_that_is_faster() -> None:
    problem = sensors(100e9)
    one_by_one = replace(problem, edges=(*problem.edges, (0, 1, 0.0), (1, 2, 0.0), (4, 5, 0.0)))
    chain = min(evaluate(one_by_one, groups).total_s for groups in chains(problem))
    found = solve_branches(problem)
    assert found.side_by_side
    assert found.total_s < chain - 6 * problem.latency_s
    home = {s: group for group in found.groups for s in group.segments}
    assert home[0] is not home[1]
    assert home[0].devices > home[2].devices, "the camera's encoder is the heaviest"


def test_slow_links_keep_everything_together() -> None:
    problem = sensors(1e8)
    found = solve_branches(problem)
    assert len(found.groups) == 1
    assert not found.side_by_side
    assert found.groups[0].devices == 8


@given(st.floats(7.5, 11.5))
def test_never_worse_than_any_chain(exponent: float) -> None:
    problem = replace(sensors(10**exponent), devices=4)
    problem = replace(problem, segments=tuple(options[:4] for options in problem.segments))
    found = solve_branches(problem)
    assert found.total_s <= min(evaluate(problem, groups).total_s for groups in chains(problem)) * (1 + 1e-7)


def test_without_time_the_best_of_one_group_and_a_chain_is_given() -> None:
    problem = sensors(100e9)
    found = solve_branches(problem, time_limit_s=1e-4)
    together = evaluate(problem, [SegmentGroup(tuple(range(6)), 8, (7,) * 6)])
    assert found.bound <= solve_branches(problem).total_s * (1 + 1e-9)
    assert found.total_s <= together.total_s


def test_impossible_input_is_refused_in_words() -> None:
    option = SegmentOption(2, 1.0, resting_bytes=2.0**31)
    with pytest.raises(InputError, match="topological order"):
        BranchProblem(((option,), (option,)), ((1, 0, 1.0),), 2, 1, 1.0)
    with pytest.raises(InputError, match="no option"):
        BranchProblem(((),), (), 2, 1, 1.0)
    with pytest.raises(InfeasibleError, match="camera needs at least 2 devices"):
        solve_branches(BranchProblem(((option,),), (), 1, 1, 1.0, names=("camera",)))
    with pytest.raises(InfeasibleError, match=r"camera on 2 devices needs 2\.00 GiB of 1\.00 GiB"):
        solve_branches(BranchProblem(((option,),), (), 2, 1, 1.0, limit_bytes=2.0**30, names=("camera",)))
    free = SegmentOption(1, 1.0)
    problem = BranchProblem(((free,),) * 3, ((0, 1, 1.0), (1, 2, 1.0)), 2, 1, 1.0)
    with pytest.raises(PlanError, match="circle"):
        evaluate(problem, [SegmentGroup((0, 2), 1, (0, 0)), SegmentGroup((1,), 1, (0,))])
