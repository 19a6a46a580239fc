"""One training step of a transformer under a plan: its bill by closed formulas, read (`costmodel/bill.py`), and its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.costmodel.bill import Bill, StepSeconds, cluster_nodes, group_seconds, stage_seconds, step_seconds
from autopar.costmodel.estimator.layer import HEAD, LayerBills, layer_bills
from autopar.costmodel.estimator.memory import Memory, fullest_stage
from autopar.costmodel.estimator.parameters import parameter_traffic, update_s
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
