"""What a cut into stages is made of: ways to run the whole program on one submesh, microbatch counts, boundaries.

A *way* is the program planned for one submesh shape as if all of it ran there, with what every call costs so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster import ClusterSpec
from autopar.errors import InfeasibleError, InputError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, resolve
from autopar.ir.schedules import InFlight, Schedule, one_at_a_time
from autopar.ir.setting import Setting
from autopar.passes.account.calls import Units, measure
from autopar.passes.batch.microbatch import in_microbatches
from autopar.passes.batch.rebatch import NoRebatch, rebatch
from autopar.passes.lower.cut import cut_points
from autopar.passes.lower.stage import lower_stage
from autopar.passes.rules.hubs import flow
from autopar.passes.rules.policies import policy_set
from autopar.passes.rules.replay import replay
from autopar.passes.rules.structure import shows_held
from autopar.passes.schedule import schedule_row, tried_by_default
from autopar.passes.search.joint import Joint
from autopar.passes.search.spmd import Task
from autopar.passes.search.within_memory import solution_of
from autopar.passes.shard.mesh_plan import solve_mesh
from autopar.passes.shard.solve import Shortage, Solution
from autopar.passes.stage import StageOption
from autopar.plan import StagePlan

MOST_GROUPS = 64
Capture = Callable[[int], Task]


@dataclass(frozen=True)
class Way:
    """One submesh shape with a plan of the whole program on it, and what every call costs so."""

    mesh: Mesh
    plan: StagePlan
    units: Units
    solution: Solution


def boundary_calls(program: Program, paths: Sequence[str]) -> tuple[int, ...]:
    """First calls of stages that start at these module paths. Raises InputError for paths that no call starts at."""
    points = cut_points(program)
    found = []
    for path in paths:
        first = next((i for i, c in enumerate(program.calls) if (c.start + ".").startswith(path + ".")), 0)
        if first not in points:
            known = dict.fromkeys(c.path.split("@")[0] or c.start for i, c in enumerate(program.calls) if i in points)
            raise InputError(
                f"Options.stage_boundaries: no stage can start at {path!r}; the places are "
                f"{', '.join(k for k in known if k) or 'none'}"
            )
        found.append(first)
    if found != sorted(set(found)):
        raise InputError(f"Options.stage_boundaries must be in the model's order and differ; they are {list(paths)}")
    return tuple(found)


def microbatch_counts(task: Task, batch: int) -> list[int]:
    """Counts to try: the forced one, or divisors of the batch, at most one per doubling."""
    if task.options.microbatches is not None:
        return [task.options.microbatches]
    most = min(batch, 16 * (task.options.pp or min(task.cluster.size, MOST_GROUPS)))
    found: list[int] = []
    for m in (d for d in range(2, most + 1) if batch % d == 0):
        if not found or m >= 2 * found[-1]:
            found.append(m)
    return found or [1]


def derived(task: Task, M: int, recapture: Capture) -> Task | None:
    """The task for M microbatches, for pricing: derived from the whole batch's program where that is possible."""
    if task.options.microbatches is not None or M == 1:
        return task
    try:
        program = in_microbatches(rebatch(task.program, M, task.rules), task.rules, task.program)
    except NoRebatch:
        try:
            return recapture(M) if task.options.pp or task.options.stage_boundaries else None
        except InputError:
            return None
    return task.smaller(program, M)


