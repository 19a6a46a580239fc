"""Choosing the way to cut: mixed submeshes on small clusters, one option for all stages on large ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.passes.stage.apart import fastest_apart
from autopar.passes.stage.intervals import condense
from autopar.passes.stage.mixed import Mixed, fastest_mixed
from autopar.passes.stage.stage_problem import Piece, StageProblem, StageShortage, StageSolution, evaluate
from autopar.passes.stage.uniform import Uniform, fastest_chunks, fastest_uniform, least_total, stages_of

MIXED_DEVICES, MIXED_UNITS = 64, 200
"""Up to here `solve_stages` mixes submeshes of different sizes on its own."""


def solve_stages(
    problem: StageProblem, *, mixed: bool | None = None, gap: float = 1e-6, chunks: int = 1, shape: str = "loop"
) -> StageSolution | StageShortage:
    """The cut with the least predicted step time, or what is missing for one.

    mixed: whether stages may differ in their option (default: up to 64 devices and 200 units, and always with several
    kinds of devices). gap: relative distance to the optimum that is good enough; 0 proves it. chunks, shape: chunks of
    every group and how they lie, for interleaved schedules (stages are alike then, and the answer is near the optimum,
    not proven). Raises InfeasibleError when no cut exists at any memory: too few devices or places to cut.
    """
    cut = solve_stages_below(problem, np.inf, mixed=mixed, gap=gap, chunks=chunks, shape=shape)
    assert cut is not None, "without a cutoff there is a cut or a shortage"
    return cut


def solve_stages_below(
    problem: StageProblem,
    cutoff_s: float,
    *,
    mixed: bool | None = None,
    gap: float = 1e-6,
    chunks: int = 1,
    shape: str = "loop",
) -> StageSolution | StageShortage | None:
    """The same, where a cut that takes cutoff_s or more is of no interest: stages that may differ are then not looked for, and
    None says that there are none which take less (or that fit)."""
    small, marks = condense(problem)
    usable = tuple(i for i, o in enumerate(small.options) if o.devices <= small.available[o.kind])
    if not usable:
        raise InfeasibleError(_no_devices(problem))
    if mixed is None:
        mixed = chunks == 1 and (
            len(problem.available) > 1 or (sum(problem.available) <= MIXED_DEVICES and small.units <= MIXED_UNITS)
        )
    if chunks > 1:
        return _chunked(problem, small, marks, usable, chunks, shape, gap)
    if mixed:
        return _mixed(problem, small, marks, usable, gap, cutoff_s)
    alike = _uniform(replace(problem, weights_apart=False), replace(small, weights_apart=False), marks, usable, gap)
    return _read(problem, alike) if problem.weights_apart and isinstance(alike, StageSolution) else alike


def _read(problem: StageProblem, solution: StageSolution) -> StageSolution:
    """A solution as the problem counts its seconds; of what is faster nothing is proven."""
    return replace(evaluate(problem, solution.pieces), bound_s=0.0, method=solution.method)


def _no_devices(problem: StageProblem) -> str:
    least = min(problem.options, key=lambda o: o.devices)
    return (
        f"no option fits the cluster: the smallest, {least.name}, takes {least.devices} devices and there are "
        f"{problem.available[least.kind]} of its kind; offer smaller submeshes"
    )


def _no_cut(problem: StageProblem, units: int) -> InfeasibleError:
    want = f"{problem.fixed_stages} stages" if problem.fixed_stages else "the stages that the devices allow"
    return InfeasibleError(
        f"{want} cannot be cut: the program can be parted at {units - 1} places ({units} stages at most), and "
        f"{sum(problem.available)} devices carry options of {sorted({o.devices for o in problem.options})} devices; ask "
        "for another number of stages, or add options with fewer devices"
    )


def _original(pieces: Iterable[Piece], marks: np.ndarray) -> tuple[Piece, ...]:
    return tuple((int(marks[i]), int(marks[j]), o) for i, j, o in pieces)


def _shortage(best: StageSolution) -> StageShortage:
    ratios = [m / max(best.stages[g[0]].limit_bytes, 1.0) for g, m in zip(best.groups, best.group_memory, strict=True)]
    worst = int(np.argmax(ratios))
    return StageShortage(
        best.group_memory[worst], best.stages[best.groups[worst][0]].limit_bytes, best.groups[worst][0], best
    )


def _mixed(
    problem: StageProblem, small: StageProblem, marks: np.ndarray, usable: tuple[int, ...], gap: float, cutoff_s: float
) -> StageSolution | StageShortage | None:
    reduced = replace(small, options=tuple(small.options[i] for i in usable))
    devices = sum(
        n // min((o.devices for o in reduced.options if o.kind == k), default=n + 1)
        for k, n in enumerate(problem.available)
    )
    most = min(small.units, devices)
    fixed = problem.fixed_stages
    if fixed is not None and fixed > most:
        raise _no_cut(problem, small.units)
    runs = [(fixed, True)] if fixed is not None else [(most, False)]
    if fixed is None and _by_total(reduced, most):
        runs = [(S, True) for S in range(1, most + 1)]
    best: StageSolution | None = None
    for S, exactly in runs:
        cutoff = cutoff_s if best is None else best.total_s
        pieces = (fastest_apart if problem.weights_apart else fastest_mixed)(reduced, S, exactly, gap, cutoff)
        if pieces is not None:
            cut = evaluate(problem, _original(((i, j, usable[o]) for i, j, o in pieces), marks))
            best = cut if best is None or cut.total_s < best.total_s else best
    if best is not None:
        method = "apart" if problem.weights_apart else "mixed"
        return replace(best, bound_s=best.total_s * (1 - 2 * gap), method=method)
    if np.isfinite(cutoff_s):
        return None
    tries = [Mixed(reduced, S, exactly).least_memory() for S, exactly in runs]
    least = min((t for t in tries if t is not None), default=None, key=lambda t: t[0])
    if least is None:
        raise _no_cut(problem, small.units)
    return _shortage(evaluate(problem, _original(((i, j, usable[o]) for i, j, o in least[1]), marks)))


def _by_total(problem: StageProblem, most: int) -> bool:
    """Whether what is in flight depends on the number of stages, not only on how many come after."""
    M, rules = problem.microbatches, [rule for rule in (problem.in_flight, problem.most_in_flight) if rule is not None]
    return any(
        rule(after, S, M) != rule(after, most, M) for rule in rules for S in range(1, most) for after in range(S)
    )


def _uniform(
    problem: StageProblem, small: StageProblem, marks: np.ndarray, usable: tuple[int, ...], gap: float
) -> StageSolution | StageShortage:
    """Options in the order of their lower bounds; those whose bound is not below the best total are not looked at."""
    counts = {i: S for i in usable if (S := stages_of(small, i)) is not None and small.units >= S}
    if not counts:
        raise _no_cut(problem, small.units)
    bounds = {i: least_total(small, i, S) for i, S in counts.items()}
    best: StageSolution | None = None
    for i in sorted(counts, key=lambda i: bounds[i]):
        if best is not None and bounds[i] >= best.total_s * (1 - gap):
            break
        pieces = fastest_uniform(small, i, counts[i], gap, np.inf if best is None else best.total_s)
        if pieces is not None:
            cut = evaluate(problem, _original(pieces, marks))
            best = cut if best is None or cut.total_s < best.total_s else best
    if best is not None:
        return replace(best, bound_s=best.total_s * (1 - 2 * gap), method="uniform")
    least: StageShortage | None = None
    for i, S in counts.items():
        limit = max(small.options[i].limit_bytes, 1.0)
        tight = Uniform(small, i, S, 0.0).least_memory(np.inf if least is None else least.ratio * limit)
        if tight is not None:
            shortage = _shortage(evaluate(problem, _original(tight[1], marks)))
            least = shortage if least is None or shortage.ratio < least.ratio else least
    assert least is not None, "without a cap the least memory is found"
    return least


def _chunked(
    problem: StageProblem,
    small: StageProblem,
    marks: np.ndarray,
    usable: tuple[int, ...],
    V: int,
    shape: str,
    gap: float,
) -> StageSolution | StageShortage:
    fixed = problem.fixed_stages
    if fixed is not None and fixed % V:
        raise InfeasibleError(f"{fixed} stages cannot be {V} chunks per group; use a multiple of {V} stages")
    best: StageSolution | None = None
    least: StageSolution | None = None
    bound = np.inf
    for i in usable:
        o = small.options[i]
        most = small.available[o.kind] // o.devices
        S = fixed // V if fixed is not None else most
        if not 1 <= S <= most or small.units < S * V:
            continue
        on_option = replace(small, options=(o,))
        fits, tight = fastest_chunks(on_option, 0, S, V, shape, gap)
        bound = min(bound, least_total(on_option, 0, S))
        for cut, is_fit in ((fits, True), (tight, False)):
            if cut is None:
                continue
            pieces = _original(((a, b, i) for a, b, _ in cut.pieces), marks)
            solution = evaluate(problem, pieces, cut.groups)
            if is_fit and (best is None or solution.total_s < best.total_s):
                best = solution
            if not is_fit and (least is None or _shortage(solution).ratio < _shortage(least).ratio):
                least = solution
    if best is not None:
        return replace(best, bound_s=bound, method="chunks")
    if least is None:
        raise _no_cut(problem, small.units)
    return _shortage(least)
