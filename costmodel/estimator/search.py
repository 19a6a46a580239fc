"""The best plans of a transformer on a cluster: best-first branch and bound over `Space`.

A heap holds parts of the space (see `branch_and_bound`) with a lower bound of the step time of every plan in them; the lowest is
opened until what comes out is a plan with its estimate, which no other can then beat: the first plan out is optimal in
the space. The software (precision, kernels, what overlaps, bytes of gradients) is given, never chosen.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.costmodel.estimator.branch_and_bound import BranchAndBound, Part
from autopar.costmodel.estimator.shape import TransformerShape
from autopar.costmodel.estimator.space import Space
from autopar.costmodel.estimator.step import Estimate
from autopar.costmodel.estimator.workload import StepPlan
from autopar.costmodel.software import Software
from autopar.errors import InfeasibleError


@dataclass(frozen=True)
class EstimatedPlan:
    """A plan and what it costs. reason: what it loses time to, in words."""

    plan: StepPlan
    estimate: Estimate
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """The best plans first; how many parts of the space were looked at, timed, dropped for memory or by their bound."""

    best: tuple[EstimatedPlan, ...]
    enumerated: int
    timed: int
    out_of_memory: int
    pruned: int


def search(
    model: TransformerShape,
    cluster: ClusterSpec,
    *,
    batch: int,
    software: Software | None = None,
    top: int = 10,
    space: Space | None = None,
    room_bytes: float | None = None,
) -> SearchResult:
    """The `top` fastest plans that fit, of those that differ in sizes, chunks or microbatch.

    room_bytes: what a process may take of a device, its memory by default. Raises InfeasibleError
    saying what is short and what would do.
    """
    q = BranchAndBound(model, cluster, batch, software or Software(cluster.half_dtype), space or Space(), room_bytes)
    body = model.layers * model.layer_params(bool(model.experts))
    least_state = body * (4 + 2 * q.software.moment_bytes + q.software.grad_bytes) / cluster.size
    if least_state > q.room:
        raise InfeasibleError(infeasible(model, cluster, least_state))
    order = count()
    heap: list[tuple[float, int, Part, EstimatedPlan | None]] = [(t, next(order), part, None) for t, part in q.start()]
    heapq.heapify(heap)
    best: dict[tuple[Any, ...], EstimatedPlan] = {}
    while heap and len(best) < top:
        _, _, part, timed = heapq.heappop(heap)
        if timed is not None:
            best.setdefault((part.tp, part.cp, part.ep, part.cuts, part.vpp, part.b), timed)
        elif part.storage:
            e, plan = q.time(part), part.plan()
            heapq.heappush(heap, (e.step_time_s, next(order), part, EstimatedPlan(plan, e, reason(e, plan))))
        else:
            for bound, child in q.open(part):
                heapq.heappush(heap, (bound, next(order), child, None))
    if not best:
        raise InfeasibleError(infeasible(model, cluster, q.least))
    return SearchResult(tuple(best.values()), q.opened, q.timed, q.short, len(heap))


def reason(e: Estimate, plan: StepPlan) -> str:
    """A text of the largest losses of the plan, and of how full its memory is."""
    losses = {"bubble": e.bubble_fraction}
    for kind, seconds in e.comm.items():
        losses[f"{kind} communication"] = seconds["exposed_share"]
    if plan.recompute == "full":
        losses["recompute"] = 0.25
    worst = sorted(losses.items(), key=lambda x: -x[1])[:2]
    words = ", ".join(f"{share:.1%} {name}" for name, share in worst if share > 0.001) or "almost nothing lost"
    return f"{words}; compute {e.breakdown['compute'] / e.step_time_s:.0%}"


def infeasible(model: TransformerShape, cluster: ClusterSpec, least: float) -> str:
    """A text of the shortage: its kind, its size, and the least device count or storage that would do."""
    device = cluster.pace(0, cluster.size)
    state = 16 * model.params
    total = cluster.size * device.memory_bytes
    text = (
        f"no plan fits: {model.params / 1e9:,.0f}B parameters need {state / 1e12:,.2f} TB "
        "for weights, gradients and Adam; "
        f"{cluster.size} x {device.name} have {total / 1e12:,.2f} TB"
    )
    if state > total:
        need = int(-(-state // device.memory_bytes))
        short = (state - total) / 1e12
        return f"{text}: {short:,.2f} TB short. Use {need:,} such devices or more, or offload that much to host or NVMe"
    over = (least - device.memory_bytes) / 1e9
    advice = "use a smaller microbatch or sequence, more devices, or offload"
    return f"{text}, but the leanest plan is {over:,.1f} GB over on the fullest device; {advice}"
