"""One training step of a transformer under a plan: seconds and bytes, by putting the parts together.

    step = pipeline(F, B, W per stage and microbatch) + exposed data-parallel communication + optimizer,

times a small loss per doubling of nodes. `pipeline` is the event simulator on the schedule's action table; once the
pipeline is full every further microbatch adds the same period, so only the first rounds are simulated. The period is
the slowest stage's work; in 1F1B, whose sends wait for each other, 2c (p-1)/p more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, log2
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.cluster.device import dtype_name
from autopar.costmodel import simulate
from autopar.costmodel.collective import strided_time_s
from autopar.costmodel.estimator.layer import Cost, StepConstants, Work, default_constants, head_cost, layer_cost
from autopar.costmodel.estimator.memory import Memory, microbatches_held, stage_memory
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.errors import ConstraintError
from autopar.ir import tables
from autopar.ir.actions import StageGraph


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


SIMULATED_ACTIONS = 1100
"""Larger pipelines are timed by the closed form, which is the simulator's answer for equal stages."""

USABLE_SHARE = 0.96
"""Share of the device's memory that a process can have before it runs out."""

_SCHEDULE_ALIASES = {
    "none": "1f1b",
    "1f1b (deepspeed)": "1f1b",
    "interleaved-1f1b": "interleaved",
    "interleaved 1f1b": "interleaved",
    "interleaved 1f1b (vpp not given)": "interleaved",
}
_ORDERS = {
    "gpipe": tables.gpipe,
    "1f1b": tables.one_f_one_b,
    "interleaved": tables.interleaved,
    "zb-h1": tables.zb_h1,
    "zb-h2": tables.zb_h2,
}
KNOWN_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v")


def schedule_name(name: str, vpp: int | None) -> str:
    """The canonical name; 1F1B with several chunks is interleaved. Raises ConstraintError for an unknown one."""
    key = (name or "1f1b").lower()
    key = _SCHEDULE_ALIASES.get(key, key)
    if key not in KNOWN_SCHEDULES:
        raise ConstraintError(f"unknown schedule {name!r}; known: {', '.join(KNOWN_SCHEDULES)}")
    if key == "1f1b" and (vpp or 1) > 1:
        return "interleaved"
    if key == "interleaved" and (vpp or 1) == 1:
        return "1f1b"
    return key


@lru_cache(maxsize=4096)
def chunk_layers(layers: int, p: int, V: int) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage's chunks, in model order round-robin over stages.

    Embedding and head count as a layer each where that makes the chunks even (and there are several); otherwise chunks
    differ by at most one layer and the last ones, next to the head, are the smaller.
    """
    chunks = p * V
    if chunks > 1 and layers % chunks and (layers + 2) % chunks == 0:
        counts = [(layers + 2) // chunks] * chunks
        counts[0] -= 1
        counts[-1] -= 1
    else:
        low, extra = divmod(layers, chunks)
        counts = [low] * chunks
        for i in range(extra):
            counts[chunks - 2 - i if extra < chunks else i] += 1
    return tuple(tuple(counts[c * p + i] for c in range(V)) for i in range(p))


@lru_cache(maxsize=256)
def _network(name: str, p: int, m: int, V: int) -> simulate.Network:
    graph = StageGraph.chain(p, V)
    return simulate.network(_ORDERS[name](graph, m), graph)


def pipeline_s(name: str, p: int, m: int, V: int, seconds: simulate.Durations, comm_s: float) -> float:
    """Seconds of one step's pipeline of p groups with V stages each. seconds: of (stage, kind); stage s is on group s % p."""
    work = group_seconds(seconds, p)
    slowest = max(work)
    if p == 1:
        return m * slowest
    if name == "zb-v":
        return m * slowest + 0.2 * (p - 1) * slowest + 2 * (p - 1) * comm_s
    if name == "zb-2p":
        in_flight = min(m, 2 * p - 1)
        lag = (p - 1) * (seconds[0, "B"] + 2 * comm_s) + (p - in_flight) * seconds[0, "F"]
        return m * slowest + max(0.0, lag) + (p - 1) * comm_s
    table_name = "zb-h1" if name == "zb-1p" else name
    part = simulated_rounds(table_name, p, m, V)
    period = slowest + (2 * comm_s * (p - 1) / p if table_name == "1f1b" else 0.0)
    if part:
        return simulate.longest_s(_network(table_name, p, part, V), seconds, comm_s) + (m - part) * period
    weights = min(group_seconds(seconds, p, "W"))
    saved = {"zb-h1": 2, "zb-h2": 2}.get(table_name, 0) * weights * (p - 1)
    fill = (sum(work) - slowest) / V + 2 * (p - 1) * comm_s - saved
    return slowest * min(m, p) + max(0, m - p) * period + max(0.0, fill)


