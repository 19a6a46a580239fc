"""The whole program planned for one submesh, as if all of it ran there: what cuts into stages are made of.

Such a plan says what every call costs on that submesh (`autopar.passes.account.calls`), so any run of calls as a stage
there costs the sum of its calls and no stage is planned by itself. What a call costs is a + c / M in the number M of
microbatches, so two counts are planned and others are interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import numpy as np

from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.schedules import InFlight, Schedule, one_at_a_time
from autopar.ir.setting import Setting
from autopar.passes.account.calls import Units, boundaries, measure
from autopar.passes.lower.repeats import Shortened, shortened, whole
from autopar.passes.lower.stage import lower_stage
from autopar.passes.rules.per_axis import PerAxis
from autopar.passes.schedule import schedule_row, tried_by_default
from autopar.passes.search.lower_bounds import LeastWork
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.one_mesh.joint import JointSearch
from autopar.passes.search.one_mesh.within_memory import joint_on, solution_of
from autopar.passes.search.task import Task
from autopar.passes.search.workers import Answers
from autopar.passes.shard.meshes import sharing_rows
from autopar.passes.shard.solve import Shortage, Solution
from autopar.passes.shard.solve_mesh import OnMesh, build_problem, solve_mesh
from autopar.passes.shard.uneven import rows_of
from autopar.passes.stage import StageOption
from autopar.plan import StagePlan

Axes = tuple[tuple[str, int], ...]
"""The axes of a mesh: names and sizes."""

_CLOSE = 0.01
"""Relative distance to its bound at which a plan for a submesh is good enough."""
_MORE = 1.15
"""Calls are taken to cost this many times what they cost at least, where that is all that is known: beside launches, passes over
parameters and latencies do not become shorter in smaller microbatches."""
_JOINT_CLOSE, _PRICE_CLOSE = 0.02, 1e-3
"""The same where recompute is chosen with it, and for the sharding at each price of that search."""


@dataclass(frozen=True)
class SubmeshPlan:
    """One submesh with a plan of the whole program on it, and what every call costs there."""

    mesh: Mesh
    plan: StagePlan
    units: Units
    solution: Solution


class SubmeshPlans:
    """Plans of the whole program on submeshes; each is made once.

    tasks: of the request, by microbatch count. planned_at: by ranks of a submesh the two counts that the first search for cuts
    chose, so that what later ones estimate lies on the same lines.
    """

    def __init__(self, tasks: TasksByCount) -> None:
        self.tasks = tasks
        self.planned_at: dict[int, tuple[int, int]] = {}
        self._plans: dict[tuple[int, Mesh, float, str], SubmeshPlan | None] = {}
        self._joints: dict[tuple[int, Mesh], tuple[Task, JointSearch]] = {}
        self._shortened: dict[Program, Shortened] = {}
        self._per_axis: dict[Axes, PerAxis] = {}
        self._least_work: dict[Program, LeastWork] = {}

    @property
    def task(self) -> Task:
        """The request as it stands."""
        return self.tasks.task

    def copy(self) -> SubmeshPlans:
        """The same plans; what is replaced in the copy does not matter to the original."""
        copy = SubmeshPlans(self.tasks.copy())
        copy._plans = dict(self._plans)
        copy.planned_at = dict(self.planned_at)
        copy._per_axis = dict(self._per_axis)
        return copy

    def narrow(self, meshes: Iterable[Mesh], per_axis: PerAxis) -> None:
        """Plan on submeshes with these axes with what ops may take along an axis (`autopar.passes.rules.per_axis`)."""
        self._per_axis |= dict.fromkeys((mesh.axes for mesh in meshes), per_axis)

    def use(self, M: int, task: Task) -> None:
        """Plan for this task in M microbatches from here on: plans of another one are forgotten."""
        if self.tasks.replace(M, task):
            self._plans = {key: plan for key, plan in self._plans.items() if key[0] != M}

    def on(
        self, M: int, mesh: Mesh, share: float = 0.0, groups: int = 1, policy: str | None = None
    ) -> SubmeshPlan | None:
        """The plan for M microbatches on one submesh, within a share of the memory of so many of them (0: any memory).

        policy: of recompute, "auto" to choose it together with the sharding; by default the one that the options force, or
        "none". None where nothing fits.
        """
        task = self.tasks.at(M)
        policy = policy or self._policy()
        key = (M, mesh, share, policy)
        if key not in self._plans:
            budget = share * groups * task.limit_at(mesh)
            held = _held(task, mesh)
            per_axis = self._per_axis.get(mesh.axes)
            anyhow, setting = self._plans.get((M, mesh, 0.0, policy)), _first_stage(task, groups)
            if anyhow is not None and setting == _first_stage(task, 1) and anyhow.solution.memory <= budget:
                self._plans[key] = anyhow
                return anyhow
            try:
                if policy == "auto":
                    solved = _by_joint(self._joint(task, M, held, groups, per_axis), budget)
                else:
                    solved = _by_policy(task.on(held, setting, per_axis), budget, policy)
            except (InfeasibleError, ConstraintError):  # `without_choice` says it, where no stage has a plan
                solved = None
            self._plans[key] = _measured(task, self._short(task), held, *solved) if solved is not None else None
        return self._plans.get(key)

    def without_choice(self) -> InfeasibleError | ConstraintError | None:
        """Why a submesh that was asked for has no plan in any memory, where one has none, as strategy and constraints leave no
        choice there. It is asked again for this, as another process may have been asked before."""
        for (M, mesh, share, policy), plan in self._plans.items():
            if plan is None and not share:
                task = self.tasks.at(M)
                try:
                    build_problem(task.on(_held(task, mesh)), task.options.strategy, policy)
                except (InfeasibleError, ConstraintError) as error:
                    return error
        return None

    @contextmanager
    def ahead(self, questions: Sequence[tuple[int, Mesh]]) -> Iterator[PlansAhead]:
        """Plans in any memory for these microbatch counts on these submeshes, made ahead in this order by other processes."""
        for M in dict.fromkeys(M for M, _ in questions):
            self._short(self.tasks.at(M))  # before processes are forked, so that it is made once
        with self.task.workers.answers(lambda question: self.on(*question), questions) as plans:
            yield PlansAhead(self, plans, {question: i for i, question in enumerate(questions)})

    def keep(self, M: int, mesh: Mesh, plan: SubmeshPlan | None) -> None:
        """Remember a plan in any memory that another process made."""
        self._plans[M, mesh, 0.0, self._policy()] = plan

    def least_work(self, M: int) -> LeastWork:
        """The work of the calls of one of M microbatches on devices of the first kind."""
        task = self.tasks.at(M)
        if task.program not in self._least_work:
            self._least_work[task.program] = LeastWork.of(task)
        return self._least_work[task.program]

    def by_count(self, planned: Mapping[int, SubmeshPlan], counts: Sequence[int]) -> PlansByCount:
        """Plans on one submesh, and what they say of other microbatch counts. planned: by count."""
        program = self.tasks.at(max(*planned, *counts)).program
        prologue = tuple(i for i, call in enumerate(program.calls) if call.prologue)
        return PlansByCount(planned, tuple(counts), self.least_work(min(planned)).launched_s, prologue)

    def _policy(self) -> str:
        """The recompute policy that the options force, or "none"."""
        forced = self.task.options.recompute
        return forced if forced != "auto" else "none"

    def within(self, M: int, meshes: Iterable[Mesh], share: float, policy: str | None) -> list[SubmeshPlan]:
        """Plans on these submeshes within a share of the memory, where there are any."""
        plans = (self.on(M, mesh, share, self.task.cluster.size // mesh.size, policy) for mesh in meshes)
        return [plan for plan in plans if plan is not None]

    def _short(self, task: Task) -> Shortened:
        """The task's program with runs of equal layers cut short."""
        if task.program not in self._shortened:
            self._shortened[task.program] = shortened(task.program, task.parameter_kind)
        return self._shortened[task.program]

    def _joint(self, task: Task, M: int, mesh: Mesh, groups: int, per_axis: PerAxis | None) -> JointSearch:
        """Sharding and recompute of the whole program on one submesh; budgets that are asked in turn share its points."""
        owner, joint = self._joints.get((M, mesh), (None, None))
        if joint is None or owner is not task:
            joint = joint_on(task, mesh, _first_stage(task, groups), _PRICE_CLOSE, per_axis)
            self._joints[M, mesh] = task, joint
        return joint


