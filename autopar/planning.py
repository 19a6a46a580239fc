"""From a captured program to the plans worth having: SPMD plans on every candidate mesh, baselines, replays.

What the solver counts is what rests and what backward waits for; what lives for a moment is known after lowering. Where
that breaks the limit, the solver gets a budget smaller by as much. Where memory is short (something does not fit, or
the solver paid for memory), plans that recompute are looked for as well (`autopar.recomputing`), and the faster is taken.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.errors import ConstraintError, InfeasibleError, PlanError
from autopar.inputs import check_plan
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.options import Options
from autopar.passes.account import Account, account
from autopar.passes.costs import Pricers
from autopar.passes.lower import lower
from autopar.passes.recompute.policies import POLICIES
from autopar.passes.shard.planner import Candidate, candidate_meshes, solve_mesh
from autopar.passes.shard.problem import Setting
from autopar.passes.shard.replay import evaluate
from autopar.passes.shard.rules import RuleBook
from autopar.passes.shard.solve import Shortage
from autopar.plan import Plan
from autopar.recomputing import fitted
from autopar.report import size_text


@dataclass
class Task:
    """One compilation: what every planner needs. lowering_s: seconds spent lowering so far."""

    program: Program
    cluster: ClusterSpec
    rules: RuleBook
    setting: Setting
    options: Options
    pricers: Pricers = field(init=False)
    lowering_s: float = 0.0

    def __post_init__(self) -> None:
        self.pricers = Pricers(self.cluster)

    @cached_property
    def limit(self) -> float:
        """Bytes a plan may use on every rank."""
        firsts = accumulate((count for count, _ in self.cluster.devices), initial=0)
        return min(self.limit_at(rank) for rank in list(firsts)[:-1])

    def limit_at(self, rank: int) -> float:
        """Bytes a plan may use on a rank."""
        if self.options.memory_bytes is not None:
            return float(self.options.memory_bytes)
        return self.cluster.device(rank).memory_bytes * self.options.memory_fraction

    def smaller(self, program: Program, microbatches: int) -> Task:
        """The same compilation for one of so many microbatches; prices are shared."""
        task = Task(program, self.cluster, self.rules, replace(self.setting, microbatches=microbatches), self.options)
        task.pricers = self.pricers
        return task

    def finish(self, candidate: Candidate) -> Candidate:
        """The candidate lowered and accounted for."""
        if candidate.lowered is not None:
            return candidate
        started = time.perf_counter()
        lowered = lower(self.program, candidate.plan, self.pricers, self.rules)
        counted = account(
            lowered, candidate.plan.stages, self.program.templates, self.pricers, self.setting, self.rules
        )
        self.lowering_s += time.perf_counter() - started
        return replace(candidate, lowered=lowered, account=counted)


Short = tuple[str, Mesh, Shortage]
PAID = ("priced memory", "memory row")  # how the solver says that memory decided


def search_spmd(task: Task) -> tuple[list[Candidate], list[Short]]:
    """Plans without a pipeline, best first, the first one lowered and within the limit; and what did not fit."""
    wanted = task.options.recompute
    candidates, shortages = _within(task, "none" if wanted == "auto" else wanted)
    if wanted != "auto" or not task.program.training or not _memory_is_short(task, candidates, shortages):
        return candidates, shortages
    others = recomputing(task)
    if others and (not candidates or others[0].solution.cost < candidates[0].solution.cost):
        return [*others, *candidates], shortages
    return [*candidates, *others], shortages


def _memory_is_short(task: Task, candidates: list[Candidate], shortages: list[Short]) -> bool:
    """Whether more memory might give a faster plan: something did not fit, or was paid for."""
    mine = "auto" if task.options.strategy == "auto" else task.options.strategy
    paid = any(c.solution.method in PAID and c.plan.origin.startswith(("solver", mine)) for c in candidates)
    return not candidates or paid or any(strategy == mine for strategy, _, _ in shortages)


def recomputing(task: Task) -> list[Candidate]:
    """Plans within the limit that recompute, best first, lowered.

    On every mesh the sharding is chosen with memory left out, and within memory under each policy; then each of these is
    given as little recompute as makes it fit.
    """
    found: list[Candidate] = []
    for mesh in candidate_meshes(task.cluster, task.options):
        for policy in POLICIES:
            made = _recomputing(task, mesh, policy)
            if made is not None:
                found.append(made)
    found.sort(key=lambda c: (c.solution.cost, c.solution.memory))
    return [c for i, c in enumerate(found) if all(c.plan.stages != other.plan.stages for other in found[:i])]


def _recomputing(task: Task, mesh: Mesh, policy: str) -> Candidate | None:
    """A plan on a mesh that fits, sharded under a policy (none: with memory left out), recomputing what it must."""
    budget = None if policy == "none" else task.limit
    for _ in range(3):
        try:
            start = solve_mesh(
                task.program, task.cluster, task.pricers[mesh], task.rules, task.setting, task.options,
                task.options.strategy, budget, recompute=policy,
            )  # fmt: skip
        except (InfeasibleError, ConstraintError):
            return None
        if isinstance(start, Shortage):
            return None

        def judge(plan: Plan, start: Candidate = start) -> Account:
            done = task.finish(replace(start, plan=plan))
            assert done.account is not None
            return done.account

        made = fitted(task.program, start.plan, [(0,)], task.limit, judge, task.pricers, task.rules)
        if not isinstance(made, float):
            plan, _ = made
            counted = evaluate(task.program, plan, task.pricers, task.rules, task.setting)
            solution = replace(
                start.solution, cost=counted.cost, memory=counted.memory, bound=min(start.solution.bound, counted.cost),
                method=f"{start.solution.method}, then recompute",
            )  # fmt: skip
            return task.finish(Candidate(replace(plan, predicted={"step_time_s": counted.cost}), solution))
        if budget is None:
            return None
        budget -= 1.02 * (made - task.limit)
        if budget <= 0:
            return None
    return None


def _within(task: Task, policy: str) -> tuple[list[Candidate], list[Short]]:
    """The solver's plans under one recompute policy, the first lowered and within the limit; and what did not fit."""
    budget = task.limit
    for _ in range(4):
        candidates, shortages = _on_meshes(task, budget, policy)
        beside = task.limit - budget  # what lives for a moment
        shortages = [(s, mesh, replace(short, least_bytes=short.least_bytes + beside)) for s, mesh, short in shortages]
        if not candidates:
            return candidates, shortages
        best = task.finish(candidates[0])
        assert best.account is not None
        peak = best.account.peak_bytes
        if peak <= task.limit:
            return [best, *candidates[1:]], shortages
        budget -= 1.02 * (peak - task.limit)
        if budget <= 0:
            break
    return [], [(best.plan.origin, best.plan.stages[0].mesh, Shortage(peak, best.solution.choice)), *shortages]


