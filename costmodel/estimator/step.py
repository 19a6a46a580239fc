"""One training step of a transformer under a plan: seconds and bytes, by putting the parts together.

    step = pipeline(F, B, W per stage and microbatch) + exposed data-parallel communication + optimizer + offload,

times a small loss per doubling of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.costmodel.collective import strided_time_s
from autopar.costmodel.estimator.layer import LayerCosts, layer_costs
from autopar.costmodel.estimator.memory import Memory, fullest_stage, stage_params
from autopar.costmodel.estimator.pipeline_time import (
    Layers,
    busiest,
    chunk_layers,
    group_seconds,
    pipeline_s,
    send_s,
    stage_seconds,
)
from autopar.costmodel.estimator.schedules import microbatches_held, schedule_name
from autopar.costmodel.estimator.shape import TransformerShape
from autopar.costmodel.estimator.workload import Software, StepPlan, Workload


@dataclass(frozen=True)
class Estimate:
    """What a step costs. Seconds, bytes of the fullest rank; shares are of the step's time.

    comm[kind] = {"total_s", "exposed_s", "exposed_share"} for tp, cp, ep, pp, dp. breakdown: seconds that add up to
    about the step. fits: whether memory_bytes["total"] is within the device's memory.
    """

    step_time_s: float
    tokens_per_s_per_device: float
    mfu: float
    memory_bytes: dict[str, float]
    comm: dict[str, dict[str, float]]
    bubble_fraction: float
    fits: bool
    breakdown: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**self.__dict__, "notes": list(self.notes)}


USABLE_SHARE = 0.96
"""Share of the device's memory that a process can have before it runs out."""


@dataclass(frozen=True)
class StepSeconds:
    """What a step's seconds are spent on.

    span: the pipeline. work: the slowest group's actions for one microbatch; layer_exposed: how much of them is exposed
    communication. send: from a stage to the next, one microbatch. dp, dp_exposed: data-parallel communication.
    """

    span: float
    work: float
    layer_exposed: float
    send: float
    dp: float
    dp_exposed: float
    optimizer: float
    offload: float


def estimate(
    model: TransformerShape,
    cluster: ClusterSpec,
    plan: StepPlan,
    *,
    batch: int,
    software: Software | None = None,
    check: bool = True,
) -> Estimate:
    """Predicts a training step. batch: sequences of a step. software: by default fused kernels in bfloat16.

    check: whether the plan must divide model, cluster and batch. Raises ConstraintError for a plan that does not fit
    model or cluster, ClusterError when the device lacks the precision.
    """
    return estimate_workload(Workload.of(model, cluster, plan, batch, software), check)


def estimate_workload(w: Workload, check: bool = True) -> Estimate:
    """`estimate` of what stands together already."""
    model, cluster, plan = w.model, w.cluster, w.plan
    peak_flops = w.peak_flops()
    if check:
        plan.parallel.check(model, cluster.size, w.batch, plan.micro_batch)
    plan.check()
    w = w.at(replace(plan, schedule=schedule_name(plan.schedule, plan.parallel.vpp)))
    p, m = w.parallel, w.microbatches
    layers = chunk_layers(model.layers, p.pp, p.V)
    costs = layer_costs(w)
    seconds, exposed = stage_seconds(model, layers, costs)
    sent_s, work = send_s(w), max(group_seconds(seconds, p.pp))
    dp_total, dp_exposed = data_parallel_s(w, busiest(seconds, layers), layers)
    memory, offload_s = offloaded(w, fullest_stage(w, layers), layers, work)
    t = StepSeconds(
        span=pipeline_s(w.plan.schedule, p.pp, m, p.V, seconds, sent_s),
        work=work,
        layer_exposed=max(exposed),
        send=sent_s,
        dp=dp_total,
        dp_exposed=dp_exposed,
        optimizer=adam_s(w, layers),
        offload=offload_s,
    )
    constants = w.software.constants
    jitter = 1 + constants.jitter * log2(cluster_nodes(cluster))
    step = (t.span + t.dp_exposed + t.optimizer + t.offload + constants.step_overhead_s) * jitter
    tokens = w.batch * model.seq_len
    return Estimate(
        step_time_s=step,
        tokens_per_s_per_device=tokens / step / cluster.size,
        mfu=model.flops_per_token() * tokens / step / cluster.size / peak_flops,
        memory_bytes=memory.to_dict(),
        comm=communication_by_kind(w, costs, t, m * max(map(sum, layers)), step),
        bubble_fraction=max(0.0, 1 - m * t.work / t.span),
        fits=memory.reserved <= USABLE_SHARE * w.device.memory_bytes,
        breakdown={
            "compute": m * t.work - m * t.layer_exposed,
            "exposed_layer_comm": m * t.layer_exposed,
            "bubble": t.span - m * t.work,
            "exposed_dp": t.dp_exposed,
            "optimizer": t.optimizer,
            "offload": t.offload,
            "overhead": step - t.span - t.dp_exposed - t.optimizer - t.offload,
        },
    )


