"""The plan that won, with lines run while messages travel (`autopar.passes.lower.overlap`), where that is faster and fits.

The solver counts every message in full, so this comes last. Lines change places as far as that pays in the stages whose ranks
have room for it, and less far in others.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from autopar.ir.actions import splits_backward
from autopar.passes.account.program import under
from autopar.passes.search.task import Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import OVERLAPS, Plan


def with_overlap(task: Task, candidate: PricedPlan) -> PricedPlan:
    """The candidate, lowered; with overlap in the stages where it fits, if a step is faster so."""
    candidate = task.finish(candidate)
    counted = account_of(candidate)
    if not task.options.overlap:
        return candidate
    wanted = [len(OVERLAPS) - 1] * len(candidate.plan.stages)
    while any(wanted):
        plan = overlapping(candidate.plan, *(OVERLAPS[place] for place in wanted))
        costs = under(task.stage_costs(plan, splits_backward(counted.table)), counted.table)
        if costs.step_time_s >= counted.step_time_s:
            return candidate
        too_much = [
            group
            for group, peak in zip(costs.graph.groups, costs.peaks, strict=True)
            if peak > task.limit_at(plan.stages[group[0]].mesh.offset) and any(wanted[s] for s in group)
        ]
        if not too_much:
            return task.finish(replace(candidate, plan=plan, lowered=None, account=costs))
        for s in chain(*too_much):
            wanted[s] = max(wanted[s] - 1, 0)
    return candidate


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