def _on_meshes(task: Task, budget: float, policy: str) -> tuple[list[Candidate], list[Short]]:
    """The solver on every candidate mesh, and the baselines."""
    options = task.options
    found: list[Candidate] = []
    short: list[Short] = []
    for mesh in candidate_meshes(task.cluster, options):
        strategies = ["auto"] if options.strategy == "auto" else [options.strategy]
        if options.strategy == "auto":
            strategies += ["dp", "zero3"] if len(mesh.axes) == 1 else ["megatron"] if len(mesh.axes) == 2 else []
        for strategy in strategies:
            try:
                result = solve_mesh(
                    task.program, task.cluster, task.pricers[mesh], task.rules, task.setting, options, strategy, budget,
                    recompute=policy,
                )  # fmt: skip
            except (InfeasibleError, ConstraintError):
                if strategy == options.strategy:
                    raise
                continue
            if isinstance(result, Shortage):
                short.append((strategy, mesh, result))
            else:
                found.append(result)
    found.sort(key=lambda c: (c.solution.cost, c.solution.memory))
    best = [c for c in found if c.plan.origin.startswith("solver")] or found
    others = [c for c in found if c is not best[0]] if best else []
    return ([best[0], *others] if best else []), short


def replayed(task: Task, plan: Plan) -> Candidate:
    """A given plan, priced. Raises PlanError when it is for another model, cluster or batch."""
    cluster = task.cluster
    if plan.ranks != cluster.size:
        raise PlanError(
            f"this plan is for {plan.ranks} ranks, the cluster has {cluster.size}; compile again without plan="
        )
    if plan.cluster != cluster.fingerprint():
        raise PlanError(
            f"this plan is for another cluster (plan {plan.cluster}, given {cluster.fingerprint()}): devices or links differ; "
            f"compile again without plan=, or, to run it here all the same, write {cluster.fingerprint()!r} as the plan's cluster"
        )
    if plan.program != task.program.fingerprint:
        raise PlanError(
            f"this plan is for another model (plan {plan.program}, model {task.program.fingerprint}): the model, its shapes or "
            "the example inputs changed; compile again without plan="
        )
    check_plan(plan, task.program)
    solution = evaluate(task.program, plan, task.pricers, task.rules, task.setting)
    return Candidate(replace(plan, predicted={"step_time_s": solution.cost}), solution)


def infeasible(task: Task, shortages: list[Any]) -> str:
    """What is short, by how much, what would fit."""
    limit = task.limit
    if not shortages:
        return "no plan exists on this cluster"
    strategy, mesh, least = min(shortages, key=lambda s: s[2].least_bytes)
    total = sum(p.type.nbytes for p in task.program.parameters.values())
    need = least.least_bytes
    ranks = task.cluster.size
    fit = ranks
    while need * ranks / fit > limit and fit < ranks * 1024:
        fit *= 2
    return (
        f"nothing fits in {size_text(limit)} per rank: the smallest plan ({strategy} on {mesh}) needs {size_text(need)}, "
        f"{size_text(need - limit)} too much (parameters {size_text(total)} in all, with gradients and optimizer state "
        f"{size_text(total * (2 + task.setting.state_ratio))}). About {fit} such ranks, a smaller batch, or "
        f"{size_text(need)} per rank would do"
    )
