"""The best plan that cuts rows of causal attention into blocks, once more with the sequence in zigzag order.

With contiguous blocks the rank with the last rows does up to twice the work of the mean, in order all do as much. The same
program in order is planned on the same mesh, or in the same stages, so this costs one mesh of a search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from autopar.ir.program import Program
from autopar.ir.rule import factors_of
from autopar.passes.order.dims import causal_attention
from autopar.passes.order.refused import NotOrdered
from autopar.passes.search.layout import Layout
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.one_mesh.by_strategy import search_strategies
from autopar.passes.search.one_mesh.short_memory import ShortMemorySearch
from autopar.passes.search.stages.laid_out import search_laid_out
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan, StagePlan

MOST_GAIN = 2.0
"""The most that the order may gain: a step takes at least one part in so many of what it takes otherwise."""


def search_zigzag(task: Task, batch: int, plans: RankedPlans, best_s: float) -> Iterator[RankedPlans]:
    """Plans in zigzag order that are faster than best_s, whenever there is a better one. plans: those found so far."""
    for owner, plan in sorted(plans, key=lambda pair: pair[1].step_s):
        order = blocks_of_rows(plan.plan, owner.program)
        if plan.step_s > MOST_GAIN * best_s:
            return
        if order > 1:
            with suppress(NotOrdered):  # then the plans found so far are what there is
                yield from _planned_again(task.in_order(order), batch, owner, plan, best_s)
            return


def blocks_of_rows(plan: Plan, program: Program) -> int:
    """Into how many blocks a plan cuts the rows of causal attention, at most."""
    return max((_blocks(stage, program) for stage in plan.stages), default=1)


def _blocks(stage: StagePlan, program: Program) -> int:
    blocks = 1
    for name, template in stage.templates.items():
        for op in causal_attention(program.templates[name]):
            axes = zip(stage.mesh.axes, template.strategies.get(op, ()), strict=False)
            blocks = max(blocks, math.prod(size for (_, size), choice in axes if "s" in factors_of(choice)))
    return blocks


def _planned_again(task: Task, batch: int, owner: Task, best: PricedPlan, best_s: float) -> Iterator[RankedPlans]:
    """Plans of the task, whose sequence is in order, with the mesh or the stages of another plan."""
    stages, M = best.plan.stages, best.plan.microbatches
    if len(stages) > 1:
        layout = task.layout or Layout.of(best.plan, owner.program)
        yield from search_laid_out(SubmeshPlans(TasksByCount(task.changed(layout=layout), batch)), layout, best_s)
        return
    options = replace(task.options, mesh=dict(stages[0].mesh.axes), axes=None, microbatches=M)
    task = task.at(M).changed(options=options)
    candidates, is_short = search_strategies(task)
    if candidates and candidates[0].step_s < best_s:
        best_s = candidates[0].step_s
        yield [(task, candidate) for candidate in candidates]
    if is_short and task.program.training:
        yield from ShortMemorySearch(TasksByCount(task, batch)).plans(best_s)
