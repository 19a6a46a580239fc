"""Gradients that are reduced after every microbatch where their sums do not fit.

Between microbatches a gradient rests as it was made, whole over the axes that take the batch; reduced after each, it rests as
the optimizer's shard (ZeRO-2), for one message more a microbatch that is behind the next one's backward. Which of the two is
a choice per parameter. Seconds are nearly proportional to bytes, so the largest gradients go first: all where they are needed,
else those that hold about half of the bytes, where these are enough.

    8 microbatches on 8 ranks, 100 parameters of 1 GB: 100 GB between them whole, 12.5 GB in shards
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

from autopar.ir.lowered import LoweredProgram, LoweredStage
from autopar.passes.played.gradients import unreduced_bytes
from autopar.passes.search.task import Task, account_of
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan

_LITTLE = 0.1
"""A share of the gradients that is not worth being left whole: the rest would be looked at once more for it."""


def saved_bytes(stage: LoweredStage) -> dict[str, float]:
    """Bytes that a stage's ranks hold less of every gradient between microbatches where it is reduced after each."""
    trained = (p for p in stage.parameters.values() if p.contributions and not p.by_microbatch)
    saved = {p.name: unreduced_bytes(p, stage.mesh) - p.updated_bytes(stage.mesh) for p in trained}
    return {name: nbytes for name, nbytes in saved.items() if nbytes > 0}


def reduced_by_microbatch(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with the gradients of these parameters reduced after every microbatch."""
    stages = (
        replace(stage, parameters={n: replace(p, by_microbatch=n in names) for n, p in stage.parameters.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def may_be(task: Task) -> bool:
    """Whether the search may choose it: a strategy that a user names says it by itself."""
    return task.program.training and task.setting.microbatches > 1 and task.options.strategy == "auto"


def finished(task: Task, candidate: PricedPlan) -> PricedPlan:
    """The candidate lowered and accounted for (`Task.finish`); where its peak is too high, with gradients that are reduced after
    every microbatch, if it fits so. Where neither fits, the one that is less short."""
    whole = task.finish(candidate)
    if not may_be(task) or whole.lowered is None or len(whole.lowered.stages) > 1:
        return whole
    over = _over(task, whole)
    if over <= 0:
        return whole
    largest_first = sorted(saved_bytes(whole.lowered.stages[0]).items(), key=lambda item: (-item[1], item[0]))
    total = sum(nbytes for _, nbytes in largest_first)
    best, part = reducing(task, whole, {name for name, _ in largest_first}), max(total / 2, over)
    surely_short = task.surely_short_bytes(best.plan, account_of(best))
    if total < over or surely_short > 0 or total - part < _LITTLE * total:
        return best
    before = accumulate((nbytes for _, nbytes in largest_first), initial=0.0)
    names = {name for (name, _), held in zip(largest_first, before, strict=False) if held < part}
    tried = reducing(task, whole, names)
    return best if _over(task, tried) > 0 else tried


def _over(task: Task, candidate: PricedPlan) -> float:
    """Bytes by which a finished candidate breaks its limit; where it surely does, those that it does at least, as its gradients
    need not be played then."""
    surely = task.surely_short_bytes(candidate.plan, account_of(candidate))
    return surely if surely > 0 else task.short_bytes(candidate.plan, account_of(candidate))


def least_over(task: Task, whole: PricedPlan) -> float:
    """Bytes by which a finished candidate breaks its limit at least, whichever gradients are reduced after every microbatch; up
    to 0 where that is not known before gradients are played."""
    if may_be(task) and whole.lowered is not None and len(whole.lowered.stages) == 1:
        whole = reducing(task, whole, saved_bytes(whole.lowered.stages[0]).keys())
    return task.surely_short_bytes(whole.plan, account_of(whole))


def smallest(task: Task, candidate: PricedPlan) -> PricedPlan:
    """The candidate lowered and accounted for, with all gradients reduced after every microbatch where its peak is lower so."""
    whole = task.finish(candidate)
    if not may_be(task):
        return whole
    reduced = reducing(task, whole, frozenset(task.program.trained))
    return min(whole, reduced, key=lambda one: account_of(one).peak_bytes)


def reducing(task: Task, whole: PricedPlan, names: Collection[str]) -> PricedPlan:
    """A finished candidate with the gradients of these parameters reduced after every microbatch: it runs the same lines."""
    assert whole.lowered is not None
    return task.reduced_otherwise(
        whole, reduced_by_microbatch(whole.plan, names), lowered_reducing(whole.lowered, names)
    )


def lowered_reducing(lowered: LoweredProgram, names: Collection[str]) -> LoweredProgram:
    """A lowered program as the plan with the gradients of these parameters reduced after every microbatch is lowered."""
    return replace(lowered, stages=tuple(_reducing(stage, names) for stage in lowered.stages))


def _reducing(stage: LoweredStage, names: Collection[str]) -> LoweredStage:
    """The stage as the plan with these gradients reduced after every microbatch is lowered: where a step reduces them."""
    parameters = {n: replace(p, by_microbatch=n in names and bool(p.reduce)) for n, p in stage.parameters.items()}
    return replace(stage, parameters=parameters)
