"""Inference: seconds to read a prompt and to write each further token, and the bytes held meanwhile.

Prefill is the forward pass of training's layer model. Decoding one token is bound by memory: every step reads all
weights of a rank once and the keys and values of every sequence, and pays the latency of its collectives:

    T_token = pipeline depth * (launches + (weights + cache) / bandwidth + 2 all-reduces per layer)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cluster import ClusterSpec
from autopar.cluster.device import dtype_bytes
from autopar.cluster.process import tensor_room
from autopar.costmodel.bill import call_seconds
from autopar.costmodel.collective import strided_time_s
from autopar.costmodel.estimator.layer import head_bill, layer_bill
from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape
from autopar.costmodel.estimator.workload import StepPlan, Workload
from autopar.costmodel.software import Software

KERNELS_PER_LAYER = 12
"""Kernels that a fused layer launches when it decodes one token."""


@dataclass(frozen=True)
class InferenceEstimate:
    """Seconds to the first token, seconds per further token of the whole batch, tokens per second and device, bytes."""

    prefill_s: float
    per_token_s: float
    tokens_per_s_per_device: float
    memory_bytes: dict[str, float]
    fits: bool


def estimate_inference(
    *,
    model: TransformerShape,
    cluster: ClusterSpec,
    parallel: ParallelConfig,
    batch: int,
    prompt: int,
    new_tokens: int = 256,
    precision: str | None = None,
) -> InferenceEstimate:
    """Predicts serving `batch` sequences at once on each data-parallel replica. precision: by default 16 bits, as all have.

    Raises ConstraintError for a plan that does not fit model or cluster.
    """
    parallel.check(model, cluster.size, batch * parallel.dp, batch)
    device, precision = cluster.pace(0, cluster.size), precision or cluster.half_dtype
    plan, software = StepPlan(parallel, batch), Software(precision=precision)
    work = Workload(replace(model, seq_len=prompt), cluster, device, plan, software, batch)
    p = parallel
    forward = 0.0
    for moe, count in ((False, model.layers - model.moe_layers), (True, model.moe_layers)):
        if count:
            forward += count * call_seconds(layer_bill(work, moe), work.software).F
    hop = (
        strided_time_s(cluster, "p2p", 2 * batch * prompt * model.hidden / p.tp, p.tp * p.cp * p.dp, 2)
        if p.pp > 1
        else 0.0
    )
    prefill = forward + head_bill(work).F.computed_s * batch / work.tokens + (p.pp - 1) * hop
    expert_weights = model.moe_layers * model.experts / p.ep * model.mlp_params(model.expert_ffn) / p.expert_tp
    dense_weights = (model.params - model.moe_layers * model.experts * model.mlp_params(model.expert_ffn)) / p.tp
    weights = dtype_bytes(precision) * (dense_weights + expert_weights) / p.pp
    context = prompt + new_tokens / 2
    per_token_kv = (model.mla[1] + model.mla[3]) if model.mla else 2 * model.kv_width / p.tp
    cache = 2 * batch * context * per_token_kv * model.layers / p.pp / p.cp
    read = (weights + cache) / work.memory_Bps
    reduce = strided_time_s(cluster, "all_reduce", 2 * batch * model.hidden, 1, p.tp)
    layers = model.layers / p.pp
    stage = read + layers * (KERNELS_PER_LAYER * device.launch_overhead_s + 2 * reduce)
    per_token = p.pp * stage + (p.pp - 1) * hop / max(1, prompt)
    held = {
        "parameters": weights,
        "kv_cache": cache * (prompt + new_tokens) / context,
        "temporary": 8.0 * batch * prompt * model.hidden,
    }
    held["total"] = sum(held.values())
    rate = batch * new_tokens / (prefill + new_tokens * per_token) / (p.tp * p.pp * p.cp)
    room = tensor_room(cluster, {"dp": p.dp, "cp": p.cp, "tp": p.tp}, device, device.memory_bytes)
    return InferenceEstimate(prefill, per_token, rate, held, held["total"] <= room)
