"""Which of the plans that a search looked at are worth being measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.compiled import Alternative
from autopar.options import Options
from autopar.passes.search.stages.limits import asks_for_pipeline, leaves_stages_open
from autopar.plan import Plan

Shape = tuple[object, ...]


def shape_of(plan: Plan) -> Shape:
    """The shape of a plan, which tells plans apart at a glance: ranks and meshes of the stages, microbatches, schedule,
    order, and whether anything is recomputed, and parameters or their optimizer's state sharded where they rest."""
    stored = [p for stage in plan.stages for p in stage.parameters.values()]
    return (
        tuple(stage.mesh for stage in plan.stages),
        plan.microbatches,
        plan.schedule,
        plan.order,
        any(template.recompute for stage in plan.stages for template in stage.templates.values()),
        any(p.storage.axes for p in stored),
        any(p.optimizer.axes for p in stored),
    )


def ruled_out_stages(options: Options, ranks: int, plans: Iterable[Plan]) -> bool:
    """Whether a search that was free to choose stages kept no plan that has some: it rules pipelines out by estimates that may
    err by more than what they lack."""
    is_free = leaves_stages_open(options, ranks) and not asks_for_pipeline(options)
    return is_free and all(len(plan.stages) == 1 for plan in plans)


def worth_measuring(plan: Plan, others: Sequence[Alternative], count: int) -> Iterator[Alternative]:
    """The first `count` plans that are predicted to come next and whose shapes differ from that of `plan` and from each
    other's."""
    seen = {shape_of(plan)}
    for other in sorted(others, key=lambda one: one.predicted.step_time_s):
        if count and shape_of(other.plan) not in seen:
            seen.add(shape_of(other.plan))
            count -= 1
            yield other
