"""From plans of programs that were derived for pricing to plans of the program as captured.

A plan is found on a program that was derived for a number of microbatches (`autopar.passes.search.microbatches`), which
spares capturing the model for every number that is tried. Once a plan has won the model is captured in as many
microbatches: where that program has the same structure the plan is taken over, otherwise it is planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.ir.program import Program
from autopar.passes.search.task import Capture, RankedPlans, Task, account_of
from autopar.passes.shard.mesh_plan import Candidate


@dataclass(frozen=True)
class PricedPlan:
    """A plan of a task for pricing. plan_again: plans the captured task in its place; None where nothing fits."""

    task: Task
    candidate: Candidate
    plan_again: Callable[[Task], Candidate | None]


def adopted(plans: Sequence[PricedPlan], captured: Capture, must_fit: bool) -> RankedPlans:
    """The best of these plans for the program as captured, and those of the others that have as many microbatches.

    Only the first one is lowered, and only it is planned again where its structure asks for that. must_fit: plan it again,
    too, where it does not keep to the memory limit as a plan of the captured program.
    """
    ranked: RankedPlans = []
    for plan in plans:
        M = plan.candidate.plan.microbatches
        if ranked and ranked[0][1].plan.microbatches != M:
            continue
        owner = captured(M).offloading(plan.task.setting.offload)
        candidate = _taken_over(plan, owner, first=not ranked, must_fit=must_fit)
        if candidate is None and not ranked:
            candidate = plan.plan_again(owner)
        if candidate is not None:
            ranked.append((owner, candidate))
    return ranked


def _taken_over(plan: PricedPlan, owner: Task, first: bool, must_fit: bool) -> Candidate | None:
    """The same choices for the captured task, lowered if it is the first; None where they do not mean the same there."""
    if owner.program is plan.task.program:
        return plan.candidate
    if not same_structure(owner.program, plan.task.program):
        return None
    choices = replace(plan.candidate.plan, program=owner.program.fingerprint)
    candidate = replace(plan.candidate, plan=choices, lowered=None, account=None)
    if not first:
        return candidate
    candidate = owner.finish(candidate)
    return None if must_fit and account_of(candidate).peak_bytes > owner.limit else candidate


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