def cluster_nodes(cluster: ClusterSpec) -> float:
    """How many nodes a cluster has, at least one."""
    return max(1.0, cluster.size / cluster.levels[0].group_size)


def communication_by_kind(
    w: Workload, costs: LayerCosts, t: StepSeconds, layer_runs: int, step_s: float
) -> dict[str, dict[str, float]]:
    """`Estimate.comm`. layer_runs: how often a step runs a layer on the fullest group."""
    p, m = w.parallel, w.microbatches
    seconds: dict[str, tuple[float, float]] = {}
    layer = costs.moe or costs.dense or costs.head
    for kind in ("tp", "cp", "ep"):
        if kind in layer.comm:
            seconds[kind] = layer_runs * sum(layer.comm[kind]), layer_runs * sum(layer.exposed[kind])
    if p.pp > 1:
        seconds["pp"] = 2 * m * p.V * t.send, 2 * (p.pp - 1) * t.send
    if p.data_ranks > 1:
        seconds["dp"] = t.dp, t.dp_exposed
    return {
        kind: {"total_s": total, "exposed_s": exposed, "exposed_share": exposed / step_s}
        for kind, (total, exposed) in seconds.items()
    }


def offloaded(w: Workload, memory: Memory, layers: Layers, work_s: float) -> tuple[Memory, float]:
    """(what is left on the device, seconds that the traffic to the host adds). work_s: of a microbatch."""
    host_Bps = w.device.host_bandwidth_Bps
    if w.plan.offload == "activations":
        held = microbatches_held(w.plan.schedule, 0, w.parallel.pp, w.microbatches, w.parallel.V)
        per_microbatch = memory.activations / held
        left = min(memory.activations, 2 * per_microbatch / max(1, max(map(sum, layers))))
        return replace(memory, activations=left), w.microbatches * max(0.0, 2 * per_microbatch / host_Bps - work_s)
    if w.plan.offload == "optimizer":
        return replace(memory, optimizer=0.0), memory.optimizer / 12 * (4 + 2) / host_Bps
    return memory, 0.0


def _fullest_params(w: Workload, layers: Layers) -> tuple[float, float]:
    """Parameters of the fullest stage on one rank: (all but experts, experts)."""
    embeddings = 2 if w.parallel.pp == 1 and not w.model.tied_embeddings and not w.model.experts else 1
    return stage_params(w, max(map(sum, layers)), embeddings)


def data_parallel_s(w: Workload, busy: tuple[float, float], layers: Layers) -> tuple[float, float]:
    """(total, exposed) seconds of gradient reduction and parameter gathering in one step. busy: from `busiest`.

    ZeRO-3 gathers parameters in every forward and backward and reduces gradients in every backward, each hidden behind
    that microbatch's compute; ZeRO-0..2 communicate once, hidden behind the first forward and the last backward; with V
    chunks a chunk's gradients are done while up to p microbatches of the other chunks remain. Nothing is hidden when
    the framework reduces late.
    """
    p, c, cluster, m = w.parallel, w.software.constants, w.cluster, w.microbatches
    grad_bytes, late = w.software.reduce_bytes, w.software.late_reduction
    if p.data_ranks == 1:
        return 0.0, 0.0
    F, BW = busy
    shared, experts = _fullest_params(w, layers)
    gather = reduce = 0.0
    for params, count, stride in ((shared, p.data_ranks, p.tp), (experts, p.expert_data_ranks, p.ep * p.expert_tp)):
        if p.zero >= 1:
            group = min(count, p.shard_group or count)
            gather += strided_time_s(cluster, "all_gather", 2 * params, stride, group)
            reduce += strided_time_s(cluster, "reduce_scatter", grad_bytes * params, stride, group)
            if group < count:
                reduce += strided_time_s(
                    cluster, "all_reduce", grad_bytes * params / group, stride * group, count // group
                )
        else:
            reduce += strided_time_s(cluster, "all_reduce", grad_bytes * params, stride, count)
    if p.zero == 3:
        total = m * (2 * gather + reduce)
        if late:
            return total, total
        forward = max(gather - F, c.zero3_exposed * gather)
        backward = max(gather + reduce - BW, c.zero3_exposed * (gather + reduce))
        return total, m * (forward + backward)
    if late:
        return gather + reduce, gather + reduce
    window = 1 / p.V + min(m, p.pp) * (p.V - 1) / p.V
    forward = max(gather - F * window, c.dp_exposed * gather)
    backward = max(reduce - BW * window, c.dp_exposed * reduce)
    return gather + reduce, forward + backward


def adam_s(w: Workload, layers: Layers) -> float:
    """Adam reads and writes about 34 bytes per parameter it owns."""
    p = w.parallel
    shared, experts = _fullest_params(w, layers)
    ranks = p.shard_group or p.data_ranks
    owned = shared / (ranks if p.zero else 1) + experts / (min(ranks, p.expert_data_ranks) if p.zero else 1)
    return 34 * owned / w.memory_Bps
