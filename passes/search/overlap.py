"""Plans with lines run while messages travel (`autopar.passes.lower.overlap`), where that is faster and fits.

The solver counts every message in full, so this comes last, for the plans whose seconds and bytes are counted: the best one,
and those that it was compared with. Lines change places as far as that pays in the stages whose ranks have room for it, and
less far in others.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from autopar.ir.actions import splits_backward
from autopar.passes.account.program import Account, under
from autopar.passes.search.task import RankedPlans, Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import OVERLAPS, Plan


def overlapped(plans: RankedPlans) -> RankedPlans:
    """The plans with overlap, the fastest of those that fit first."""
    (task, best), *others = plans
    first = (task, with_overlap(task, task.finish(best)))
    ranked = [first, *((owner, one if one.account is None else with_overlap(owner, one)) for owner, one in others)]
    fits = [one.account is not None and not _groups_short(owner, one.account, one.plan) for owner, one in ranked[1:]]
    fastest = min((0, *(i for i, fit in enumerate(fits, 1) if fit)), key=lambda i: ranked[i][1].step_s)
    owner, winner = ranked.pop(fastest)
    return [(owner, replace(winner, left_out=best.left_out)), *ranked]


def with_overlap(task: Task, candidate: PricedPlan) -> PricedPlan:
    """A candidate that was accounted for, with overlap in the stages where it fits, if a step is faster so."""
    counted = account_of(candidate)
    if not task.options.overlap:
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


def _groups_short(task: Task, counted: Account, plan: Plan) -> list[tuple[int, ...]]:
    """The groups whose ranks need more memory than they have, by their stages."""
    return [
        group
        for group, peak in zip(counted.graph.groups, counted.peaks, strict=True)
        if peak > task.limit_at(plan.stages[group[0]].mesh.offset)
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
