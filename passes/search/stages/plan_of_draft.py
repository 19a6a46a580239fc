"""From a draft to a plan that fits: what cuts into stages and branches side by side share.

Bytes that live for a moment are known after lowering only. Where they are too much, the draft is made again in a smaller
share of the memory; where that costs time, recompute is chosen together with the sharding as well. The plan that comes out
is then relieved of whatever recompute its stages do not need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.passes.lower.cut import cut
from autopar.passes.search.by_microbatch import may_be
from autopar.passes.search.recompute_levels import with_less_recompute
from autopar.passes.search.stages.draft import Draft, Exact
from autopar.passes.search.stages.schedule_choice import OutlinedPlan, candidate_under, scheduled
from autopar.passes.search.task import RankedPlans
from autopar.passes.shard.owners import with_owners
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan, StagePlan

MOST_SHARES = 4
"""Shares of the memory that one draft is made in, at most."""
SHARE = 0.95
"""The share of the memory that may be taken at first by what is counted before lowering."""
_SHRINK = 0.97
"""A share shrinks by a little more than what was too much."""
_GAIN = 1.02
"""A draft within memory that takes so many times the rough estimate is tried with recompute as well."""
_HOPE = 1.05
"""A draft is worth lowering while its estimate is no more than this many times the step time to beat."""


@dataclass(frozen=True)
class DraftInMemory:
    """A draft within a share of the memory. rough: the draft in any memory that it came from. policy: of recompute; None
    where the options force one."""

    rough: Draft
    policy: str | None
    draft: Draft


@dataclass(frozen=True)
class DraftPlan:
    """A draft with the plan, accounted for and within the limit, that it became."""

    draft: Draft
    candidate: PricedPlan

    @property
    def cost_s(self) -> float:
        """Predicted seconds of a step."""
        return self.candidate.step_s


def ranked(plans: Sequence[DraftPlan]) -> RankedPlans:
    """The plans with their tasks."""
    return [(plan.draft.task, plan.candidate) for plan in plans]


def drafts_in_memory(exact: Exact, rough: Draft) -> Iterator[DraftInMemory]:
    """The draft within memory; where that costs time, also with recompute chosen together with the sharding."""
    free = rough.task.options.recompute == "auto" and rough.task.program.training
    policy = "none" if free else None
    first = exact(rough, SHARE, policy)
    if first is not None:
        yield DraftInMemory(rough, policy, first)
    if free and (first is None or first.step_s > rough.step_s * _GAIN):
        second = exact(rough, SHARE, "auto")
        if second is not None and (first is None or second.step_s < first.step_s):
            yield DraftInMemory(rough, "auto", second)


def best_plan(exact: Exact, rough: Draft, best_s: float) -> DraftPlan | None:
    """The rough draft as the fastest plan that fits, with as little recomputed as fits. best_s: step time to beat."""
    best: DraftPlan | None = None
    for in_memory in sorted(drafts_in_memory(exact, rough), key=lambda d: d.draft.step_s):
        plan = plan_that_fits(exact, in_memory, best_s * _HOPE)
        if plan is not None and (best is None or plan.cost_s < best.cost_s):
            best_s, best = min(best_s, plan.cost_s), plan
    return best if best is None else relieved(best)


def plan_that_fits(exact: Exact, in_memory: DraftInMemory, best_s: float) -> DraftPlan | None:
    """The draft as a plan that fits and takes less than best_s; where its peak is too high, made again in a smaller share of
    the memory."""
    share, draft, lowered = SHARE, in_memory.draft, None
    for _ in range(MOST_SHARES):
        plan = _plan_of(draft)
        if plan != lowered:  # else a smaller share changed the estimate alone
            lowered, result = plan, _scheduled(draft, plan, best_s)
        if isinstance(result, PricedPlan):
            return DraftPlan(draft, result)
        if result == math.inf:
            return None
        share *= _SHRINK / result
        smaller = exact(in_memory.rough, share, in_memory.policy)
        if smaller is None or smaller.step_s >= best_s * _HOPE:
            return None
        draft = smaller
    return None


def _plan_of(draft: Draft) -> Plan:
    """The draft as a plan that has no schedule yet."""
    task, pieces = draft.task, draft.solution.stages
    ranges = [(s.start, s.end) for s in pieces]
    offsets: dict[int, int] = {}
    end = 0
    for members in draft.solution.groups:
        offsets |= dict.fromkeys(members, end)
        end += draft.submesh_plans[pieces[members[0]].option].mesh.size
    stages: list[StagePlan] = []
    for s, (part, piece) in enumerate(zip(cut(task.program, ranges), pieces, strict=True)):
        whole = draft.submesh_plans[piece.option]
        mesh = Mesh(whole.mesh.axes, offsets[s])
        parameters = with_owners({n: whole.plan.parameters[n] for n in part.parameters}, part, mesh, task.setting)
        stages.append(StagePlan(ranges[s], mesh, {n: whole.plan.templates[n] for n in part.templates}, parameters))
    return Plan(
        task.program.fingerprint,
        task.cluster.fingerprint(),
        task.cluster.size,
        tuple(stages),
        draft.microbatches,
        "forward",
        "solver",
        gradient_compression=task.options.gradient_compression or "",
    )


def _scheduled(draft: Draft, plan: Plan, useless_from_s: float) -> PricedPlan | float:
    """The draft's plan under its best schedule; or how full its fullest group is at least under one that is fast enough (over 1;
    infinite where none is)."""
    task = draft.task
    outlined = OutlinedPlan.of(task, plan)
    result = scheduled(outlined, draft, useless_from_s)
    if isinstance(result, PricedPlan) or result == math.inf or not may_be(task):
        return result
    names = frozenset(task.program.trained) if any(stage.mesh.size > 1 for stage in plan.stages) else frozenset()
    again = scheduled(outlined.reducing(task, names), draft, useless_from_s) if names else math.inf
    return again if isinstance(again, PricedPlan) else min(result, again)


def relieved(found: DraftPlan) -> DraftPlan:
    """The same plan and schedule with as little recomputed as fits (`recompute_levels`)."""
    less = with_less_recompute(found.draft.task, found.candidate)
    candidate = candidate_under(less[0], found.draft, less[1]) if less is not None else math.inf
    return found if isinstance(candidate, float) else DraftPlan(found.draft, candidate)