class PlansAhead:
    """Plans that other processes make ahead. place: of every (microbatch count, submesh) in plans."""

    def __init__(
        self,
        submeshes: SubmeshPlans,
        plans: Answers[tuple[int, Mesh], SubmeshPlan | None],
        place: Mapping[tuple[int, Mesh], int],
    ) -> None:
        self._submeshes, self._plans, self._place = submeshes, plans, place

    def on(self, M: int, mesh: Mesh) -> SubmeshPlan | None:
        """The plan for M microbatches on one submesh, asked for ahead or not; None where nothing fits."""
        if (M, mesh) not in self._place:
            return self._submeshes.on(M, mesh)
        plan = self._plans[self._place[M, mesh]]
        self._submeshes.keep(M, mesh, plan)
        return plan

    def leave_out(self, M: int, mesh: Mesh) -> None:
        """Leave out a mesh at M microbatches, as it will not be asked for."""
        self._plans.leave_out([self._place[M, mesh]])


def _first_stage(task: Task, groups: int) -> Setting:
    """The setting of the stage that holds most microbatches: the first of so many groups."""
    in_flight = min(groups, task.setting.microbatches) if task.program.training else 1
    return replace(task.setting, in_flight=float(in_flight))


def _held(task: Task, mesh: Mesh) -> Mesh:
    """The mesh as a stage of the task holds it: with the shares that its rows take."""
    return task.sharing(sharing_rows(mesh, rows_of(task.program), task.options))


