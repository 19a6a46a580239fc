"""One training step of a transformer under a plan: its bill by closed formulas, read (`costmodel/bill.py`), and its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.costmodel.bill import (
    Bill,
    ParameterTraffic,
    StepSeconds,
    cluster_nodes,
    group_seconds,
    stage_seconds,
    step_seconds,
)
from autopar.costmodel.collective import strided_time_s
from autopar.costmodel.estimator.layer import HEAD, LayerBills, layer_bills
from autopar.costmodel.estimator.memory import Memory, fullest_stage, stage_params
from autopar.costmodel.estimator.pipeline_time import (
    Layers,
    chunk_layers,
    fullest,
    groups_of,
    pipeline_s,
    send_s,
    stage_bills,
)
from autopar.costmodel.estimator.schedules import microbatches_held, schedule_name
from autopar.costmodel.estimator.shape import TransformerShape
from autopar.costmodel.estimator.workload import StepPlan, Workload, not_emitted
from autopar.costmodel.simulate import Durations
from autopar.costmodel.software import Software
from autopar.errors import ConstraintError


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a step. Seconds, bytes of the fullest rank; shares are of the step's time.

    comm[kind] = {"total_s", "non_overlapped_s", "exposed_share"} for tp, cp, ep, pp, dp. breakdown: seconds that add up to
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


def estimate(
    model: TransformerShape,
    cluster: ClusterSpec,
    plan: StepPlan,
    *,
    batch: int,
    software: Software | None = None,
    check: bool = True,
) -> Estimate:
    """Predicts a training step. batch: sequences of a step. software: by default fused kernels in 16 bits.

    check: whether the plan must divide model, cluster and batch. Raises ConstraintError for a plan that does not fit
    model or cluster, ClusterError when the device lacks the precision.
    """
    return estimate_workload(Workload.of(model, cluster, plan, batch, software), check)


def estimate_workload(w: Workload, check: bool = True) -> Estimate:
    """`estimate` of what stands together already."""
    model, cluster, plan = w.model, w.cluster, w.plan
    peak_flops = w.peak_flops()
    if check:
        plan.parallel.check(model, cluster.size, w.batch, plan.micro_batch, w.software.is_emitted)
        if w.software.is_emitted and (reason := not_emitted(w)):
            raise ConstraintError(reason)
    plan.check()
    w = w.at(replace(plan, schedule=schedule_name(plan.schedule, plan.parallel.vpp)))
    p, m = w.parallel, w.microbatches
    layers = chunk_layers(model.layers, p.pp, p.V, model.mtp_layers)
    bills = layer_bills(w)
    bill = workload_bill(w, layers, bills)
    seconds, _ = stage_seconds(bill.stages, w.software)
    work = max(group_seconds(seconds, bill.groups))
    memory, offload_s = offloaded(w, fullest_stage(w, layers), layers, work)
    once = replace(bill.stages[fullest(layers)], rest_s=offload_s)
    stages = tuple(once if s == fullest(layers) else stage for s, stage in enumerate(bill.stages))
    read = step_seconds(replace(bill, stages=stages), w.software)
    step = read.step_s
    layer_exposed = m * max(sum(s for what, s in group.items() if what != HEAD.what) for group in read.non_overlapped_s)
    tokens = w.batch * model.seq_len
    return Estimate(
        step_time_s=step,
        tokens_per_s_per_device=tokens / step / cluster.size,
        mfu=model.flops_per_token() * tokens / step / cluster.size / peak_flops,
        memory_bytes=memory.to_dict(),
        comm=communication_by_kind(w, bills, once.parameters.total_s(m), read, m * max(map(sum, layers))),
        bubble_fraction=max(0.0, 1 - m * work / read.span_s),
        fits=memory.reserved <= min(device.memory_bytes for _, device in cluster.devices),
        breakdown={
            "compute": m * work - layer_exposed,
            "exposed_layer_comm": layer_exposed,
            "bubble": read.span_s - m * work,
            "exposed_dp": read.parameters_s,
            "optimizer": read.optimizer_s,
            "offload": read.rest_s,
            "overhead": read.overhead_s,
        },
    )


def workload_bill(w: Workload, layers: Layers, bills: LayerBills) -> Bill:
    """The bill of a step. Parameters are counted on the fullest group: it is the slowest to send and to update them."""
    p, m = w.parallel, w.microbatches
    stages = stage_bills(w.model, layers, bills)
    full = fullest(layers)
    stages[full] = replace(stages[full], parameters=parameter_traffic(w, layers), optimizer_s=update_s(w, layers))

    def pipeline(seconds: Durations) -> float:
        return pipeline_s(w.plan.schedule, p.pp, m, p.V, seconds, send_s(w))

    return Bill(tuple(stages), groups_of(p.pp, p.V), m, pipeline, cluster_nodes(w.cluster))


def communication_by_kind(
    w: Workload, bills: LayerBills, dp_s: float, read: StepSeconds, layer_runs: int
) -> dict[str, dict[str, float]]:
    """`Estimate.comm`. dp_s: seconds of parameters' messages alone. layer_runs: how often a step runs a layer on the
    fullest group."""
    p, m = w.parallel, w.microbatches
    seconds: dict[str, tuple[float, float]] = {}
    for work in (bills.moe or bills.dense or bills.head).works:
        for purpose, alone_s in work.messages.items():
            total, exposed = seconds.get(purpose.what, (0.0, 0.0))
            share = w.software.exposed_share(purpose.overlap)
            seconds[purpose.what] = total + layer_runs * alone_s, exposed + layer_runs * share * alone_s
    if p.pp > 1:
        sent_s = send_s(w)
        seconds["pp"] = 2 * m * p.V * sent_s, 2 * (p.pp - 1) * sent_s
    if p.data_ranks > 1:
        seconds["dp"] = dp_s, read.parameters_s
    return {
        kind: {"total_s": total, "non_overlapped_s": exposed, "exposed_share": exposed / read.step_s}
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


def parameter_traffic(w: Workload, layers: Layers) -> ParameterTraffic:
    """Gradient reduction and parameter gathering of the fullest stage.

    ZeRO-3 gathers parameters in every forward and backward, ZeRO-2 and 3 reduce gradients in every backward; the rest is once a
    step.
    """
    p, software = w.parallel, w.software
    grad_bytes = software.reduce_bytes or 4.0
    copy_bytes = software.copy_bytes or (
        w.width if p.zero == 3 else 4.0
    )  # parameters are cast before they are gathered
    if p.data_ranks == 1:
        return ParameterTraffic()
    shared, experts = _fullest_params(w, layers)
    gather = reduce = 0.0
    for params, count, stride in ((shared, p.data_ranks, p.tp), (experts, p.expert_data_ranks, p.ep * p.expert_tp)):
        if p.zero >= 1:
            group = min(count, p.shard_group or count)
            gather += messages_s(w, "all_gather", copy_bytes * params, params, stride, group)
            reduce += messages_s(w, "reduce_scatter", grad_bytes * params, params, stride, group)
            if group < count:
                reduce += messages_s(
                    w, "all_reduce", grad_bytes * params / group, params, stride * group, count // group
                )
        else:
            reduce += messages_s(w, "all_reduce", grad_bytes * params, params, stride, count)
    if p.zero == 3:
        return ParameterTraffic(gather, gather + reduce)
    if p.zero == 2 and not w.software.late_reduction:
        return ParameterTraffic(each_reduce_s=reduce, gather_s=gather)
    return ParameterTraffic(reduce_s=reduce, gather_s=gather)


def messages_s(w: Workload, kind: str, nbytes: float, params: float, stride: int, ranks: int) -> float:
    """Seconds of messages of so many bytes for so many parameters: emitted programs send them in buckets, larger weights alone (a
    layer has about seven), frameworks as if at once."""
    messages = 1.0
    if w.software.is_emitted and params:
        weight = w.model.layer_params(False) / 7 / w.parallel.tp
        messages = max(1.0, nbytes / max(w.software.bucket_bytes, weight * nbytes / params))
    return messages * strided_time_s(w.cluster, kind, nbytes / messages, stride, ranks)


def update_s(w: Workload, layers: Layers) -> float:
    """Seconds of Adam, which reads and writes about 34 bytes per parameter it owns, and of passes that add up gradients."""
    p = w.parallel
    bytes_moved = 0.0
    ranks = p.shard_group or p.data_ranks
    for params, shards in zip(_fullest_params(w, layers), (ranks, min(ranks, p.expert_data_ranks)), strict=True):
        owned = params / (shards if p.zero else 1)
        bytes_moved += 34 * owned + added_bytes(w, params, owned)
    return bytes_moved / w.memory_Bps


def added_bytes(w: Workload, params: float, owned: float) -> float:
    """Bytes that passes move in a step to add up so many gradients in 32 bits: the first is cast, further ones are read beside
    the sum that they are added to; sums of ZeRO-2 and 3 are of shards."""
    if not w.software.gradient_passes:
        return 0.0
    first = w.microbatches if w.parallel.zero >= 2 else 1
    cast = first * (4 + w.width) * params if w.width < 4 else 0.0
    return cast + (w.microbatches - first) * (8 + w.width) * params + (first - 1) * 12 * owned