def simulated_rounds(name: str, p: int, m: int, V: int) -> int:
    """Microbatches that `pipeline_s` runs through the simulator; 0 where it has a closed form."""
    if p == 1 or name in ("zb-2p", "zb-v"):
        return 0
    part = min(ceil(m / p), 2) * p if name == "interleaved" else min(m, 2 * p if name == "zb-h2" else p + 1)
    return part if 2 * p * V * part <= SIMULATED_ACTIONS else 0


def group_seconds(seconds: simulate.Durations, p: int, kinds: str = "FBW") -> list[float]:
    """Seconds of one microbatch's actions on every group."""
    found = [0.0] * p
    for (stage, kind), time_s in seconds.items():
        if kind in kinds:
            found[stage % p] += time_s
    return found


def estimate(
    *,
    model: TransformerShape,
    cluster: ClusterSpec,
    parallel: ParallelConfig,
    batch: int,
    micro_batch: int,
    recompute: str = "none",
    precision: str = "bfloat16",
    schedule: str = "1f1b",
    kernels: str = "fused",
    overlap_tp: bool = True,
    offload: str = "none",
    grad_bytes: float | None = None,
    reduce_bytes: float = 2.0,
    late_reduction: bool = False,
    buffer_bytes: float = 0.0,
    constants: StepConstants | None = None,
    check: bool = True,
) -> Estimate:
    """Predicts a training step. batch, micro_batch: sequences (whole, and per data-parallel rank at a time).

    recompute: none, selective (attention core, cheap operations), mlp, or full. precision of the products: float16,
    bfloat16, float8, mxfp8 (block-scaled), float4, float32. kernels: "fused" (Transformer Engine, compiled) or "eager".
    overlap_tp: whether the all-gathers and reduce-scatters of sequence parallelism overlap with their products.
    offload: to host memory, "none", "activations" (hidden behind compute as far as the host link allows), "optimizer".
    grad_bytes, reduce_bytes: of one gradient in memory (4 by default) and on the wire.
    Raises ConstraintError for a plan that does not fit model or cluster, ClusterError when the device lacks the dtype.
    """
    precision = precision if precision == "mxfp8" else dtype_name(precision)
    device = cluster.slowest(precision)
    device.peak("float8" if precision == "mxfp8" else precision)
    if check:
        parallel.check(model, cluster.size, batch, micro_batch)
    if recompute not in ("none", "selective", "mlp", "full"):
        raise ConstraintError(f"recompute is none, selective, mlp or full, got {recompute!r}")
    if offload not in ("none", "activations", "optimizer"):
        raise ConstraintError(f"offload is none, activations or optimizer, got {offload!r}")
    name = schedule_name(schedule, parallel.vpp)
    c = constants or default_constants()
    w = Work(model, cluster, device, parallel, micro_batch, precision, recompute, kernels, overlap_tp, c)
    p, m, V = parallel.pp, max(1, batch // (parallel.dp * micro_batch)), parallel.V
    dense = layer_cost(w, False) if model.moe_layers < model.layers else None
    moe = layer_cost(w, True) if model.experts else None
    head = head_cost(w)
    layers = chunk_layers(model.layers, p, V)
    seconds, exposed = stage_seconds(model, layers, dense, moe, head, p, V)
    comm_s = send_s(w)
    span = pipeline_s(name, p, m, V, seconds, comm_s)
    work = max(group_seconds(seconds, p))
    dp_total, dp_exposed = data_parallel_s(w, busiest(seconds, layers, p), layers, m, reduce_bytes, late_reduction)
    optimizer_s = adam_s(w, layers)
    memory = fullest_stage(
        model,
        parallel,
        layers,
        m=m,
        b=micro_batch,
        recompute=recompute,
        precision=precision,
        schedule=name,
        eager=kernels == "eager",
        grad_bytes=grad_bytes or 4.0,
        late_reduction=late_reduction,
        buffer_bytes=buffer_bytes,
    )
    offload_s = 0.0
    if offload == "activations":
        held = microbatches_held(name, 0, p, m, V)
        per_microbatch = memory.activations / held
        offload_s = m * max(0.0, 2 * per_microbatch / device.host_bandwidth_Bps - work)
        memory = replace(
            memory, activations=min(memory.activations, 2 * per_microbatch / max(1, max(map(sum, layers))))
        )
    elif offload == "optimizer":
        offload_s = memory.optimizer / 12 * (4 + 2) / device.host_bandwidth_Bps
        memory = replace(memory, optimizer=0.0)
    nodes = max(1.0, cluster.size / cluster.levels[0].group_size)
    jitter = 1 + c.jitter * log2(nodes)
    step = (span + dp_exposed + optimizer_s + offload_s + c.step_overhead_s) * jitter
    tokens = batch * model.seq_len
    comm: dict[str, dict[str, float]] = {}
    per_step = m * max(sum(stage) for stage in layers)
    main = moe or dense or head
    for kind in ("tp", "cp", "ep"):
        if kind in main.comm:
            total, out = per_step * sum(main.comm[kind]), per_step * sum(main.exposed[kind])
            comm[kind] = {"total_s": total, "exposed_s": out, "exposed_share": out / step}
    if p > 1:
        comm["pp"] = {
            "total_s": 2 * m * V * comm_s,
            "exposed_s": 2 * (p - 1) * comm_s,
            "exposed_share": 2 * (p - 1) * comm_s / step,
        }
    if parallel.dp * parallel.cp > 1:
        comm["dp"] = {"total_s": dp_total, "exposed_s": dp_exposed, "exposed_share": dp_exposed / step}
    bubble = max(0.0, 1 - m * work / span)
    peak = device.peak("float8" if precision == "mxfp8" else precision)
    return Estimate(
        step_time_s=step,
        tokens_per_s_per_device=tokens / step / cluster.size,
        mfu=model.flops_per_token() * tokens / step / cluster.size / peak,
        memory_bytes=memory.to_dict(),
        comm=comm,
        bubble_fraction=bubble,
        fits=memory.reserved <= USABLE_SHARE * device.memory_bytes,
        breakdown={
            "compute": m * work - m * max(exposed),
            "exposed_layer_comm": m * max(exposed),
            "bubble": span - m * work,
            "exposed_dp": dp_exposed,
            "optimizer": optimizer_s,
            "offload": offload_s,
            "overhead": step - span - dp_exposed - optimizer_s - offload_s,
        },
    )


def stage_seconds(
    model: TransformerShape,
    layers: tuple[tuple[int, ...], ...],
    dense: Cost | None,
    moe: Cost | None,
    head: Cost,
    p: int,
    V: int,
) -> tuple[dict[tuple[int, str], float], list[float]]:
    """Seconds of every (stage, kind), exposed communication included; and that communication per group."""
    seconds: dict[tuple[int, str], float] = {}
    exposed = [0.0] * p
    dense_left = model.layers - model.moe_layers
    one = [
        (c.F + c.exposed_forward, c.B + c.again + c.exposed_backward, c.W, c.exposed_forward + c.exposed_backward)
        if c is not None
        else (0.0, 0.0, 0.0, 0.0)
        for c in (dense, moe)
    ]
    for ch in range(V):
        for i in range(p):
            n = layers[i][ch]
            n_dense = min(n, dense_left) if moe else n
            dense_left -= n_dense
            F = B = W = 0.0
            for (cost_F, cost_B, cost_W, cost_exposed), count in zip(one, (n_dense, n - n_dense), strict=True):
                F, B, W = F + count * cost_F, B + count * cost_B, W + count * cost_W
                exposed[i] += count * cost_exposed
            if i == p - 1 and ch == V - 1:
                F += head.F + head.exposed_forward
                B += head.B + head.exposed_backward
                W += head.W
                if moe is not None and model.mtp_layers:
                    F, B, W = F + model.mtp_layers * moe.F, B + model.mtp_layers * moe.B, W + model.mtp_layers * moe.W
            s = ch * p + i
            seconds[s, "F"], seconds[s, "B"], seconds[s, "W"] = F, B, W
    return seconds, exposed


def send_s(w: Work) -> float:
    """Seconds to hand one microbatch's activations to the next stage."""
    p = w.parallel
    if p.pp == 1:
        return 0.0
    stride = p.tp * p.cp * p.dp
    return strided_time_s(w.cluster, "p2p", w.width * w.tokens * w.model.hidden / w.sequence_split, stride, 2)


def _local_params(w: Work, layers: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """Parameters of the fullest stage on one rank: (shared, experts)."""
    model, p = w.model, w.parallel
    n = max(sum(stage) for stage in layers)
    if model.experts:
        shared = n * model.layer_params(True, 0.0) / p.tp
        return shared + model.embedding_params / p.tp, n * model.experts / p.ep * model.mlp_params(
            model.expert_ffn
        ) / p.expert_tp
    ends = 2 if p.pp == 1 and not model.tied_embeddings else 1
    return (n * model.layer_params(False) + ends * model.embedding_params) / p.tp, 0.0


def busiest(seconds: dict[tuple[int, str], float], layers: tuple[tuple[int, ...], ...], p: int) -> tuple[float, float]:
    """(forward, backward) seconds of one microbatch on the group with most layers."""
    group = max(range(p), key=lambda i: sum(layers[i]))
    return group_seconds(seconds, p, "F")[group], group_seconds(seconds, p, "BW")[group]


def data_parallel_s(
    w: Work, busy: tuple[float, float], layers: tuple[tuple[int, ...], ...], m: int, grad: float, late: bool
) -> tuple[float, float]:
    """(total, exposed) seconds of gradient reduction and parameter gathering in one step. busy: from `busiest`.

    ZeRO-3 gathers parameters in every forward and backward and reduces gradients in every backward, each hidden behind
    that microbatch's compute; ZeRO-0..2 communicate once, hidden behind the first forward and the last backward; with V
    chunks a chunk's gradients are done while up to p microbatches of the other chunks remain. Nothing is hidden when
    the framework reduces late.
    """
    p, c, cluster = w.parallel, w.constants, w.cluster
    ranks = p.dp * p.cp
    if ranks == 1:
        return 0.0, 0.0
    F, BW = busy
    shared, experts = _local_params(w, layers)
    expert_ranks = max(1, ranks * p.tp // (p.ep * p.expert_tp))
    gather = reduce = 0.0
    for params, count, stride in ((shared, ranks, p.tp), (experts, expert_ranks, p.ep * p.expert_tp)):
        if p.zero >= 1:
            group = min(count, p.shard_group or count)
            gather += strided_time_s(cluster, "all_gather", 2 * params, stride, group)
            reduce += strided_time_s(cluster, "reduce_scatter", grad * params, stride, group)
            if group < count:
                reduce += strided_time_s(cluster, "all_reduce", grad * params / group, stride * group, count // group)
        else:
            reduce += strided_time_s(cluster, "all_reduce", grad * params, stride, count)
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


def adam_s(w: Work, layers: tuple[tuple[int, ...], ...]) -> float:
    """Adam reads and writes about 34 bytes per parameter it owns."""
    p = w.parallel
    shared, experts = _local_params(w, layers)
    ranks = p.shard_group or p.dp * p.cp
    expert_ranks = max(1, p.dp * p.cp * p.tp // (p.ep * p.expert_tp))
    owned = shared / (ranks if p.zero else 1) + experts / (min(ranks, expert_ranks) if p.zero else 1)
    return 34 * owned / (w.device.memory_bandwidth_Bps * w.device.curve.memory)


def fullest_stage(
    model: TransformerShape, p: ParallelConfig, layers: tuple[tuple[int, ...], ...], **how: Any
) -> Memory:
    """Memory of the stage that holds most; the first, the second, and the last are the candidates."""
    stages = sorted({0, min(1, p.pp - 1), p.pp - 1})
    options = [stage_memory(model, p, stage=i, layers=sum(layers[i]), **how) for i in stages]
    return max(options, key=lambda memory: memory.total)
