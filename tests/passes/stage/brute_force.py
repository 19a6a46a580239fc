"""The twin of the stage solvers: every cut on every choice of options, tried one by one."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.ir.actions import StageGraph
from autopar.ir.schedules import one_f_one_b
from autopar.passes.schedule import ActionCosts, least_span_s
from autopar.passes.stage import StageOption, StageProblem, StageShortage, StageSolution, evaluate, solve_stages


def cuts_of(L: int, p: int):
    for inner in itertools.combinations(range(1, L), p - 1):
        marks = (0, *inner, L)
        yield [(marks[k], marks[k + 1]) for k in range(p)]


PAIRS, UNEVEN = tuple(range(0, 32, 2)), (0, 3, 4, 7, 11)
"""First devices of groups of fast links: of two each, and of several sizes."""


def random_problem(seed: int, L: int, kinds: int = 1, **changes) -> StageProblem:
    """Times in seconds and small integer bytes (so that sums are exact and limits are met to the byte)."""
    rng = np.random.default_rng(seed)
    repeated = rng.random() < 0.3
    options = []
    for n in range(int(rng.integers(1, 4))):
        devices = int(rng.integers(1, 4))

        def row(scale: float) -> np.ndarray:
            return np.full(L, rng.random() * scale) if repeated else rng.random(L) * scale

        options.append(
            StageOption(
                f"o{n}",
                devices,
                row(1 / devices),
                row(2 / devices),
                row(float(rng.choice([0, 1, 10]))),
                rng.integers(0, 9, L).astype(float),
                rng.integers(0, 5, L).astype(float),
                rng.integers(0, 5, L).astype(float),
                float(rng.integers(8, 80)),
                kind=int(rng.integers(0, kinds)),
                boundary_s=rng.random(L) if rng.random() < 0.3 else None,
            )
        )
    problem = StageProblem(
        tuple(options),
        tuple(int(n) for n in rng.integers(1, 6, kinds)),
        int(rng.choice([1, 2, 3, 8])),
        rng.random(L) * float(rng.choice([0, 0.1, 1])),
        rng.random(L) < float(rng.choice([0.6, 1.0])),
        (one_f_one_b, all_at_once, twice_one_f_one_b, fewer_with_more_stages)[int(rng.integers(0, 4))],
        boundary_busy=float(rng.choice([0.0, 0.5, 1.0])),
        no_idle=bool(rng.random() < 0.3),
        link_groups=((), (PAIRS,), (PAIRS[::2], PAIRS), (UNEVEN,))[int(rng.integers(0, 4))],
    )
    return replace(problem, **changes)


def all_at_once(after: int, stages: int, M: int) -> float:
    return M


def twice_one_f_one_b(after: int, stages: int, M: int) -> float:
    return min(M, 2 * after + 1)


def fewer_with_more_stages(after: int, stages: int, M: int) -> float:
    return M / stages + after


def lies_on_devices(problem: StageProblem, chosen: tuple[int, ...]) -> bool:
    kinds = [problem.options[o].kind for o in chosen]
    used = [sum(problem.options[o].devices for o in chosen if problem.options[o].kind == k) for k in range(9)]
    if kinds != sorted(kinds) or any(used[k] > n for k, n in enumerate(problem.available)):
        return False
    return (not problem.no_idle or sum(used) == sum(problem.available)) and starts_are_near(problem, chosen)


def starts_are_near(problem: StageProblem, chosen: tuple[int, ...]) -> bool:
    """Whether no stage reaches into more groups of fast links than so many devices of its kind have to."""

    def touched(groups: tuple[int, ...], start: int, n: int) -> int:
        return len({bisect_right(groups, device) for device in range(start, start + n)})

    first = dict.fromkeys(range(len(problem.available)), 0)
    for o in chosen:
        kind, n = problem.options[o].kind, problem.options[o].devices
        begin, available = sum(problem.available[:kind]), problem.available[kind]
        start = begin + first[kind]
        first[kind] += n
        for groups in problem.link_groups:
            if touched(groups, start, n) > min(touched(groups, begin + k, n) for k in range(available - n + 1)):
                return False
    return True


def brute_force(problem: StageProblem, alike: bool = False) -> tuple[float | None, float | None]:
    """(least total that fits, least largest memory / limit), written out from the definition."""
    L, M = problem.units, problem.microbatches
    best = least = None
    for p in range(1, L + 1):
        if problem.stages not in (None, p):
            continue
        for runs in cuts_of(L, p):
            starts = tuple(a for a, _ in runs[1:])
            if not all(problem.cuts[a] for a in starts) or problem.boundaries not in (None, starts):
                continue
            for chosen in itertools.product(range(len(problem.options)), repeat=p):
                if not lies_on_devices(problem, chosen):
                    continue
                if alike and (
                    len(set(chosen)) > 1
                    or (
                        problem.fixed_stages is None and p != problem.available[0] // problem.options[chosen[0]].devices
                    )
                ):
                    continue
                times, busy, steps, ratios = [], [], [], []
                for s, ((a, b), o) in enumerate(zip(runs, chosen, strict=True)):
                    option = problem.options[o]
                    enter = (
                        0.0 if a == 0 else (problem.boundary_s if option.boundary_s is None else option.boundary_s)[a]
                    )
                    work = sum(option.forward_s[a:b]) + sum(option.backward_s[a:b])
                    times.append(work + enter)
                    busy.append(work + problem.boundary_busy * enter)
                    steps.append(sum(option.step_s[a:b]))
                    held = problem.in_flight(p - 1 - s, p, M) * sum(option.held_bytes[a:b])
                    ratios.append(
                        (sum(option.resting_bytes[a:b]) + held + max(option.peak_bytes[a:b])) / option.limit_bytes
                    )
                least = max(ratios) if least is None else min(least, max(ratios))
                if max(ratios) <= 1 + 1e-12:
                    span = sum(times) + (M - 1) * max(busy)
                    total = (least_span(problem, runs, chosen) if problem.weights_apart else span) + max(steps)
                    best = total if best is None else min(best, total)
    return best, least


def least_span(problem: StageProblem, runs: list, chosen: tuple[int, ...]) -> float:
    """The least seconds of any table of these stages with W apart, in which they hold what they have room for."""
    seconds, links, held = {}, {}, []
    for s, ((a, b), o) in enumerate(zip(runs, chosen, strict=True)):
        option = problem.options[o]
        forward, backward, weights = (sum(row[a:b]) for row in (option.forward_s, option.backward_s, option.weights_s))
        seconds |= {(s, "F"): forward, (s, "B"): backward - weights, (s, "W"): weights}
        enter = (problem.boundary_s if option.boundary_s is None else option.boundary_s)[a]
        links |= {(s - 1, s): enter / 2, (s, s - 1): enter / 2}
        base, each = sum(option.resting_bytes[a:b]) + max(option.peak_bytes[a:b]), sum(option.held_bytes[a:b])
        rule, M = problem.most_in_flight or all_at_once, problem.microbatches
        room = (option.limit_bytes - base) // each if each else M
        held.append(max(min(room, rule(len(runs) - 1 - s, len(runs), M)) // 1, 1))
    return least_span_s(StageGraph.chain(len(runs)), problem.microbatches, ActionCosts(seconds, links), held)


def with_weights_apart(problem: StageProblem, seed: int) -> StageProblem:
    """The same where a part of every backward is of weights."""
    rng = np.random.default_rng(seed)
    options = tuple(
        replace(option, weights_s=option.backward_s * rng.random(problem.units)) for option in problem.options
    )
    rule = (None, one_f_one_b, twice_one_f_one_b, fewer_with_more_stages)[int(rng.integers(0, 4))]
    return replace(problem, options=options, weights_apart=True, most_in_flight=rule)


def check_against_brute_force(problem: StageProblem, **how) -> None:
    best, least = brute_force(problem, alike=not how.get("mixed", True))
    if least is None:
        with pytest.raises(InfeasibleError):
            solve_stages(problem, gap=0, **how)
        return
    found = solve_stages(problem, gap=0, **how)
    if best is None:
        assert isinstance(found, StageShortage)
        assert found.ratio == pytest.approx(least, rel=1e-9)
        return
    assert isinstance(found, StageSolution)
    assert found.fits
    assert lies_on_devices(problem, tuple(s.option for s in found.stages))
    assert found.total_s == pytest.approx(best, rel=1e-12)
    assert found.total_s == evaluate(problem, found.pieces).total_s
