"""Plans with lines run while messages travel (`autopar.passes.lower.overlap`), where that is faster and fits.

The solver counts every message and every cast in full, so this comes last, for the plans whose seconds and bytes are counted: the
best one, and those that it was compared with. On GPUs parameters are cast once a step in the stages that have room for the
copies. Lines change places as far as that pays in the stages whose ranks have room for it, and less far in others. Then it is
tried to cut blocks in pieces, of the best plan and of those that may become the best so.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import chain

from autopar.ir.actions import splits_backward
from autopar.ir.lowered import LoweredProgram, LoweredTemplate
from autopar.passes.account.program import Account, under
from autopar.passes.lower.context import narrow_reads
from autopar.passes.lower.overlap import sends_beside
from autopar.passes.search.pieces import PIECES, in_pieces, least_in_pieces_s
from autopar.passes.search.task import RankedPlans, Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import OVERLAPS, Plan, StagePlan

LEAST_SENT = 0.05
"""Share of a step that messages take at least where it is cut in pieces for them."""
LEAST_WON = 0.02
"""Share of a step that pieces win at least: they are more and smaller ops, of which prices know less."""


def overlapped(plans: RankedPlans, several_shapes: bool = False) -> RankedPlans:
    """The plans with overlap, the fastest of those that fit first. several_shapes: programs for other shapes compute with the
    same parameters; the copies of one would rest while another runs, so they keep none."""
    (task, best), *others = plans
    counted = [(task, task.finish(best)), *others]
    if not several_shapes:
        counted = [(owner, one if one.account is None else with_narrow_copies(owner, one)) for owner, one in counted]
    ranked = [(owner, one if one.account is None else with_overlap(owner, one)) for owner, one in counted]
    place, owner, winner = _in_pieces(ranked)
    del ranked[place]
    return [(owner, replace(winner, left_out=best.left_out)), *ranked]


def _in_pieces(ranked: RankedPlans) -> tuple[int, Task, PricedPlan]:
    """The fastest plan once blocks are in pieces: its place, its task and itself. The others that fit are tried where
    they could beat the best so far."""
    by_step = sorted(range(len(ranked)), key=lambda i: ranked[i][1].step_s)
    first = next(i for i in by_step if i == 0 or _fits(*ranked[i]))
    best_place, best = first, with_pieces(*ranked[first])
    for i in by_step:
        task, candidate = ranked[i]
        if i != first and _least_s(candidate) < best.step_s and _fits(task, candidate):
            smaller = with_pieces(task, candidate, best.step_s)
            if smaller.step_s < best.step_s:
                best_place, best = i, smaller
    return best_place, ranked[best_place][0], best


def _least_s(candidate: PricedPlan) -> float:
    """Seconds that a step takes at least, whichever of its lines run beside which: as if ops' messages were all hidden, and as if
    one of messages and computation always ran beside the other. Infinite for a plan that was not lowered."""
    if candidate.account is None:
        return math.inf
    return max(candidate.account.silent_s, candidate.step_s - max(candidate.account.busy_s))


def with_narrow_copies(task: Task, candidate: PricedPlan) -> PricedPlan:
    """A candidate that was accounted for, with copies of parameters in the precision that calls read, made once a step, in the
    stages where they fit, if a step is faster so. On CPUs every use casts."""
    names = {name for name, _ in narrow_reads(task.program)}
    if not names or task.cluster.device(0).runs_as.type == "cpu":
        return candidate
    counted, wanted = account_of(candidate), set(range(len(candidate.plan.stages)))
    while wanted:
        stages = (_copying(stage, names) if s in wanted else stage for s, stage in enumerate(candidate.plan.stages))
        plan = replace(candidate.plan, stages=tuple(stages))
        costs = under(task.stage_costs(plan, splits_backward(counted.table)), counted.table)
        if costs.step_time_s >= counted.step_time_s:
            return candidate
        short = wanted & {*chain(*_groups_short(task, costs, plan))}
        if not short:
            return replace(candidate, plan=plan, lowered=None, account=costs)
        wanted -= short
    return candidate


def _copying(stage: StagePlan, names: Collection[str]) -> StagePlan:
    """The stage with copies of these of its parameters, where they rest on the device."""
    narrow = {n: replace(p, narrow=True) for n, p in stage.parameters.items() if n in names and not p.tier}
    return replace(stage, parameters=stage.parameters | narrow)


def with_overlap(task: Task, candidate: PricedPlan) -> PricedPlan:
    """A candidate that was accounted for, with overlap in the stages where it fits, if a step is faster so."""
    counted = account_of(candidate)
    if not task.options.overlap:
        return candidate
    if not _sends(candidate.lowered or task.outline(candidate.plan, splits_backward(counted.table))):
        return candidate
    wanted = [len(OVERLAPS) - 1] * len(candidate.plan.stages)
    while any(wanted):
        plan = overlapping(candidate.plan, *(OVERLAPS[place] for place in wanted))
        costs = under(task.stage_costs(plan, splits_backward(counted.table)), counted.table)
        if costs.step_time_s >= counted.step_time_s:
            return candidate
        full = [group for group in _groups_short(task, costs, plan) if any(wanted[s] for s in group)]
        if not full:
            return replace(candidate, plan=plan, lowered=None, account=costs)
        for s in chain(*full):
            wanted[s] = max(wanted[s] - 1, 0)
    return candidate


def with_pieces(task: Task, candidate: PricedPlan, useless_from_s: float = math.inf) -> PricedPlan:
    """The same with blocks in pieces (`pieces.py`), if a step is faster so, takes less than useless_from_s, and fits."""
    counted = account_of(candidate)
    split = splits_backward(counted.table)
    to_beat_s = min((1 - LEAST_WON) * counted.step_time_s, useless_from_s)
    if not task.options.overlap or split or counted.comm_time_s < LEAST_SENT * counted.step_time_s:
        return candidate
    if counted.silent_s >= to_beat_s:
        return candidate  # what pieces hide is no more than all ops' messages
    plan = overlapping(candidate.plan, OVERLAPS[-1])
    lowered = task.outline(plan, split)
    whole = counted if plan == candidate.plan else under(task.costs_of(plan, lowered), counted.table)
    for pieces in PIECES:
        smaller = in_pieces(plan, pieces, task.program, lowered, task.rules)
        if not _sends(lowered) and not _gives_otherwise(smaller, plan):
            return candidate
        if least_in_pieces_s(whole, lowered, smaller, task.program, task.pricers, task.rules) >= to_beat_s:
            continue
        cut = task.outline(smaller, split)
        if _templates(cut) == _templates(lowered):
            continue  # blocks are no faster in pieces
        costs = under(task.costs_of(smaller, cut), counted.table)
        if costs.step_time_s < to_beat_s and not _groups_short(task, costs, smaller):
            candidate, to_beat_s = replace(candidate, plan=smaller, lowered=None, account=costs), costs.step_time_s
    return candidate


def _templates(lowered: LoweredProgram) -> list[LoweredTemplate]:
    """The lowered templates of all stages."""
    return [template for stage in lowered.stages for template in stage.templates.values()]


def _sends(lowered: LoweredProgram) -> bool:
    """Whether a template sends a message that other lines of it could run beside. Where none does, lowering leaves the lines of
    every template as they stand, so overlap changes nothing."""
    return any(
        sends_beside(line, stage.mesh.sizes)
        for stage in lowered.stages
        for template in stage.templates.values()
        for function in template.functions
        for line in function.lines
    )


def _gives_otherwise(plan: Plan, other: Plan) -> bool:
    """Whether templates of a plan are given values in other specs than those of another plan."""
    stages = zip(plan.stages, other.stages, strict=True)
    return any(t.specs != b.templates[name].specs for a, b in stages for name, t in a.templates.items())


def _fits(task: Task, candidate: PricedPlan) -> bool:
    """Whether a candidate was accounted for and has the memory that it needs."""
    return candidate.account is not None and not _groups_short(task, candidate.account, candidate.plan)


def _groups_short(task: Task, counted: Account, plan: Plan) -> list[tuple[int, ...]]:
    """The groups whose ranks need more memory than they have, by their stages."""
    return [
        group
        for group, short in zip(counted.graph.groups, task.short_by_group(plan, counted), strict=True)
        if short > 0
    ]


def overlapping(plan: Plan, *overlaps: str) -> Plan:
    """The plan with so much overlap in every stage, or in all."""
    overlaps = overlaps * len(plan.stages) if len(overlaps) == 1 else overlaps
    return replace(
        plan,
        stages=tuple(
            replace(stage, templates={name: replace(t, overlap=overlap) for name, t in stage.templates.items()})
            for stage, overlap in zip(plan.stages, overlaps, strict=True)
        ),
    )
