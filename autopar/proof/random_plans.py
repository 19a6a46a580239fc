"""`random_plan`: a valid random Plan, the fuzzer of lowering and emission."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.lower.cut import cut, cut_points
from autopar.passes.lower.pipeline import lower
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.schedule import SCHEDULES
from autopar.passes.search.pieces import PIECES, in_pieces
from autopar.passes.shard.factors.graph import FactorGraph
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.plans import stage_plan
from autopar.passes.shard.uneven import balanced
from autopar.plan import OVERLAPS, Plan
from autopar.program import ParallelProgram
from autopar.runtime.comm.mesh import Shares

UNEVEN = 1 / 3
"""Share of random stages whose axes are cut by shares."""
MOST_UNITS = 512
"""The largest size of a dim for which random plans have shares."""


def random_plan(
    program: ParallelProgram, seed: int, pp: int | None = None, schedule: str | None = None, pieces: int | None = None
) -> Plan:
    """Random stages on random groups of the program's ranks, and in each stage a random mesh and random states.

    Stages are cut anywhere, groups may be of unequal size, every group may run two stages, and the schedule is any that
    fits. Half of the gradients are reduced after every microbatch, and half of the parameters that may rest in runs of
    elements do. Half of the plans have blocks in pieces, and insist on these and on the lines that run beside
    messages. A third of the stages have axes that are cut by shares, where batches have one shape. pp forces
    the number of groups (as far as the model can be cut), schedule its name, pieces their number; schedules of several
    stages per group get two. Raises PlanError where a forced schedule has too few
    places to cut.
    """
    rng, reduced, in_runs, uneven = (
        random.Random(s) for s in (seed, f"by microbatch {seed}", f"runs {seed}", f"shares {seed}")
    )
    ir, ranks, m = program.ir, program.cluster.size, program.plan.microbatches
    points = sorted(cut_points(ir))
    most = min(ranks, len(points) + 1, 4)
    groups = min(pp, most) if pp is not None else rng.randint(1, most)
    sizes = _composition(ranks, groups, rng)
    chunks = 2 if groups > 1 and len(points) + 1 >= 2 * groups and rng.random() < 0.3 else 1
    if schedule is not None:
        chunks = SCHEDULES[schedule].stages[0]
        if groups * chunks > len(points) + 1:
            raise PlanError(
                f"{schedule} on {groups} groups needs {groups * chunks} stages; the model has {len(points) + 1}"
            )
    firsts = [0, *sorted(rng.sample(points, groups * chunks - 1)), len(ir.calls)]
    order = list(range(groups))
    name = rng.choice(_trained_by(chunks=1)) if groups > 1 else "none"
    if chunks == 2:
        name = rng.choice(_trained_by(chunks=2)) if ir.training else "interleaved"
    name = schedule or name
    if chunks == 2:
        order += order[::-1] if SCHEDULES[name].shape == "v" else order
    ranges = list(itertools.pairwise(firsts))
    stages = []
    for part, span, group in zip(cut(ir, ranges), ranges, order, strict=True):
        mesh = random_mesh(sizes[group], rng)
        mesh = Mesh(mesh.axes, sum(sizes[:group]))
        if uneven.random() < UNEVEN and len(program.forms) == 1:
            mesh = with_shares(mesh, part, uneven)
        problem = Problem(part, Pricer(program.cluster, mesh), program.rules, program.setting)
        stage = stage_plan(problem, random_choice(problem.graph, rng, in_runs), span)
        overlap = OVERLAPS[seed % len(OVERLAPS)]
        often = 0.5 * ir.training * (m > 1)
        parameters = {n: replace(p, by_microbatch=reduced.random() < often) for n, p in stage.parameters.items()}
        templates = {n: replace(t, overlap=overlap) for n, t in stage.templates.items()}
        stages.append(replace(stage, templates=templates, parameters=parameters))
    if not ir.training:
        name = "none" if groups == 1 else "forward"
    plan = Plan(ir.fingerprint, program.cluster.fingerprint(), ranks, tuple(stages), m, name, f"random {seed}")
    plan = replace(plan, order=program.plan.order, gradient_compression=program.plan.gradient_compression)
    count = random.Random(f"pieces {seed}").choice((1, 1, *PIECES)) if pieces is None else pieces
    return plan if count == 1 else insisting(_in_pieces(program, plan, count))


def insisting(plan: Plan) -> Plan:
    """The plan with its overlap and pieces also where they are not estimated to be faster."""
    stages = (
        replace(stage, templates={name: replace(t, insists=True) for name, t in stage.templates.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def _in_pieces(program: ParallelProgram, plan: Plan, count: int) -> Plan:
    lowered = lower(program.ir, plan, Pricers(program.cluster), program.rules)
    return in_pieces(plan, count, program.ir, lowered, program.rules)


def random_choice(graph: FactorGraph, rng: random.Random, in_runs: random.Random | None = None) -> list[int]:
    """Any assignment: every state is valid on its own, conversions make up for every disagreement. in_runs: decides for the
    parameters that may rest in runs of elements, whose states come last (None: rng does)."""
    in_runs, choice = in_runs or rng, []
    for key, states in zip(graph.keys, graph.states, strict=True):
        blocks = sum(not optimizer.run for _, optimizer in states) if key[0] == "param" else len(states)
        chosen = rng.randrange(blocks)
        in_run = blocks < len(states) and in_runs.random() < 0.5
        choice.append(in_runs.randrange(blocks, len(states)) if in_run else chosen)
    return choice


def random_mesh(ranks: int, rng: random.Random) -> Mesh:
    """A random factorisation of the ranks into one to three axes."""
    names = ["dp", "tp", "cp"]
    rest, axes = ranks, []
    for name in names[: rng.randint(1, 3)]:
        divisors = [d for d in range(1, rest + 1) if rest % d == 0]
        size = rng.choice(divisors)
        axes.append((name, size))
        rest //= size
    axes[0] = (axes[0][0], axes[0][1] * rest)
    rng.shuffle(axes)
    return Mesh(tuple(axes))


def with_shares(mesh: Mesh, program: Program, rng: random.Random) -> Mesh:
    """The mesh with random shares along axes of several ranks, for up to two sizes that indices of the program's ops have; half
    of them as equal as they can be."""
    calls = (call for t in program.templates.values() for call in t.op_calls.values())
    found = {size for call in calls for t in (*call.operands, *call.results) if t is not None for size in t.shape}
    axes = []
    for axis, ranks in mesh.axes:
        fit = sorted(size for size in found if ranks < size <= MOST_UNITS)
        if ranks > 1 and fit:
            units = rng.sample(fit, min(len(fit), rng.randint(1, 2)))
            shares = (balanced(n, ranks) if rng.random() < 0.5 else _composition(n, ranks, rng) for n in units)
            ranks = Shares(*shares)
        axes.append((axis, ranks))
    return Mesh(tuple(axes), mesh.offset)


def _trained_by(chunks: int) -> list[str]:
    """Schedules of a training step on several groups that run at least `chunks` stages each."""
    return [
        name for name, row in SCHEDULES.items() if row.stages[0] == chunks and row.groups is None and name != "forward"
    ]


def _composition(total: int, parts: int, rng: random.Random) -> list[int]:
    """`total` as a sum of `parts` positive numbers."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