def _by_joint(joint: JointSearch, budget: float) -> tuple[StagePlan, Solution] | None:
    """Sharding and recompute chosen together. budget: bytes of all groups, one device each (0: any)."""
    joint.forget_budgets()  # which were asked for before depends on the process that was asked
    point = joint.within(budget or math.inf, _JOINT_CLOSE)
    return None if isinstance(point, Shortage) else (point.plan, solution_of(point, joint.fastest.seconds))


def _by_policy(on: OnMesh, budget: float, policy: str) -> tuple[StagePlan, Solution] | None:
    """The sharding under a recompute policy. budget: bytes of all groups, one device each (0: any)."""
    result = solve_mesh(on, on.options.strategy, budget or None, _CLOSE, policy)
    return None if isinstance(result, Shortage) else (result.plan.stages[0], result.solution)


def _measured(task: Task, short: Shortened, mesh: Mesh, plan: StagePlan, solution: Solution) -> SubmeshPlan:
    """The plan with what every call costs. short: the task's program; what it leaves out costs what stands for it."""
    if any(plan.parameters[name] != plan.parameters[other] for name, other in short.alike):
        short = whole(task.program)
    pricer, M = task.pricers[mesh], task.setting.microbatches
    compression = task.setting.compression
    lowered = lower_stage(short.program, plan, task.pricers, task.rules, M, task.program.training, compression)
    units = measure(short.program, lowered, plan, pricer, task.rules, task.setting).at(short.stands_for)
    return SubmeshPlan(mesh, plan, replace(units, boundary_s=boundaries(task.program, pricer)), solution)


# --- other microbatch counts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlansByCount:
    """Plans on one submesh at one or two microbatch counts, and what they say of others.

    planned: by count. counts: those that are looked at. launched_s: (calls,) seconds that a host needs to launch the kernels of
    a microbatch at the lower one; prologue: calls that there are only with several microbatches.
    """

    planned: Mapping[int, SubmeshPlan]
    counts: tuple[int, ...]
    launched_s: np.ndarray
    prologue: tuple[int, ...] = ()

    def decided(self, M: int) -> SubmeshPlan:
        """The plan that is taken for M microbatches, with its costs at the count that it was made for."""
        return self.planned.get(M, self.planned[max(self.planned)])

    def at(self, M: int) -> SubmeshPlan:
        """The plan with its costs at M microbatches: as it was planned so; between two counts and above them on a line in 1/M;
        below them within what larger microbatches can take; with one count what it takes at least, and a little more."""
        if M in self.planned:
            return self.planned[M]
        low, high = min(self.planned), max(self.planned)
        if low == high:
            return self._with_calls(at_another(self.planned[low], low, self.launched_s, M), low, M)
        at_low = self._with_calls(self.planned[low], low, high)
        costs = between(at_low, low, self.planned[high], high, M)
        if low > M:
            costs = _in_larger_microbatches(costs, at_low, low / M)
        return self._with_calls(costs, high, M)

    def _with_calls(self, plan: SubmeshPlan, count: int, M: int) -> SubmeshPlan:
        """A plan of the program in one number of microbatches with the calls that there are in M."""
        if not self.prologue or (count > 1) == (M > 1):
            return plan
        calls = len(plan.units.forward_s) + (len(self.prologue) if count == 1 else 0)
        kept = np.delete(np.arange(calls), self.prologue)
        if M == 1:
            return replace(plan, units=plan.units.at(kept.tolist()))
        rows = {f.name: np.zeros(calls) for f in fields(Units)}
        for name, row in rows.items():
            row[kept] = getattr(plan.units, name)
        return replace(plan, units=Units(**rows))


