"""The problem of cutting a program into pipeline stages, as plain arrays, and the cost of a decision.

Units l = 0..L-1 are the smallest runs that stay together. A stage [i, j) on option o (a submesh with a way to shard over
it) takes, per microbatch,

    t = sum of forward_s + backward_s over [i, j)  +  boundary_s[i]      (0 at unit 0)

and a step of M microbatches is estimated as in Alpa (Zheng et al., OSDI 2022), with the once-a-step work after it:

    total = sum over stages of t  +  (M - 1) * max over stages of t  +  max over stages of step_s

`boundary_busy` is the share of boundary_s that also keeps the stage busy, that is, counts in the maximum (0 where sends
hide behind compute). Where schedules may have the gradients of weights apart (`weights_apart`), which fill what 1F1B idles,

    total = the least seconds that any table of such actions takes  +  max over stages of step_s

(`passes.schedule.least_span_s`; sends hide behind compute). A stage holds resting_bytes + in_flight * held_bytes + the largest
peak_bytes of its units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from autopar.errors import InputError, PlanError
from autopar.ir.actions import StageGraph
from autopar.ir.schedules import InFlight, one_f_one_b
from autopar.ir.text import size_text
from autopar.passes.schedule import ActionCosts, least_span_s

Piece = tuple[int, int, int]
"""(first unit, unit after the last, index of the option)."""


@dataclass(frozen=True, eq=False)
class StageOption:
    """One submesh and one way to run units on it; arrays are (L,).

    devices: how many (in the unit of `StageProblem.available`). forward_s, backward_s: seconds of a unit for one
    microbatch. step_s: seconds once per step (gradient reduction, optimizer). resting_bytes: always there.
    held_bytes: per microbatch in flight. peak_bytes: largest moment inside the unit. limit_bytes: what one device has.
    boundary_s: replaces the problem's for stages on this option. weights_s: of backward_s what gradients of weights take.
    """

    name: str
    devices: int
    forward_s: np.ndarray
    backward_s: np.ndarray
    step_s: np.ndarray
    resting_bytes: np.ndarray
    held_bytes: np.ndarray
    peak_bytes: np.ndarray
    limit_bytes: float
    kind: int = 0
    boundary_s: np.ndarray | None = None
    weights_s: np.ndarray | None = None

    @cached_property
    def unit_s(self) -> np.ndarray:
        """(L,) seconds of every unit for one microbatch."""
        return np.asarray(self.forward_s, float) + np.asarray(self.backward_s, float)

    @cached_property
    def sums(self) -> dict[str, np.ndarray]:
        """Prefix sums (L+1,) of time and of it forward and weights, of step, resting and held."""
        rows = {"time": self.unit_s, "step": self.step_s, "resting": self.resting_bytes, "held": self.held_bytes}
        rows |= {"forward": self.forward_s, "weights": 0 * self.unit_s if self.weights_s is None else self.weights_s}
        return {name: np.concatenate([[0.0], np.cumsum(np.asarray(row, float))]) for name, row in rows.items()}


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Units, options, devices and the schedule's memory rule. Raises InputError for arrays that do not fit together.

    available: devices per kind, laid out in the order of the kinds; stages take them in that order and may leave some
    idle. boundary_s: (L,) seconds to hand one microbatch's values, and their gradients back, across the cut before
    unit l. cuts: (L,) whether a stage may start at unit l (unit 0 always may). stages, boundaries: what the user fixed:
    how many stages, or the first units of all stages but the first. weights_apart: whether schedules may run the gradients
    of weights on their own; most_in_flight: what they may hold then beside what fits (None: any number). Where stages may
    differ: no_idle: whether all devices are to be used. link_groups: by level the first device of every group that its links
    join; a stage lies across no more such groups than one of its kind has to, as the seconds of an option are those of a
    submesh that starts with a group.
    """

    options: tuple[StageOption, ...]
    available: tuple[int, ...]
    microbatches: int
    boundary_s: np.ndarray
    cuts: np.ndarray
    in_flight: InFlight = one_f_one_b
    stages: int | None = None
    boundaries: tuple[int, ...] | None = None
    boundary_busy: float = 1.0
    weights_apart: bool = False
    most_in_flight: InFlight | None = None
    no_idle: bool = False
    link_groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        L = len(self.cuts)
        if not self.options or not L or self.microbatches < 1:
            raise InputError("a stage problem needs at least one option, one unit and one microbatch")
        for option in self.options:
            for name in ("forward_s", "backward_s", "step_s", "resting_bytes", "held_bytes", "peak_bytes"):
                row = np.asarray(getattr(option, name))
                if row.shape != (L,) or (row < 0).any():
                    raise InputError(f"option {option.name}: {name} must hold {L} numbers of at least 0, one per unit")
            if option.devices < 1 or not 0 <= option.kind < len(self.available):
                raise InputError(
                    f"option {option.name}: needs at least one device of a kind below {len(self.available)}"
                )
        if self.boundaries is not None:
            marks = (0, *self.boundaries, L)
            wrong = [b for b in self.boundaries if not 0 < b < L or not self.cuts[b]]
            if wrong or any(a >= b for a, b in pairwise(marks)):
                raise PlanError(
                    f"stages cannot start at units {self.boundaries}: they must rise, lie between 1 and {L - 1}, and "
                    f"be places where a stage may start" + (f" (unit {wrong[0]} is not)" if wrong else "")
                )
            if self.stages not in (None, len(self.boundaries) + 1):
                raise PlanError(
                    f"{self.stages} stages do not agree with {len(self.boundaries)} boundaries; drop one of both"
                )

    @property
    def units(self) -> int:
        return len(self.cuts)

    @cached_property
    def starts(self) -> np.ndarray:
        """(L+1,) bool: where a stage may start (and the one before it end); the end counts as one."""
        if self.boundaries is None:
            allowed = np.append(np.asarray(self.cuts, bool), True)
        else:
            allowed = np.zeros(self.units + 1, bool)
            allowed[[*self.boundaries, self.units]] = True
        allowed[0] = True
        return allowed

    @cached_property
    def fixed_stages(self) -> int | None:
        """Number of stages where the user fixed it."""
        return self.stages if self.boundaries is None else len(self.boundaries) + 1

    def may_hold(self, stages: int) -> np.ndarray:
        """(stages,) microbatches that a schedule with W apart holds at most, by stages after this one."""
        M, rule = self.microbatches, self.most_in_flight
        return np.array(
            [M if rule is None else max(1.0, min(M, rule(after, stages, M))) for after in range(stages)], float
        )

    def enter_s(self, option: StageOption) -> np.ndarray:
        """(L,) boundary_s of stages on an option; 0 at unit 0."""
        row = np.array(self.boundary_s if option.boundary_s is None else option.boundary_s, float)
        row[0] = 0.0
        return row


