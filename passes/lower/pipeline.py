"""Lower a whole plan: every stage, what travels between them, and the table of actions.

Both ends of a stage-boundary tensor choose the spec on their own mesh (`Pricer.arrival`, `Pricer.departure`); the transfer
between them is direct: every rank of the target is sent the pieces it needs by ranks of the source that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.actions import StageGraph, Table, parse_row, splits_backward
from autopar.ir.lowered import LoweredProgram, LoweredStage, LoweredTransfer
from autopar.ir.program import Program
from autopar.passes.lower.alike import like_stage, stage_kind
from autopar.passes.lower.cut import cut, shared_parameters
from autopar.passes.lower.stage import lower_stage
from autopar.passes.price.pricer import Pricers
from autopar.passes.rules.book import RuleBook
from autopar.passes.schedule import build
from autopar.plan import Plan, StagePlan


def lower(program: Program, plan: Plan, pricers: Pricers, rules: RuleBook) -> LoweredProgram:
    """Every stage of the plan as local lines. Raises PlanError when the plan does not fit the program."""
    if plan.program != program.fingerprint:
        raise PlanError(
            f"this plan is for another model (plan {plan.program}, model {program.fingerprint}): the model, its shapes "
            "or the example inputs changed; compile again without plan="
        )
    parts, planned, shared = _cut(program, plan)
    graph = stage_graph(plan, parts)
    table = table_of(plan, graph, program.training)
    split = program.training and splits_backward(table)
    stages = tuple(
        lower_stage(part, stage, pricers, rules, plan.microbatches, split, plan.gradient_compression)
        for part, stage in zip(parts, planned, strict=True)
    )
    return LoweredProgram(stages, tuple(_transfers(stages)), shared, graph, table)


def outline(
    program: Program, plan: Plan, pricers: Pricers, rules: RuleBook, split: bool, kind: Callable[[str], Hashable]
) -> LoweredProgram:
    """The plan lowered as far as seconds and bytes need it: without a table, and stages that are alike share the functions of
    the first of them, which name that one's parameters and calls. split: B and W apart. kind: of a parameter, by name.
    """
    parts, planned, shared = _cut(program, plan)
    first_alike: dict[Hashable, LoweredStage] = {}
    stages: list[LoweredStage] = []
    for part, stage in zip(parts, planned, strict=True):
        key = (stage_kind(part, stage, kind), id(pricers[stage.mesh]))
        if key not in first_alike:
            first_alike[key] = lower_stage(
                part, stage, pricers, rules, plan.microbatches, split, plan.gradient_compression
            )
        stages.append(like_stage(first_alike[key], part, stage.mesh))
    return LoweredProgram(tuple(stages), tuple(_transfers(tuple(stages))), shared, stage_graph(plan, parts), ())


def _cut(program: Program, plan: Plan) -> tuple[tuple[Program, ...], list[StagePlan], dict[str, tuple[int, ...]]]:
    """The stages' programs and plans, and the parameters and buffers that several of them hold."""
    ranges = [stage.calls for stage in plan.stages]
    shared = shared_parameters(program, ranges) if len(ranges) > 1 else {}
    return cut(program, ranges), [_shared_at_home(stage, shared) for stage in plan.stages], shared


def _shared_at_home(stage: StagePlan, shared: Collection[str]) -> StagePlan:
    """Parameters of several stages travel between these, so they rest on the device, whatever the plan says of tiers."""
    moved = {n: replace(p, tier="") for n, p in stage.parameters.items() if p.tier and n in shared}
    return replace(stage, parameters=stage.parameters | moved) if moved else stage


def stage_graph(plan: Plan, parts: tuple[Program, ...]) -> StageGraph:
    """Groups by the ranks that stages run on, and edges by what crosses. Raises PlanError for ranks in two groups."""
    groups: dict[tuple[int, int], list[int]] = {}
    for s, stage in enumerate(plan.stages):
        groups.setdefault((stage.mesh.offset, stage.mesh.size), []).append(s)
    end = 0
    for first, size in sorted(groups):
        if first != end:
            raise PlanError(
                f"the plan's stages leave out or share ranks: ranks {first} to {first + size - 1} follow {end} ranks; stages "
                "have either the same ranks or none in common, and together all of them"
            )
        end = first + size
    if end != plan.ranks:
        raise PlanError(f"the plan is for {plan.ranks} ranks, its stages have {end}")
    boundary_tensors = [c for part in parts if part.boundary is not None for c in part.boundary.received]
    edges = sorted({(c.source, c.target) for c in boundary_tensors})
    back = sorted({(c.source, c.target) for c in boundary_tensors if c.gradient})
    return StageGraph(tuple(map(tuple, groups.values())), tuple(edges), tuple(back))


def table_of(plan: Plan, graph: StageGraph, training: bool) -> Table:
    """The plan's own table, or that of its named schedule. Raises PlanError."""
    if plan.table:
        try:
            return tuple(parse_row(row) for row in plan.table)
        except ValueError as error:
            raise PlanError(f"the plan's action table is corrupt: {error}") from error
    if not training:
        return build("forward", graph, plan.microbatches)
    return build(plan.schedule, graph, plan.microbatches)


def _transfers(stages: tuple[LoweredStage, ...]) -> list[LoweredTransfer]:
    transfers: list[LoweredTransfer] = []
    for kind, leaving, arriving in (
        ("value", "sent", "received"),
        ("gradient", "gradients_sent", "gradients_received"),
    ):
        ends = {end.name: (stage.index, end) for stage in stages for end in getattr(stage, arriving)}
        for stage in stages:
            for start in getattr(stage, leaving):
                if start.name not in ends:
                    raise PlanError(f"stage {stage.index} sends {start.name}, which no stage receives")
                target, end = ends.pop(start.name)
                road = len(transfers), start.name, kind, stage.index, target
                transfers.append(LoweredTransfer(*road, start.type, start.spec, end.spec))
        if ends:
            raise PlanError(
                f"{', '.join(ends)} is received by stage {next(iter(ends.values()))[0]}, but nobody sends it"
            )
    return transfers


__all__ = ["lower", "outline", "stage_graph", "table_of"]
