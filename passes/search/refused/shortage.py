"""The shortage of memory where nothing fits: bytes per rank by kind, of the smallest plan or as a lower bound.

The smallest plan is a real one: sharding and recompute chosen for the fewest bytes on every mesh, lowered and accounted
for as any plan is, so its bytes by kind are those that it would use. Where the options ask for a pipeline, for which no
such plan is at hand, kinds are a lower bound: all that rests, shared by all ranks.
"""

from __future__ import annotations

import time
from dataclasses import replace

from autopar.errors import AutoparError, MemoryShortage
from autopar.ir.text import size_text
from autopar.passes.memory.step_peaks import peak_kinds
from autopar.passes.price.pricer import OutOfTime
from autopar.passes.search.lower_bounds import least_bytes, model_bytes
from autopar.passes.search.microbatches import microbatch_counts
from autopar.passes.search.refused.smallest import SOLVER_S, SmallPlan, smallest_plans
from autopar.passes.search.task import Task
from autopar.passes.shard.priced_plan import PricedPlan

SMALLEST_S = 10.0
"""Seconds for the smallest plan."""


def in_words(shortage: MemoryShortage) -> MemoryShortage:
    """The shortage with what it says in words."""
    whole = ", ".join(f"{kind} {size_text(n)}" for kind, n in shortage.in_all.items())
    kinds = ", ".join(f"{_WORDS.get(kind, kind)} {size_text(n)}" for kind, n in shortage.by_kind.items() if n >= 0.5)
    needed, limit = size_text(shortage.needed_bytes), size_text(shortage.limit_bytes)
    if not shortage.plan:
        words = f"per rank at least {needed} of {limit}: {kinds} (in all: {whole})"
    else:
        words = (
            f"nothing fits in {limit} per rank: the smallest plan ({shortage.plan}) needs "
            f"{needed}, {size_text(shortage.short_bytes)} too much: {kinds} (in all: {whole})"
        )
    return replace(shortage, words=words)


_WORDS = {"optimizer": "optimizer state"}


def memory_shortage(task: Task, batch: int, smallest: SmallPlan | None) -> MemoryShortage:
    """The smallest plan's bytes by kind; a lower bound where there is no such plan."""
    if smallest is None:
        return _lower_bound(task, batch)
    lowered, counted = smallest.candidate.lowered, smallest.account
    assert lowered is not None
    return in_words(
        MemoryShortage(
            task.cluster.size,
            smallest.task.limit_at(smallest.candidate.plan.stages[0].mesh),
            counted.peak_bytes,
            peak_kinds(lowered, [s.memory for s in counted.stages]),
            model_bytes(task),
            _plan_in_words(task, smallest.candidate),
            counted.step_time_s,
        )
    )


def smallest_plan(task: Task, batch: int) -> SmallPlan | None:
    """The plan with the lowest peak; None where the options ask for a pipeline or none is found in time."""
    if task.options.asks_for_pipeline:
        return None
    limit_s = min(task.options.solver_time_limit_s, SOLVER_S)
    timed = task.changed(options=replace(task.options, solver_time_limit_s=limit_s))
    end = time.monotonic() + SMALLEST_S
    timed.pricers = task.pricers.until(lambda: time.monotonic() > end)
    plans: list[SmallPlan] = []
    try:
        for plan in smallest_plans(timed, batch):
            plans.append(plan)
    except (OutOfTime, AutoparError):
        pass
    return min(plans, key=lambda plan: plan.account.peak_bytes, default=None)


def _plan_in_words(task: Task, candidate: PricedPlan) -> str:
    """A plan in words."""
    stage, M = candidate.plan.stages[0], candidate.plan.microbatches
    words = [f"{task.options.strategy} on {stage.mesh}"]
    words += [f"{M} microbatches"] if M > 1 else []
    words += ["recompute"] if any(t.recompute for t in stage.templates.values()) else []
    words += [f"offload={task.options.offload}"] if task.setting.offload else []
    return ", ".join(words)


def _lower_bound(task: Task, batch: int) -> MemoryShortage:
    """All that rests on the device, and what the smallest microbatch holds for backward, shared by all ranks."""
    ranks = task.cluster.size
    by_kind = {kind: nbytes / ranks for kind, nbytes in model_bytes(task, task.setting.offload).items()}
    _, held = least_bytes(task)
    pieces = 1 if task.options.microbatches is not None else max(microbatch_counts(task, batch))
    if "activations" not in task.setting.offload and task.program.training:
        by_kind["held for backward"] = held / pieces / ranks
    return in_words(MemoryShortage(ranks, task.limit, sum(by_kind.values()), by_kind, model_bytes(task)))