@dataclass(frozen=True)
class StageChoice:
    """Units [start, end) on an option: seconds per microbatch (hand-over included), seconds once per step, bytes."""

    start: int
    end: int
    option: int
    seconds: float
    step_s: float
    memory_bytes: float
    limit_bytes: float


@dataclass(frozen=True)
class StageSolution:
    """Stages in program order and what they are predicted to take.

    t_max_s: seconds that the slowest group is busy per microbatch. bound_s: no solution of the problem that was solved
    is faster. groups[g]: stages of group g. group_memory: bytes on a device of each group.
    """

    stages: tuple[StageChoice, ...]
    total_s: float
    t_max_s: float
    step_s: float
    groups: tuple[tuple[int, ...], ...]
    group_memory: tuple[float, ...]
    bound_s: float = 0.0
    method: str = "given"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple((s.start, s.end, s.option) for s in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every group is within its device's limit."""
        return all(
            bytes_ <= self.stages[group[0]].limit_bytes * (1 + 1e-12)
            for group, bytes_ in zip(self.groups, self.group_memory, strict=True)
        )


@dataclass(frozen=True)
class StageShortage:
    """The shortage where no cut fits in memory. best: the cut whose worst stage exceeds its limit by the least factor.

    stage: the worst stage of `best`. needed_bytes, limit_bytes: what it needs and has; with limits larger by
    needed_bytes / limit_bytes the problem has a solution, with less it has none.
    """

    needed_bytes: float
    limit_bytes: float
    stage: int
    best: StageSolution

    @property
    def ratio(self) -> float:
        return self.needed_bytes / self.limit_bytes if self.limit_bytes else float("inf")

    def describe(self) -> str:
        """A sentence for an error message."""
        worst = self.best.stages[self.stage]
        return (
            f"no cut into stages fits: at the best one, {len(self.best.groups)} groups, stage {self.stage} (units "
            f"{worst.start}–{worst.end - 1}) needs {size_text(self.needed_bytes)} of {size_text(self.limit_bytes)}"
        )


def evaluate(
    problem: StageProblem, pieces: Sequence[Piece], groups: tuple[tuple[int, ...], ...] | None = None
) -> StageSolution:
    """Predicted times and bytes of a cut, straight from the definition; memory limits are reported, not enforced.

    groups: which stages each group runs (one each when left out). Raises PlanError for pieces that do not follow each
    other from the first unit to the last.
    """
    ends = [0, *(p[1] for p in pieces)]
    if [p[0] for p in pieces] != ends[:-1] or ends[-1] != problem.units or any(a > b for a, b, _ in pieces):
        raise PlanError(f"stages {pieces} do not follow each other over the {problem.units} units")
    S, M = len(pieces), problem.microbatches
    groups = groups or tuple((s,) for s in range(S))
    stages, busy, parts = [], [], []
    for s, (i, j, o) in enumerate(pieces):
        option = problem.options[o]
        enter = float(problem.enter_s(option)[i]) if i < j else 0.0
        compute = float(np.sum(option.forward_s[i:j]) + np.sum(option.backward_s[i:j]))
        rests = float(np.sum(option.resting_bytes[i:j]))
        rests += problem.in_flight(S - 1 - s, S, M) * float(np.sum(option.held_bytes[i:j]))
        peak = float(np.max(option.peak_bytes[i:j], initial=0.0))
        step = float(np.sum(option.step_s[i:j]))
        stages.append(StageChoice(i, j, o, compute + enter, step, rests + peak, option.limit_bytes))
        busy.append(compute + problem.boundary_busy * enter)
        parts.append((rests, peak))
    t_max = max(sum(busy[s] for s in group) for group in groups)
    step_s = max(sum(stages[s].step_s for s in group) for group in groups)
    memory = tuple(sum(parts[s][0] for s in group) + max(parts[s][1] for s in group) for group in groups)
    span_s = (
        _least_span_s(problem, pieces) if problem.weights_apart else sum(s.seconds for s in stages) + (M - 1) * t_max
    )
    return StageSolution(tuple(stages), span_s + step_s, t_max, step_s, groups, memory, span_s + step_s)


def _least_span_s(problem: StageProblem, pieces: Sequence[Piece]) -> float:
    """The least seconds of any table of a chain of stages, whose W are apart."""
    seconds: dict[tuple[int, str], float] = {}
    comm_s: dict[tuple[int, int], float] = {}
    held: list[float] = []
    for s, (i, j, o) in enumerate(pieces):
        option = problem.options[o]
        forward_s, weights_s, all_s = (float(option.sums[row][j] - option.sums[row][i]) for row in _ACTIONS)
        seconds |= {(s, "F"): forward_s, (s, "B"): all_s - forward_s - weights_s, (s, "W"): weights_s}
        if s:
            comm_s[s - 1, s] = comm_s[s, s - 1] = float(problem.enter_s(option)[i]) / 2 if i < j else 0.0
        base = np.sum(option.resting_bytes[i:j]) + np.max(option.peak_bytes[i:j], initial=0.0)
        most = problem.may_hold(len(pieces))[len(pieces) - 1 - s]
        held.append(float(most_held(base, np.sum(option.held_bytes[i:j]), option.limit_bytes, most)))
    return least_span_s(StageGraph.chain(len(pieces)), problem.microbatches, ActionCosts(seconds, comm_s), held)


_ACTIONS = ("forward", "weights", "time")


def most_held(base: np.ndarray, held: np.ndarray, limit: float, most: np.ndarray) -> np.ndarray:
    """How many microbatches stages can hold at once, from 1 to `most`. base: bytes that do not grow with them; held: of each."""
    room = np.maximum(limit - np.asarray(base, float), 0.0) * (1 + 1e-9)
    each = np.maximum(np.asarray(held, float), 1e-9)
    return np.asarray(np.clip(np.minimum(room / each, most) // 1, 1, most))
