"""Which plans are worth being written beside a program: to be measured, or for machines that turn out to be slower."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.cluster import ClusterSpec, with_slower
from autopar.codegen.pipeline import pipeline_module
from autopar.compiled import Alternative
from autopar.options import Options
from autopar.passes.search.stages.limits import leaves_stages_open
from autopar.plan import Plan
from autopar.runtime.step.paced import BETTER, PacedPlan, seconds_at

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
    is_free = leaves_stages_open(options, ranks) and not options.asks_for_pipeline
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


def slower_cases(
    cluster: ClusterSpec, plan: Plan, factors: Sequence[float]
) -> Iterator[tuple[ClusterSpec, list[float]]]:
    """The cluster with a part of its ranks slower, for every part and factor, and how many times as long each place takes then.
    Parts are the ranks of a plan's stages, or the machines where it has one stage alone."""
    rank_of = plan.placement or tuple(range(plan.ranks))
    meshes = dict.fromkeys((stage.mesh.offset, stage.mesh.size) for stage in plan.stages)
    node = cluster.levels[0].group_size if cluster.levels else cluster.size
    spans = [*meshes] if len(meshes) > 1 else [(first, node) for first in range(0, plan.ranks, node)]
    for first, size in spans if len(spans) > 1 else ():
        part = {place for place, rank in enumerate(rank_of) if first <= rank < first + size}
        for factor in factors:
            slowness = [factor if place in part else 1.0 for place in range(plan.ranks)]
            yield with_slower(cluster, part, factor), slowness


def worth_moving_to(own: Plan, pipeline: str, other: Plan, others: str, slowness: Sequence[float]) -> bool:
    """Whether a run would go on under another plan where machines are so slow. pipeline, others: the texts of pipeline.py."""
    plans = [PacedPlan.of(pipeline_module(text)) for text in (pipeline, others)]
    placements = [plan.placement or tuple(range(plan.ranks)) for plan in (own, other)]
    if any(plan.ranks != own.ranks for plan in (own, other)):
        return False
    own_s, other_s = seconds_at([plan for plan in plans if plan is not None], placements, slowness)
    return own_s > BETTER * other_s