def between(a: Way, low: int, b: Way, high: int, M: int) -> Way:
    """What calls cost at M microbatches, from two other counts: a fixed part and a part that is proportional to 1/M."""
    if low == high or high == M:
        return b
    if low == M:
        return a
    t = (1 / M - 1 / high) / (1 / low - 1 / high)

    def mix(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.maximum(y + t * (x - y), 0.0)

    rows = {name: mix(getattr(a.units, name), getattr(b.units, name)) for name in Units.__dataclass_fields__}
    return replace(b, units=Units(**rows))


def device_kinds(cluster: ClusterSpec) -> list[int]:
    """First rank of every run of equal devices."""
    firsts: list[int] = []
    rank = 0
    for count, device in cluster.devices:
        if not firsts or device != cluster.device(rank - 1):
            firsts.append(rank)
        rank += count
    return firsts


def least_bytes(task: Task) -> tuple[float, float]:
    """Bytes of parameters, gradients and optimizer state, and of what one microbatch holds for backward, on one device
    (what rests in memory tiers apart)."""
    program, setting = task.program, task.setting
    away = setting.offload
    resting = 0.0 if "parameters" in away else float(sum(p.type.nbytes for p in program.parameters.values()))
    for name in program.trained:
        type_ = program.parameters[name].type
        resting += 0.0 if "parameters" in away else type_.nbytes
        state = type_.numel * setting.state_ratio * max(setting.state_bytes, type_.dtype.itemsize)
        resting += 0.0 if "optimizer" in away else state
    held = 0.0
    policy = {"auto": "full"}.get(task.options.recompute, task.options.recompute)
    for name, times in program.multiplicity.items():
        template = program.templates[name]
        late = set(replay(template, flow(template), policy_set(template, policy)).kept)
        held_too = {*late, *template.params}
        shown = {v for v in late if shows_held(template, resolve(template.nodes[v])[0], held_too)}
        held += times * sum(template.type_of(v).nbytes for v in late - shown)
    return resting, held if program.training and "activations" not in away else 0.0


def flying(task: Task, pp: int) -> Setting:
    """The setting of the stage that holds most: the first of so many."""
    return replace(task.setting, in_flight=float(min(pp, task.setting.microbatches)) if task.program.training else 1.0)


def plan_way(task: Task, mesh: Mesh, budget: float, pp: int, policy: str, joint: Joint | None = None) -> Way | None:
    """The whole program planned for one submesh. budget: bytes of pp such submeshes, a device each (0: any). policy: of
    recompute. joint: choose recompute together with the sharding instead."""
    pricer = task.pricers[mesh]
    try:
        if joint is not None:
            point = joint.within(budget or math.inf, 0.02)
            if isinstance(point, Shortage):
                return None
            plan, solution = point.plan, solution_of(point, joint.free.seconds)
        else:
            result = solve_mesh(
                task.program,
                task.cluster,
                pricer,
                task.rules,
                flying(task, pp),
                task.options,
                task.options.strategy,
                budget or None,
                0.01,
                policy,
            )
            if isinstance(result, Shortage):
                return None
            plan, solution = result.plan.stages[0], result.solution
    except InfeasibleError:
        return None
    lowered = lower_stage(
        task.program, plan, task.pricers, task.rules, task.setting.microbatches, task.program.training
    )
    return Way(mesh, plan, measure(task.program, lowered, plan, pricer, task.rules, task.setting), solution)


def option_of(way: Way, kinds: list[int], limit: float) -> StageOption:
    u = way.units
    return StageOption(
        str(way.mesh),
        way.mesh.size,
        u.forward_s,
        u.backward_s + u.weights_s,
        u.step_s,
        u.resting_bytes,
        u.held_bytes,
        u.peak_bytes,
        limit,
        kinds.index(way.mesh.offset),
        u.boundary_s,
    )


def possible_schedules(task: Task) -> list[Schedule]:
    """The schedule that the options name, or those that are tried by default, simple ones first."""
    named = task.options.schedule
    return tried_by_default() if named == "auto" else [schedule_row(named)]


def flight_rule(task: Task, V: int) -> InFlight:
    """What a cut counts on that stages hold at once, with V stages per group."""
    return possible_schedules(task)[0].in_flight(V) if task.program.training else one_at_a_time


def same_structure(one: Program, other: Program) -> bool:
    """Whether plans of one program mean the same for the other."""
    if [(c.template, c.params, c.early) for c in one.calls] != [(c.template, c.params, c.early) for c in other.calls]:
        return False
    pairs = ((t, other.templates[name]) for name, t in one.templates.items())
    return all(
        list(a.nodes) == list(b.nodes)
        and all(x.meta.get("type") == y.meta.get("type") for x, y in zip(a.graph.nodes, b.graph.nodes, strict=True))
        for a, b in pairs
    )
