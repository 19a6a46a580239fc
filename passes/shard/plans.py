"""The plan that an assignment of a sharding problem means: of a stage, or of a whole program without a pipeline."""

from __future__ import annotations

from autopar.cluster import ClusterSpec
from autopar.options import Options
from autopar.passes.shard.factors.problem import Problem
from autopar.passes.shard.offload import offloaded
from autopar.passes.shard.owners import with_owners
from autopar.plan import ParameterPlan, Plan, StagePlan, TemplatePlan


def spmd_plan(problem: Problem, choice: list[int], cluster: ClusterSpec, options: Options, origin: str) -> Plan:
    """The Plan without a pipeline that an assignment means."""
    program, stage = problem.program, stage_plan(problem, choice, (0, len(problem.program.calls)))
    return Plan(
        program.fingerprint,
        cluster.fingerprint(),
        problem.mesh.size,
        (stage,),
        options.microbatches or 1,
        origin=origin,
        gradient_compression=options.gradient_compression or "",
    )


def stage_plan(problem: Problem, choice: list[int], calls: tuple[int, int]) -> StagePlan:
    """The plan that an assignment means for a stage."""
    graph, program = problem.graph, problem.program
    templates = {name: TemplatePlan({}, {}, problem.recompute.get(name, ())) for name in program.templates}
    parameters: dict[str, ParameterPlan] = {}
    trained = set(program.trained) if program.training and problem.setting.microbatches > 1 else set()
    for key, states, s in zip(graph.keys, graph.states, choice, strict=True):
        state = states[s]
        if key[0] == "op":
            templates[key[1]].strategies[key[2]] = state
        elif key[0] == "at":
            templates[key[1]].specs[key[2]] = state
        else:
            storage, optimizer = state
            for name in problem.groups[key[1]].names:
                by_microbatch = problem.setting.by_microbatch and name in trained
                own = ParameterPlan(storage, optimizer, by_microbatch=by_microbatch)
                parameters[name] = own if program.training else problem.rests.get(name, own)
    in_order = {name: parameters[name] for name in program.parameters}
    if program.training:
        in_order = with_owners(in_order, program, problem.mesh, problem.setting)
    stage = StagePlan(calls, problem.mesh, templates, in_order)
    return offloaded(program, stage, problem.pricer.device, problem.setting)
