"""The values that a program computes on its ranks: the emitted text in another dtype, all ranks in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.capture.known.promoted import replaced
from autopar.codegen.in_process import load
from autopar.codegen.pipeline import pipeline_source
from autopar.codegen.stage import stage_sources
from autopar.ir.lines import Compute, Function, Line
from autopar.ir.lowered import LoweredProgram, LoweredStage
from autopar.ir.mesh import Mesh
from autopar.ops.registry import find
from autopar.passes.lower import lower
from autopar.passes.price.by_node import by_node
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.plans import spmd_plan
from autopar.program import ParallelProgram
from autopar.proof.casts import DividedAs
from autopar.proof.compare import Values, difference, largest
from autopar.runtime.program.extras import named_leaves
from autopar.runtime.step.session import Session


def values_on_ranks(
    program: ParallelProgram,
    lowered: LoweredProgram,
    leaves: Sequence[torch.Tensor],
    weights: Values,
    steps: int,
    dtype: torch.dtype,
) -> Values:
    """The values of the lines in `dtype`, by name: outputs, or losses and what is beside them, first gradients, final
    parameters and buffers.

    lowered: of the program, or of the same on other ranks. What ranks disagree about is NaN (of integers: what one of the
    ranks after the first says).
    """
    source_dtypes = replaced(dtype)
    sources = stage_sources(lowered.stages, lambda stage: "verification", source_dtypes)
    way = by_node(lowered, program.request.cluster, program.plan.placement)
    modules = load(lowered, sources, pipeline_source(lowered, program.ir, "verification", source_dtypes, way))

    def body(session: Session) -> Values:
        with DividedAs(dtype):
            return values_of(session)

    def values_of(session: Session) -> Values:
        if not program.training:
            outputs = session.forward(list(leaves))
            return {f"output/{i}": output for i, output in enumerate(outputs) if output is not None}
        values: Values = {}
        for step in range(steps):
            values[f"loss/{step}"] = session.train_step(list(leaves)).clone()
            values |= {f"output/{step}/{name}": value for name, value in named_leaves(session.extras)}
            if step == 0:
                values |= {f"grad/{n}": g for n, g in session.full_grads().items()}
        values |= {f"param/{n}": session.gather_full(n) for n in program.ir.parameters}
        persistent = [n for n, buffer in program.ir.buffers.items() if buffer.persistent]
        return values | {f"buffer/{n}": session.gather_full(n) for n in persistent}

    update = program.request.update if program.training else None
    first, *others = modules.run(weights, update, program.options.seed, body, dtype)
    for other in others:
        for name, value in other.items():
            if difference(value, first[name]) > 1e-6 * max(largest(first[name]), 1e-30):
                first[name] = torch.full_like(value, float("nan")) if value.is_floating_point() else value
    return first


def one_rank(program: ParallelProgram) -> LoweredProgram:
    """The captured program on one rank."""
    mesh = Mesh.of(dp=1)
    problem = Problem(program.ir, Pricer(program.cluster, mesh), program.rules, program.setting)
    plan = spmd_plan(problem, [0] * len(problem.graph.keys), program.cluster, program.options, "one rank")
    plan = replace(plan, microbatches=program.plan.microbatches)
    return lower(program.ir, plan, Pricers(program.cluster), program.rules)


def uncompressed(lowered: LoweredProgram) -> LoweredProgram:
    """The same program with gradients that travel as they are."""
    stages = (
        replace(stage, parameters={n: replace(p, compression="") for n, p in stage.parameters.items()})
        for stage in lowered.stages
    )
    return replace(lowered, stages=tuple(stages))


def without_dropout(lowered: LoweredProgram) -> LoweredProgram:
    """The same lines with every dropout probability 0."""

    def quiet(line: Line) -> Line:
        definition = find(line.op) if isinstance(line, Compute) else None
        if not isinstance(line, Compute) or definition is None or not definition.random or "p" not in line.kwargs:
            return line
        return replace(line, kwargs={**line.kwargs, "p": 0.0})

    def silence(f: Function) -> Function:
        return replace(f, lines=tuple(map(quiet, f.lines)))

    def still(stage: LoweredStage) -> LoweredStage:
        templates = {
            name: replace(
                t,
                forward=silence(t.forward),
                backward=t.backward and silence(t.backward),
                weights=t.weights and silence(t.weights),
            )
            for name, t in stage.templates.items()
        }
        return replace(stage, templates=templates)

    return replace(lowered, stages=tuple(map(still, lowered.stages)))
