"""From a captured program to the plans worth having: SPMD plans on every candidate mesh, baselines, replays.

What the solver counts is what rests and what backward waits for; what lives for a moment is known after lowering. Where
that breaks the limit, the solver gets a budget smaller by as much. Where memory is short (something does not fit, or
the solver paid for memory), plans that recompute or accumulate are looked for as well (`autopar.passes.search.short_memory`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from autopar.cluster import ClusterSpec
from autopar.errors import ConstraintError, InfeasibleError, PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.options import Options
from autopar.passes.account.program import account
from autopar.passes.lower import lower
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.book import RuleBook
from autopar.passes.shard.evaluate import evaluate
from autopar.passes.shard.meshes import candidate_meshes
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage
from autopar.passes.shard.solve_mesh import OnMesh, solve_mesh
from autopar.plan import Plan
from autopar.request import check_plan


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

    def offloading(self, kinds: frozenset[str]) -> Task:
        """The same compilation with these kinds of bytes in memory tiers (`autopar.passes.shard.offload`)."""
        if kinds == self.setting.offload:
            return self
        task = Task(self.program, self.cluster, self.rules, replace(self.setting, offload=kinds), self.options)
        task.pricers = self.pricers
        return task

    def finish(self, candidate: PricedPlan) -> PricedPlan:
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


def search_spmd(task: Task) -> tuple[list[PricedPlan], list[Short]]:
    """Plans without a pipeline, best first, the first one lowered and within the limit; and what did not fit.

    They recompute what the options' policy says ("auto": nothing; `short_memory` is for where that is too little).
    """
    wanted = task.options.recompute
    return _within(task, "none" if wanted == "auto" else wanted)


def memory_is_short(task: Task, candidates: list[PricedPlan], shortages: list[Short]) -> bool:
    """Whether more memory might give a faster plan: something did not fit, or was paid for."""
    mine = "auto" if task.options.strategy == "auto" else task.options.strategy
    paid = any(c.solution.method in PAID and c.plan.origin.startswith(("solver", mine)) for c in candidates)
    return not candidates or paid or any(strategy == mine for strategy, _, _ in shortages)


def _within(task: Task, policy: str) -> tuple[list[PricedPlan], list[Short]]:
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


def _on_meshes(task: Task, budget: float, policy: str) -> tuple[list[PricedPlan], list[Short]]:
    """The solver on every candidate mesh, and the baselines."""
    options = task.options
    found: list[PricedPlan] = []
    short: list[Short] = []
    for mesh in candidate_meshes(task.cluster, options):
        strategies = ["auto"] if options.strategy == "auto" else [options.strategy]
        if options.strategy == "auto":
            strategies += ["dp", "zero3"] if len(mesh.axes) == 1 else ["megatron"] if len(mesh.axes) == 2 else []
        for strategy in strategies:
            try:
                on = OnMesh(task.program, task.pricers[mesh], task.rules, task.setting, options)
                result = solve_mesh(on, strategy, budget, recompute=policy)
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


def replayed(task: Task, plan: Plan) -> PricedPlan:
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
    return PricedPlan(replace(plan, predicted={"step_time_s": solution.cost}), solution)
