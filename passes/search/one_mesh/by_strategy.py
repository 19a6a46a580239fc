"""The solver's plan and the baselines on every candidate mesh, under the recompute policy that the options ask for.

The solver counts bytes that rest and that backward waits for; bytes that live for a moment are known after lowering
only. Where they break the limit, everything is solved again within a budget that is smaller by as much. Whether memory
decided anything is told along with the plans, for that is when recompute, microbatches and offload may give a faster one
(`autopar.passes.search.one_mesh.short_memory`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from autopar.cluster.device import DeviceSpec
from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.passes.account.stage import representatives
from autopar.passes.price.op_seconds import OpSeconds
from autopar.passes.rules.per_axis import taken_by
from autopar.passes.search.by_microbatch import finished as finished_within
from autopar.passes.search.one_mesh.finer import meshes_worth_trying, walked
from autopar.passes.search.task import Task, account_of
from autopar.passes.search.workers import Answers
from autopar.passes.shard.meshes import REPLICA, candidate_meshes
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage
from autopar.passes.shard.solve_mesh import solve_mesh, solve_strategies
from autopar.passes.shard.uneven import by_speed, for_units, rows_of

_BUDGETS = 4
"""Budgets that are tried in turn."""
_MARGIN = 1.02
"""A budget shrinks by a little more than what was too much."""
CLOSE = 1.001
"""A bound may be this much above what the plan takes: conversions that readers share are bounded as often as they are read."""
_FINER = 3
"""Plans on finer meshes that are lowered at most."""
_NEARLY = 1.005
"""Plans on finer meshes are lowered that the solver counts within this of the best one."""
_MEMORY_DECIDED = ("priced memory", "memory row")
"""Methods of a `Solution` that say that the fastest assignment did not fit."""


def search_strategies(task: Task) -> tuple[list[PricedPlan], bool]:
    """The plans of every strategy that the options allow, best first, the first one lowered and within the limit; and whether
    memory is short: nothing fits, or more memory might give a faster plan, as the solver paid for it or found no room."""
    policy = "none" if task.options.recompute == "auto" else task.options.recompute
    first = [*map(task.sharing, candidate_meshes(task.cluster, task.options, rows=rows_of(task.program)))]
    meshes = uneven_too(task, first) if task.layout is None else first
    by_kind = any(representatives(mesh, task.cluster) for mesh in meshes)
    budgets = [dict.fromkeys(meshes, task.limit)]
    if by_kind:  # what fits each kind's own memory comes first
        budgets.insert(0, {mesh: task.budget_at(mesh) for mesh in meshes})
    for _ in range(_BUDGETS + by_kind):
        budget = budgets.pop(0)
        candidates, fell_short = _on_meshes(task, first, budget, policy)
        if not candidates:
            if budgets:
                continue
            break
        plans: list[PricedPlan] = []
        with task.workers.answers(partial(finished_within, task), candidates) as finished:
            short = task.short_bytes(finished[0].plan, account_of(finished[0]))
            if short <= 0:
                plans = _fastest_first(task, candidates, finished)
        if plans:
            plans = _with_finer(task, plans, budget, policy)
            return plans, fell_short or any(_paid_for_memory(task, c) for c in plans)
        if not budgets:
            budgets.append({mesh: nbytes - _MARGIN * short for mesh, nbytes in budget.items()})
            if min(budgets[0].values()) <= 0:
                break
    return [], True


def _fastest_first(
    task: Task, candidates: list[PricedPlan], finished: Answers[PricedPlan, PricedPlan]
) -> list[PricedPlan]:
    """The candidates, of which the first fits, with the fastest one that fits in front: others are lowered where their bound
    is better than the best step so far. finished: the candidates lowered."""
    best, others = finished[0], dict(enumerate(candidates[1:], 1))
    hopeless = {i for i, candidate in others.items() if candidate.step_s >= CLOSE * best.step_s}
    finished.leave_out(hopeless)
    for i in sorted(others.keys() - hopeless):
        if others[i].step_s < CLOSE * best.step_s:
            others[i] = finished[i]
            faster = others[i].step_s < best.step_s
            if faster and task.short_bytes(others[i].plan, account_of(others[i])) <= 0:
                best, others[i] = others[i], best
    return [best, *sorted(others.values(), key=lambda c: (c.step_s, c.solution.memory))]


def _with_finer(task: Task, plans: list[PricedPlan], budget: Mapping[Mesh, float], policy: str) -> list[PricedPlan]:
    """The plans, the first of which fits, with those on finer meshes where these may be faster. budget: bytes by mesh
    that the plans keep to."""
    meshes = meshes_worth_trying(task, plans[0].step_s)
    if not meshes:
        return plans
    per_axis, nbytes = taken_by(plan.plan.stages[0] for plan in plans), min(budget.values())
    finer: list[PricedPlan] = []

    def seconds(mesh: Mesh) -> float:
        try:
            result = solve_mesh(task.on(mesh, per_axis=per_axis), task.options.strategy, nbytes, recompute=policy)
        except (InfeasibleError, ConstraintError):
            return math.inf
        finer.extend([] if isinstance(result, Shortage) else [result])
        return math.inf if isinstance(result, Shortage) else result.solution.cost

    first: dict[Mesh, float] = {}
    for plan in plans:
        mesh = plan.plan.stages[0].mesh
        first[mesh] = min(first.get(mesh, math.inf), plan.solution.cost)
    walked(meshes, first, seconds)
    finer.sort(key=lambda plan: (plan.solution.cost, plan.solution.memory))
    for candidate in finer[:_FINER]:
        best = plans[0]
        if candidate.step_s >= best.step_s or candidate.solution.cost > _NEARLY * finer[0].solution.cost:
            break
        counted = task.finish(candidate)
        if counted.step_s < best.step_s and task.short_bytes(counted.plan, account_of(counted)) <= 0:
            plans = [counted, *plans]
    return plans


def _paid_for_memory(task: Task, candidate: PricedPlan) -> bool:
    """Whether a plan of the strategy that was asked for is slower than it would be in any memory."""
    asked = candidate.plan.origin.startswith(("solver", task.options.strategy))
    return asked and candidate.solution.method in _MEMORY_DECIDED


def _on_meshes(
    task: Task, first: list[Mesh], budgets: Mapping[Mesh, float], policy: str
) -> tuple[list[PricedPlan], bool]:
    """The solver's best plan, then all others by seconds; and whether the strategy that was asked for fell short of the
    budget on a mesh. first: the meshes that are not tried beside others; budgets: bytes by mesh."""
    asked, fell_short = task.options.strategy, False
    looked_for_again = (
        task.program.training and task.options.recompute == "auto"
    )  # where memory decides, with recompute
    candidates: list[PricedPlan] = []

    def solved(mesh: Mesh) -> list[PricedPlan | Shortage | InfeasibleError | ConstraintError]:
        strategies = _strategies(asked, mesh, task.layout is not None)
        return solve_strategies(task.on(mesh), strategies, budgets[mesh], policy, looked_for_again)

    without_choice: list[InfeasibleError | ConstraintError] = []
    with task.workers.answers(solved, budgets) as answers:
        for mesh, of_mesh in zip(budgets, answers, strict=True):
            for strategy, result in zip(_strategies(asked, mesh, task.layout is not None), of_mesh, strict=True):
                if isinstance(result, Shortage):
                    fell_short = fell_short or strategy == asked
                elif isinstance(result, PricedPlan):
                    candidates.append(result)
                elif strategy == asked and (mesh in first or isinstance(result, InfeasibleError)):
                    without_choice.append(result)
    if without_choice and not candidates and not fell_short:
        raise without_choice[-1]
    candidates.sort(key=lambda c: (c.solution.cost, c.solution.memory))
    if not candidates:
        return [], fell_short
    best = next((c for c in candidates if c.plan.origin.startswith("solver")), candidates[0])
    return [best, *(c for c in candidates if c is not best)], fell_short


def uneven_too(task: Task, meshes: list[Mesh]) -> list[Mesh]:
    """The meshes, and those with shares by the speed of devices, or for heads and vocabularies that do not divide."""
    other = [for_units(mesh, task.program, task.rules) for mesh in meshes]
    if not task.cluster.homogeneous_devices:
        seconds = {device: computed_s(task, device) for _, device in task.cluster.devices}
        rows = rows_of(task.program)
        other += [by_speed(mesh, rows, task.cluster, seconds) for mesh in meshes]
    return [*meshes, *(mesh for mesh in other if mesh is not None)]


def computed_s(task: Task, device: DeviceSpec) -> float:
    """Seconds of all ops of a program on one device of a kind."""
    alone, total = Mesh.of(dp=1), 0.0
    for name, template in task.program.templates.items():
        for call in template.op_calls.values():
            rule = task.rules.rule(call)
            seconds = OpSeconds(call, rule, device, task.pricers.software)
            whole_s = seconds.on_block(dict.fromkeys(rule.factors, 1), ("",), alone)
            total += task.program.multiplicity.get(name, 0) * whole_s
    return total


def _strategies(asked: str, mesh: Mesh, laid_out: bool) -> list[str]:
    """The strategy that was asked for; where the choice is free, the baselines that this mesh can have as well."""
    if asked != "auto" or laid_out or REPLICA in mesh.names:
        return [asked]
    return ["auto", *{1: ("dp", "zero3"), 2: ("megatron",)}.get(len(mesh.axes), ())]
