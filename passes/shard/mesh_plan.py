"""From a program and a cluster to Plans: candidate meshes, the solver on each, baselines, constraints.

Baselines are the same problem with fewer choices allowed (pure data parallel: parameters whole, ops split by the batch
alone; ZeRO-3: the same with parameters stored sharded as far as they divide; Megatron: sharded over one axis), so the
unrestricted optimum on the same mesh is never predicted worse.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.errors import ConstraintError, InfeasibleError, ShardingError
from autopar.ir.lowered import LoweredProgram
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.ir.spec import Spec, parse_spec
from autopar.options import Options
from autopar.passes.account.program import Account
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.policies import policy_set
from autopar.passes.rules.structure import parameter_groups
from autopar.passes.shard.batch import batch_factors
from autopar.passes.shard.graph import Key
from autopar.passes.shard.offload import offloaded
from autopar.passes.shard.problem import Allowed, Problem
from autopar.passes.shard.solve import Shortage, Solution, solve
from autopar.plan import ParameterPlan, Plan, StagePlan, TemplatePlan


@dataclass(frozen=True)
class Candidate:
    """A plan with what the solver said of it; `lowered` and `account` where it was lowered already, to see its peak."""

    plan: Plan
    solution: Solution
    lowered: LoweredProgram | None = None
    account: Account | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step; once lowered with the transfers to memory tiers that it really waits for."""
        if self.account is not None and len(self.plan.stages) == 1 and self.account.stages[0].moves:
            return self.account.step_time_s
        return self.solution.cost


