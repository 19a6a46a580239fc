"""The best plan of a program on one mesh: its factor graph under a strategy, a recompute policy and constraints, solved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.costmodel.bill import cluster_nodes, least_step_s
from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.options import MEGATRON, Options
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.policies import policy_set
from autopar.passes.shard.allowed import allowed_states
from autopar.passes.shard.baselines import Baseline
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.plans import spmd_plan
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.solve import Shortage, Solution, solve
from autopar.plan import ParameterPlan, StagePlan

_MOST_NAMED = 3
"""Parameters that an origin names."""


@dataclass(frozen=True)
class OnMesh:
    """A program on one mesh (the pricer's), and all that its sharding problem depends on. stored: parameters whose storage is
    given, by name. room_bytes: what a rank may hold at any moment."""

    program: Program
    pricer: Pricer
    rules: RuleBook
    setting: Setting
    options: Options
    stored: Mapping[str, ParameterPlan] = field(default_factory=dict)
    room_bytes: float = math.inf


def build_problem(on: OnMesh, strategy: str, recompute: str | Mapping[str, tuple[str, ...]] = "none") -> Problem:
    """The factor graph under a strategy, a recompute policy (or sets of values per template) and the user's constraints.
    Raises ConstraintError or InfeasibleError where these leave no choice."""
    program, constraints = on.program, on.options.constraints
    allowed = allowed_states(program, on.pricer.mesh, on.rules, strategy, constraints, on.stored)
    if isinstance(recompute, str):
        again = {name: policy_set(t, recompute) for name, t in program.templates.items()} if program.training else {}
    else:
        again = dict(recompute)
    try:
        return Problem(program, on.pricer, on.rules, on.setting, allowed, None, again, on.stored, on.room_bytes)
    except InfeasibleError as error:
        asked = [f"strategy {strategy!r}"] if strategy != "auto" else []
        asked += [f"constraints {dict(constraints)}"] if constraints else []
        asked += ["how the program's own step stores parameters"] if on.stored and asked else []
        if not asked:
            raise
        change = f"{'another strategy, ' if strategy != 'auto' else ''}{'looser constraints, ' if constraints else ''}"
        text = f"{error}: {' and '.join(asked)} cannot be met there; take {change}or another mesh"
        raise (ConstraintError if constraints else InfeasibleError)(text) from error


def solve_mesh(
    on: OnMesh, strategy: str, budget: float | None, close: float = 1e-4, recompute: str = "none"
) -> PricedPlan | Shortage:
    """The best plan under a strategy within so many bytes (None: any), or how much memory it falls short.

    close: as in `solve`. recompute: the policy that backward follows (`autopar.passes.rules.policies`).
    """
    return _solved(on, build_problem(on, strategy, recompute), strategy, budget, close)


def solve_strategies(
    on: OnMesh, strategies: Sequence[str], budget: float | None, recompute: str = "none", by_price_alone: bool = False
) -> list[PricedPlan | Shortage | InfeasibleError | ConstraintError]:
    """The same under every strategy, or why it leaves no choice. The problem is built once: a baseline is that of "auto", where
    this is the first, with fewer states. by_price_alone: as of `solve`."""
    answers: list[PricedPlan | Shortage | InfeasibleError | ConstraintError] = []
    every: Problem | None = None
    for strategy in strategies:
        try:
            if every is None or strategy == "auto":
                problem = build_problem(on, strategy, recompute)
                every = problem if strategy == "auto" else None
            else:
                problem = every.restricted(Baseline(strategy, on.program, on.pricer.mesh, on.rules).allows)
            answers.append(_solved(on, problem, strategy, budget, by_price_alone=by_price_alone))
        except (InfeasibleError, ConstraintError) as error:
            answers.append(error)
    return answers


def _solved(
    on: OnMesh, problem: Problem, strategy: str, budget: float | None, close: float = 1e-4, by_price_alone: bool = False
) -> PricedPlan | Shortage:
    """The best plan of a problem under a strategy; as of `solve_mesh`. by_price_alone: as of `solve`."""
    limit_s, tie_price = on.options.solver_time_limit_s, 0.02 * on.pricer.copy_s
    solution = solve(problem.graph, budget, limit_s, tie_price, close, by_price_alone)
    if isinstance(solution, Shortage):
        return solution
    plan = spmd_plan(problem, list(solution.choice), on.pricer.cluster, on.options, _origin(strategy, solution))
    if strategy in MEGATRON:
        plan = replace(plan, origin=plan.origin + _whole_over_last_axis(plan.stages[0]))
    bound_s = least_step_s(solution.cost, cluster_nodes(on.pricer.cluster), on.pricer.software)
    return PricedPlan(replace(plan, predicted={"step_time_s": bound_s}), solution)


def _origin(strategy: str, solution: Solution) -> str:
    return ("solver" if strategy == "auto" else strategy) + (" (greedy)" if solution.method == "greedy" else "")


def _whole_over_last_axis(stage: StagePlan) -> str:
    """The parameters of two dims and more that every rank of the last axis holds whole, for people."""
    axis, size = stage.mesh.axes[-1]
    stored = {name: parameter.storage for name, parameter in stage.parameters.items()}
    whole = [name for name, spec in stored.items() if len(spec.dims) > 1 and axis not in spec.axes]
    if size == 1 or not whole:
        return ""
    return f" (whole over {axis}: {', '.join(whole[:_MOST_NAMED])}{', …' if len(whole) > _MOST_NAMED else ''})"