def two_counts(counts: Sequence[int]) -> tuple[int, int]:
    """The counts to plan at: a quarter of the way from either end of those of several microbatches, where there are any."""
    several = [M for M in counts if M > 1] or counts
    return several[len(several) // 4], several[(3 * len(several)) // 4]


def at_another(plan: SubmeshPlan, count: int, launched_s: np.ndarray, M: int) -> SubmeshPlan:
    """The plan with what its calls are taken to cost at M microbatches, from one other count: a little more than if they were in
    proportion to a microbatch, but for what a host needs to launch. launched_s: (calls,) of a microbatch."""
    u, scale = plan.units, count / M
    seconds = np.maximum(u.forward_s + u.backward_s + u.weights_s, 1e-30)
    fixed = np.minimum(launched_s / seconds, 1.0)
    share = np.maximum(fixed, scale) if scale < 1 else fixed + (1 - fixed) * scale
    parts = {name: _MORE * share * getattr(u, name) for name in ("forward_s", "backward_s", "weights_s")}
    return replace(plan, units=replace(u, **parts, boundary_s=u.boundary_s * min(scale, 1.0)))


def _in_larger_microbatches(line: SubmeshPlan, small: SubmeshPlan, scale: float) -> SubmeshPlan:
    """A guess about larger microbatches: nothing takes less than in small ones, or more than in proportion. line: what the law
    of other counts says; scale: how many times as large."""
    costs = {f.name: (getattr(line.units, f.name), getattr(small.units, f.name)) for f in fields(Units)}
    units = Units(**{name: np.clip(guess, least, least * scale) for name, (guess, least) in costs.items()})
    return replace(line, units=units)


def between(a: SubmeshPlan, low: int, b: SubmeshPlan, high: int, M: int) -> SubmeshPlan:
    """The plan with the costs of its calls at M microbatches, from two other counts: a fixed part and a part that is
    proportional to 1/M."""
    t = (1 / M - 1 / high) / (1 / low - 1 / high)

    def mix(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(np.maximum(y + t * (x - y), 0.0))

    mixed = {f.name: mix(getattr(a.units, f.name), getattr(b.units, f.name)) for f in fields(Units)}
    return replace(b, units=Units(**mixed))


# --- what the stage DP takes ------------------------------------------------------------------------------------------


def option_of(plan: SubmeshPlan, kinds: list[int], limit: float) -> StageOption:
    """The submesh as the stage DP sees it. kinds: first rank of every kind of device. limit: bytes of one device."""
    u = plan.units
    return StageOption(
        str(plan.mesh),
        plan.mesh.size,
        u.forward_s,
        u.backward_s + u.weights_s,
        u.step_s,
        u.resting_bytes,
        u.held_bytes,
        u.peak_bytes,
        limit,
        kinds.index(plan.mesh.offset),
        u.boundary_s,
        u.weights_s,
    )


def possible_schedules(task: Task) -> list[Schedule]:
    """The schedule that the options name, or those that are tried by default, simple ones first."""
    named = task.options.schedule
    return tried_by_default() if named == "auto" else [schedule_row(named)]


def flight_rule(task: Task, V: int) -> InFlight:
    """The number of microbatches that a cut takes stages to hold at once, with V stages per group."""
    return possible_schedules(task)[0].in_flight(V) if task.program.training else one_at_a_time


def held_apart(task: Task, V: int) -> tuple[bool, InFlight | None]:
    """Whether a cut counts on schedules that have W apart, and what these hold at most (None: as much as fits)."""
    rows = [row for row in possible_schedules(task) if row.splits_backward and row.serves(1)]
    if V > 1 or not rows or not task.program.training:
        return False, None
    return True, None if any(row.timed for row in rows) else rows[-1].in_flight(1)