def candidate_meshes(cluster: ClusterSpec, options: Options, ranks: int | None = None) -> list[Mesh]:
    """The forced mesh, or: one axis over all ranks, and two axes with the inner one inside the fast links.

    ranks: of a stage of a pipeline (default: the whole cluster).
    """
    ranks = cluster.size if ranks is None else ranks
    forced = options.forced_mesh(ranks, cluster.size)
    if forced is not None:
        return [forced]
    meshes = [Mesh.of(dp=ranks)]
    fast = cluster.levels[0].group_size if cluster.levels else ranks
    inner = sorted({k for k in (2, 4, 8, fast) if 1 < k < ranks and ranks % k == 0 and k <= fast}, reverse=True)
    for k in inner[:3]:
        meshes.append(Mesh.of(dp=ranks // k, tp=k))
    return meshes


def baseline_filter(strategy: str, program: Program, mesh: Mesh, rules: RuleBook) -> Allowed | None:
    """Which parameter states and which op strategies a baseline allows."""
    if strategy == "auto":
        return None
    last = mesh.names[-1]
    batch = batch_factors(program, rules) if strategy in ("dp", "zero1", "zero3") else None

    def sharded_axes(spec: Spec) -> set[str]:
        return {a for dim in spec.dims for a in dim}

    def most(name: str) -> int:
        shape = program.parameters[name].type.shape
        return max((size for _, size in mesh.axes for n in shape if n % size == 0), default=1)

    def allowed(key: Key, state: Any) -> bool:
        if key[0] == "op" and batch is not None:
            return all(not choice or choice[0] == "~" or choice in batch[key[1], key[2]] for choice in state)
        if key[0] != "param":
            return True
        storage, optimizer = state
        if strategy == "dp":
            return storage.is_replicated and optimizer.is_replicated
        if strategy == "megatron":
            return sharded_axes(storage) <= {last} and optimizer == storage
        shape = program.parameters[key[1]].type.shape
        divides = any(n % mesh.size == 0 and n >= mesh.size for n in shape)
        full = Spec.shards
        parts = max((full(optimizer, mesh, i) for i in range(len(shape))), default=1)
        trained = any(n in program.trained for n in (key[1],))
        if strategy == "zero1":
            return storage.is_replicated and (not divides or not trained or parts == mesh.size)
        return storage == optimizer and (not divides or parts == mesh.size)

    return allowed


def constraint_filter(program: Program, mesh: Mesh, constraints: Any) -> Allowed | None:
    """Pins by name pattern. Raises ConstraintError for patterns that match nothing and specs that cannot be."""
    if not constraints:
        return None
    pins: dict[Key, Spec] = {}
    for pattern, text in constraints.items():
        try:
            spec = parse_spec(text)
        except ShardingError as error:
            raise ConstraintError(f"constraint {pattern!r}: {error}") from error
        unknown = spec.axes - set(mesh.names)
        if unknown:
            raise ConstraintError(
                f"constraint {pattern!r} uses axis {', '.join(sorted(unknown))}, the mesh is {mesh}; name its axes or set "
                "Options.mesh"
            )
        matched = False
        for key, shape in _named(program):
            if fnmatch.fnmatchcase(key[1] if key[0] == "param" else f"{key[1]}.{key[2]}", pattern):
                matched = True
                if len(shape) != len(spec.dims) or not spec.divides(shape, mesh):
                    raise ConstraintError(
                        f"constraint {pattern!r}: {text} does not fit {key[-1]} of shape {shape} on mesh {mesh}: it needs one "
                        "entry per dim, and every sharded dim must divide by its axes; shard another dim or take another mesh"
                    )
                pins[key] = spec
        if not matched:
            names = ", ".join(list(program.parameters)[:4])
            raise ConstraintError(
                f"constraint pattern {pattern!r} matches no parameter and no value; parameters are {names}, …"
            )

    def allowed(key: Key, state: Any) -> bool:
        if key[0] == "param":
            return key not in pins or state[0] == pins[key]
        return True

    def value_pin(key: Key, state: Any) -> bool:
        pin = pins.get((key[0], key[1], key[2].split("@")[0])) if key[0] == "at" else None
        return pin is None or state == pin

    return lambda key, state: allowed(key, state) and value_pin(key, state)


def _named(program: Program) -> Iterator[tuple[Key, tuple[int, ...]]]:
    for name, parameter in program.parameters.items():
        yield ("param", name), parameter.type.shape
    for template in program.templates.values():
        for value in template.consumers:
            if value not in template.params:
                yield ("at", template.name, value), template.type_of(value).shape


def build_problem(
    program: Program,
    pricer: Pricer,
    rules: RuleBook,
    setting: Setting,
    options: Options,
    strategy: str,
    recompute: str | Mapping[str, tuple[str, ...]] = "none",
) -> Problem:
    """The factor graph of a mesh under a strategy, a recompute policy (or sets of values) and the user's constraints."""
    filters = [
        f
        for f in (
            baseline_filter(strategy, program, pricer.mesh, rules),
            _by_group(program, constraint_filter(program, pricer.mesh, options.constraints)),
        )
        if f is not None
    ]
    allowed = (lambda key, state: all(f(key, state) for f in filters)) if filters else None
    if isinstance(recompute, str):
        again = {name: policy_set(t, recompute) for name, t in program.templates.items()} if program.training else {}
    else:
        again = dict(recompute)
    try:
        return Problem(program, pricer, rules, setting, allowed, recompute=again)
    except InfeasibleError as error:
        if options.constraints:
            raise ConstraintError(f"{error} (constraints: {dict(options.constraints)})") from error
        raise


def _by_group(program: Program, f: Allowed | None) -> Allowed | None:
    """Pins of any member of a parameter group apply to the group's variable (named by its first member)."""
    if f is None:
        return None
    groups = parameter_groups(program)

    def allowed(key: Key, state: Any) -> bool:
        if key[0] == "param":
            return all(f(("param", n), state) for n in groups[key[1]].names)
        return f(key, state)

    return allowed


def solve_mesh(
    program: Program,
    cluster: ClusterSpec,
    pricer: Pricer,
    rules: RuleBook,
    setting: Setting,
    options: Options,
    strategy: str,
    budget: float | None,
    close: float = 1e-4,
    recompute: str = "none",
) -> Candidate | Shortage:
    """Best plan on one mesh under a strategy, or how much memory it falls short. close: as in `solve`. recompute: the
    policy that backward follows (`autopar.passes.rules.policies`)."""
    problem = build_problem(program, pricer, rules, setting, options, strategy, recompute)
    solution = solve(problem.graph, budget, options.solver_time_limit_s, 0.02 * pricer.copy_s, close)
    if isinstance(solution, Shortage):
        return solution
    origin = "solver" if strategy == "auto" else strategy
    if solution.method == "greedy":
        origin += " (greedy)"
    plan = extract(problem, list(solution.choice), cluster, options, origin)
    return Candidate(replace(plan, predicted={"step_time_s": solution.cost}), solution)


def extract(problem: Problem, choice: list[int], cluster: ClusterSpec, options: Options, origin: str) -> Plan:
    """The Plan without a pipeline that an assignment means."""
    program, stage = problem.program, stage_plan(problem, choice, (0, len(problem.program.calls)))
    return Plan(
        program.fingerprint,
        cluster.fingerprint(),
        problem.mesh.size,
        (stage,),
        options.microbatches or 1,
        origin=origin,
    )


def stage_plan(problem: Problem, choice: list[int], calls: tuple[int, int]) -> StagePlan:
    """What an assignment means for a stage."""
    graph, program = problem.graph, problem.program
    templates = {name: TemplatePlan({}, {}, problem.recompute.get(name, ())) for name in program.templates}
    parameters: dict[str, ParameterPlan] = {}
    for key, states, s in zip(graph.keys, graph.states, choice, strict=True):
        state = states[s]
        if key[0] == "op":
            templates[key[1]].strategies[key[2]] = state
        elif key[0] == "at":
            templates[key[1]].specs[key[2]] = state
        else:
            for name in problem.groups[key[1]].names:
                parameters[name] = ParameterPlan(*state)
    stage = StagePlan(calls, problem.mesh, templates, {name: parameters[name] for name in program.parameters})
    return offloaded(program, stage, problem.pricer.device, problem.setting)
