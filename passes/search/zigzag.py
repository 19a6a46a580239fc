"""Plans whose causal sequences are in zigzag order: every mesh where ranks share rows, then the best plan once more.

With contiguous blocks the rank with the last rows does up to twice the work of the mean, in order all do as much. So the best
mesh may be another one in order. One order serves all meshes: where 2n chunks balance n blocks, they balance those of any
divisor of n, which are several of them joined. So the program in the finest order that ranks may need is planned on every
mesh, bounded by the best plan so far; and in others where plans cut rows into blocks that it does not balance, as 48 ranks
for 16 rows do that share a row by threes, or by eights in unequal numbers of rows. The best plan that cuts rows, of these and
of those in natural order, is planned once more in the order of its own blocks, on the same mesh or in the same stages. Ranks
that have rows of their own gain nothing: for these nothing is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace

from autopar.errors import CaptureError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.rule import factors_of
from autopar.passes.order.dims import causal_attention
from autopar.passes.order.refused import NotOrdered
from autopar.passes.rules.per_axis import taken_by
from autopar.passes.search.layout import Layout
from autopar.passes.search.microbatches import TasksByCount
from autopar.passes.search.one_mesh.by_strategy import search_strategies
from autopar.passes.search.one_mesh.short_memory import Question, ShortMemorySearch
from autopar.passes.search.stages.laid_out import search_laid_out
from autopar.passes.search.stages.submesh import SubmeshPlans
from autopar.passes.search.task import RankedPlans, Task
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.passes.shard.uneven import rows_of
from autopar.plan import Plan, StagePlan

MOST_GAIN = 2.0
"""The most that the order may gain: a step takes at least one part in so many of what it takes otherwise."""


def search_zigzag(
    task: Task, batch: int, plans: RankedPlans, best_s: float, without_room: Collection[Question] = ()
) -> Iterator[RankedPlans]:
    """Plans in zigzag order that are faster than best_s, whenever there is a better one. plans: those found so far; without_room:
    where none fits in natural order, so that none does in another one, which holds as much."""
    found: RankedPlans = []
    for order in orders_for(plans, best_s) if task.options.strategy == "auto" else ():
        with suppress(NotOrdered):  # then blocks of a plan may still be put in order
            before = found
            best_s = min([best_s, *(plan.step_s for _, plan in before)])
            for ranking in ShortMemorySearch(TasksByCount(task.in_order(order), batch), without_room).plans(best_s):
                found = sorted([*ranking, *before], key=lambda pair: pair[1].step_s)
                yield found
    asked: set[tuple[int, Mesh, int]] = set()
    for ranking in (found, plans):
        best_s = min([best_s, *(plan.step_s for _, plan in found)])
        for again in _best_again(task, batch, ranking, best_s, asked):
            found = sorted([*again, *found], key=lambda pair: pair[1].step_s)
            yield found


def _best_again(
    task: Task, batch: int, plans: RankedPlans, best_s: float, asked: set[tuple[int, Mesh, int]]
) -> Iterator[RankedPlans]:
    """The best plan that cuts rows once more in the order of its own blocks, where that is faster than best_s. asked: orders,
    meshes and microbatch counts of plans on one mesh that were looked at, each of which is looked at once."""
    for owner, plan in sorted(plans, key=lambda pair: pair[1].step_s):
        order = blocks_of_rows(plan.plan, owner.program)
        if plan.step_s > MOST_GAIN * best_s:
            return
        if order > 1:
            question = order, plan.plan.stages[0].mesh, plan.plan.microbatches
            if order != owner.order and (len(plan.plan.stages) > 1 or question not in asked):
                asked.add(question)
                with suppress(NotOrdered, CaptureError):  # then the plans found so far are what there is
                    yield from _planned_again(task.in_order(order), batch, owner, plan, best_s)
            return


def orders_for(plans: RankedPlans, best_s: float) -> list[int]:
    """The orders that all meshes are planned in: of as many blocks as ranks share a row at most where the program of a plan on
    one mesh is shared evenly; and of as many as plans on one mesh cut rows into that may win in order, where the first do not
    balance these. None where every rank has rows of its own, so that batches are cut at least as well as sequences in order."""
    finest = most_ranks_a_row(plans)
    may_win = (pair for pair in plans if len(pair[1].plan.stages) == 1 and pair[1].step_s < MOST_GAIN * best_s)
    cut = {blocks_of_rows(plan.plan, owner.program) for owner, plan in may_win} if finest > 1 else set()
    more = {n for n in cut if finest % n}
    return [n for n in (finest, *sorted(more)) if n > 1 and not any(other > n and other % n == 0 for other in more)]


def most_ranks_a_row(plans: RankedPlans) -> int:
    """How many ranks share a row of a microbatch at most where the program of a plan on one mesh is shared evenly; 1 where every
    rank has rows of its own."""
    shares = [1]
    for owner, plan in plans:
        rows, ranks = rows_of(owner.program), owner.cluster.size
        if rows is not None and len(plan.plan.stages) == 1:
            shares.append(ranks // math.gcd(rows, ranks))
    return max(shares)


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
        submeshes = SubmeshPlans(TasksByCount(task.changed(layout=layout), batch))
        submeshes.narrow((stage.mesh for stage in stages if len(stage.mesh.axes) > 2), taken_by(stages))
        yield from search_laid_out(submeshes, layout, best_s)
        return
    options = replace(task.options, mesh=dict(stages[0].mesh.axes), axes=None, microbatches=M)
    task = task.at(M).changed(options=options)
    candidates, is_short = search_strategies(task)
    if candidates and candidates[0].step_s < best_s:
        best_s = candidates[0].step_s
        yield [(task, candidate) for candidate in candidates]
    if is_short and task.program.training:
        yield from ShortMemorySearch(TasksByCount(task, batch)).plans(best_s)
