"""Bytes held by one rank: parameters, gradients, optimizer state, activations, buffers, and the allocator's slack.

First the closed forms of the texts (Korthikanti et al. 2022 for activations, Rajbhandari et al. 2020 for ZeRO), exact
on their tables; then `stage_memory`, which adds them up for a stage of a plan by the microbatches its schedule holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from autopar.costmodel.estimator.shape import ParallelConfig, TransformerShape

MIXED_ADAM_K = 12
"""Bytes per parameter of fp32 master weights and Adam's two moments."""


def zero_bytes(
    params: float, ranks: int, stage: int, weight: float = 2, grad: float = 2, K: float = MIXED_ADAM_K
) -> float:
    """Model-state bytes per rank: Z0 (w+g+K)P, Z1 (w+g)P + KP/N, Z2 wP + (g+K)P/N, Z3 (w+g+K)P/N."""
    kept = {0: weight + grad + K, 1: weight + grad, 2: weight, 3: 0.0}[stage]
    return params * (kept + (weight + grad + K - kept) / ranks)


def korthikanti_layer_bytes(
    s: int, b: int, h: int, a: int, t: int = 1, *, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Activation bytes of one GPT layer (16 bits, 4h MLP, scores kept unless recompute is selective or full)."""
    if recompute == "full":
        return 2 * s * b * h
    scores = 0.0 if recompute == "selective" else 5 * a * s / (h * t)
    if sequence_parallel:
        return s * b * h * (34 / t + scores)
    return s * b * h * (10 + 24 / t + scores)


def korthikanti_total_bytes(
    s: int, b: int, h: int, a: int, L: int, v: int, t: int, p: int, V: int, *, sequence_parallel: bool, recompute: str
) -> float:
    """Activations of the first stage under 1F1B with V chunks: L layers times 1 + (p-1)/(pV), plus input and output."""
    layers = L * (1 + (p - 1) / (p * V) if V > 1 else 1.0)
    split = t if sequence_parallel else 1
    extras = s * b * h * p / split
    if p == 1:
        extras += 4 * s * b * h / split + 4 * s * b * v / t
    one = korthikanti_layer_bytes(s, b, h, a, t, sequence_parallel=sequence_parallel, recompute=recompute)
    return layers * one + extras


def checkpoint_every_sqrt(layers: int) -> int:
    """Uniform checkpoints that hold O(sqrt(N)) activations: one every sqrt(N) layers."""
    return max(1, round(sqrt(layers)))


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank. `total` is what tensors take at the peak; `reserved` adds what the allocator loses to
    fragmentation (slack) and the process itself (runtime): this must fit on the device."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """Peak bytes of tensors."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary + self.buffers

    @property
    def slack(self) -> float:
        """Bytes lost to fragmentation."""
        return SLACK * (self.activations + self.temporary)

    @property
    def reserved(self) -> float:
        """Bytes the process takes from the device."""
        return self.total + self.slack + RUNTIME_BYTES

    def to_dict(self) -> dict[str, float]:
        """Bytes by kind, with slack, runtime, reserved and total."""
        kinds = dict(self.__dict__)
        return {**kinds, "slack": self.slack, "runtime": RUNTIME_BYTES, "reserved": self.reserved, "total": self.total}


RUNTIME_BYTES = 1.0e9
"""Driver context, library workspaces and communicator buffers of one GPU process."""
SLACK = 0.03
"""Share of activations and temporaries that the allocator loses to fragmentation."""


def layer_activation_bytes(
    model: TransformerShape, p: ParallelConfig, b: int, recompute: str, precision: str, moe: bool, eager: bool = False
) -> float:
    """What one layer keeps for its backward, one microbatch. Dropout masks are counted for GPT blocks with scores kept.

    Low precision keeps the inputs of its products in one byte; fp32 doubles everything.
    """
    T = b * model.seq_len / p.cp
    split = p.tp if p.sequence_parallel else 1
    if recompute == "full":
        return 2 * T * model.hidden / split
    if precision in ("float32", "tfloat32", "float64"):
        return 2 * layer_activation_bytes(model, p, b, recompute, "bfloat16", moe, eager)
    wide = 1.0 if precision in ("float8", "mxfp8", "float4") else 2.0
    mask = 0.0 if model.gated_mlp or model.attention == "flash" else 2.0
    per_token = model.hidden * (4 + 2 * wide + mask) / split
    per_token += (2 * (model.q_width + 2 * model.kv_width) + wide * model.v_width) / p.tp
    if moe:
        wide_tokens = model.topk * (wide * model.hidden + model.expert_ffn * (2 * (1 + model.gated_mlp) + wide))
        shared = model.shared_experts * model.expert_ffn * (2 * (1 + model.gated_mlp) + wide)
        per_token += (wide_tokens + shared) / p.tp
    else:
        kept = 0.0 if recompute == "mlp" else 0.5 if recompute == "selective" and p.zero == 3 else 1.0
        per_token += kept * model.ffn * (2 * (1 + model.gated_mlp) + wide) / p.tp
    scores = 0.0
    if model.attention == "materialised" and recompute != "selective":
        scores = 5 * model.heads / p.tp * T * model.seq_len
    return T * per_token + scores


def microbatches_held(schedule: str, stage: int, p: int, m: int, V: int) -> float:
    """Microbatches (of a whole stage) whose activations a stage holds at its peak."""
    if p == 1:
        return 1.0
    if schedule == "gpipe":
        return float(m)
    if schedule == "interleaved":
        return min(float(m), (2 * (p - 1 - stage) + (V - 1) * p + 1) / V)
    if schedule in ("zb-h2", "zb-2p"):
        return float(min(m, 2 * (p - stage) - 1 + stage))
    if schedule in ("zb-h1", "zb-1p", "zb-v"):
        return float(min(m, p))
    return float(min(p - stage, m))


def stage_memory(
    model: TransformerShape,
    p: ParallelConfig,
    *,
    stage: int,
    layers: int,
    m: int,
    b: int,
    recompute: str,
    precision: str,
    schedule: str,
    eager: bool = False,
    grad_bytes: float = 4.0,
    late_reduction: bool = False,
    buffer_bytes: float = 0.0,
    training: bool = True,
) -> Memory:
    """Bytes of one rank of a stage that holds `layers` layers (experts where the model has them).

    late_reduction: gradients are reduced after the whole backward, so all of them are held at the peak whatever ZeRO
    shards. buffer_bytes: communication buckets of the framework.
    """
    moe = bool(model.experts)
    shared_body = layers * (model.layer_params(moe, 0.0) if moe else model.layer_params(False)) / p.tp
    expert_body = layers * model.experts / p.ep * model.mlp_params(model.expert_ffn) / p.expert_tp if moe else 0.0
    ends = (stage == 0) + (stage == p.pp - 1 and not (model.tied_embeddings and p.pp == 1))
    shared_body += ends * model.embedding_params / p.tp
    data_ranks = p.shard_group or p.dp * p.cp
    expert_ranks = max(1, p.dp * p.cp * p.tp // (p.ep * p.expert_tp))
    if not training:
        T = b * model.seq_len / p.cp
        kv = 2 * 2 * T * model.kv_width / p.tp * layers
        return Memory(2 * (shared_body + expert_body), activations=kv, temporary=8 * T * model.hidden)
    weights = gradients = optimizer = 0.0
    full = precision in ("float32", "tfloat32", "float64")
    master = 4.0 if full or (eager and p.zero >= 2) else 2.0
    for params, ranks in ((shared_body, data_ranks), (expert_body, min(expert_ranks, data_ranks))):
        weights += master * params / (ranks if p.zero == 3 else 1)
        gradients += grad_bytes * params / (ranks if p.zero >= 2 and not late_reduction else 1)
        optimizer += (8 if full else 14 - master) * params / (ranks if p.zero >= 1 else 1)
    held = microbatches_held(schedule, stage, p.pp, m, p.V)
    per_layer = layer_activation_bytes(model, p, b, recompute, precision, moe, eager)
    activations = held * layers * per_layer
    T = b * model.seq_len / p.cp
    split = p.tp if p.sequence_parallel else 1
    temporary = 4 * T * model.hidden / split
    if recompute == "full":
        temporary += layer_activation_bytes(model, p, b, "none", precision, moe, eager)
    if stage == 0 and not model.gated_mlp:
        activations += held * T * model.hidden / split
    if stage == p.pp - 1:
        logits = T * model.vocab / p.tp
        activations += 2 * T * model.hidden / split
        temporary += 6 * logits
    if p.zero == 3:
        temporary += 2 * 2 * (model.layer_params(moe, 1 / p.ep) if moe else model.layer_params(False)) / p.tp
    buffers = buffer_bytes + (4 * T * model.hidden if p.tp > 1 else 0.0)
    return Memory(weights, gradients, optimizer, activations, temporary, buffers)
