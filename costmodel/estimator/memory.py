"""Bytes held by one rank: parameters, gradients, optimizer state, activations, buffers, and the allocator's slack.

`stage_memory` adds up what a stage of a plan holds: its states as ZeRO shards them (Rajbhandari et al. 2020), and a layer's
activations (Korthikanti et al. 2022, for more kinds of layers) times the layers times the microbatches that the schedule
holds there. The texts' own formulas are in `tests/oracles/transformer_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster.process import fragmentation, process_bytes
from autopar.costmodel.estimator.schedules import microbatches_held
from autopar.costmodel.estimator.workload import Workload
from autopar.costmodel.software import LOW_PRECISIONS
from autopar.runtime.kernels.losses import chunk_rows


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank. `total` is what tensors take at the peak; `reserved` adds what the allocator loses to
    fragmentation (slack: fragmented is its share) and what the process takes itself (`autopar.cluster.process`): this must fit
    on the device."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0
    buffers: float = 0.0
    process: float = 0.0
    fragmented: float = 0.0

    @property
    def total(self) -> float:
        """Peak bytes of tensors."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary + self.buffers

    @property
    def slack(self) -> float:
        """Bytes lost to fragmentation."""
        return self.fragmented * self.total

    @property
    def reserved(self) -> float:
        """Bytes the process takes from the device."""
        return self.total + self.slack + self.process

    def to_dict(self) -> dict[str, float]:
        """Bytes by kind, with slack, process, reserved and total."""
        kinds = {kind: nbytes for kind, nbytes in self.__dict__.items() if kind != "fragmented"}
        return {**kinds, "slack": self.slack, "reserved": self.reserved, "total": self.total}


def layer_activation_bytes(w: Workload, recompute: str) -> float:
    """The bytes that one layer keeps for its backward, one microbatch. Dropout masks are counted for GPT blocks with scores kept.

    Low precision keeps the inputs of its products in one byte; fp32 doubles everything.
    """
    model, p, T = w.model, w.parallel, w.tokens
    if recompute == "full":
        return (2 if w.full_precision else 1) * 2 * T * model.hidden / w.sequence_split
    if w.software.is_emitted:
        return kept_by_ops(w, recompute == "selective")
    wide = 1.0 if w.precision in LOW_PRECISIONS else 2.0
    mask = 0.0 if model.gated_mlp or model.attention == "flash" else 2.0
    per_token = model.hidden * (4 + 2 * wide + mask) / w.sequence_split
    per_token += (2 * (model.q_width + 2 * model.kv_width) + wide * model.v_width) / p.tp
    mlp_bytes = 2 * (1 + model.gated_mlp) + wide
    if model.experts:
        routed = model.topk * (wide * model.hidden + model.expert_ffn * mlp_bytes)
        shared = model.shared_experts * model.expert_ffn * mlp_bytes
        per_token += (routed + shared) / p.tp
    else:
        kept = 0.0 if recompute == "mlp" else 0.5 if recompute == "selective" and p.zero == 3 else 1.0
        per_token += kept * model.ffn * mlp_bytes / p.tp
    scores = 0.0
    if model.attention == "materialised" and recompute != "selective":
        scores = 5 * model.heads / p.tp * T * model.seq_len
    return (2 if w.full_precision else 1) * (T * per_token + scores)


def kept_by_ops(w: Workload, again: bool) -> float:
    """The same in emitted programs, one microbatch: every op keeps what its gradient reads, and experts keep no rows.

    Norms leave all rows of a sequence that products gather. again: attention and what is pointwise is made again, of which what
    products made is kept, of queries and keys also before they are turned.
    """
    model = w.model
    halves = 1 + model.gated_mlp
    turned = model.q_width + model.kv_width if model.gated_mlp else 0
    per_token = 2 * model.hidden / w.sequence_split + (0.0 if again else 2 * model.hidden)
    per_token += (model.q_width + 2 * model.kv_width + (turned if again else model.v_width)) / w.parts.heads
    width = model.shared_experts * model.expert_ffn if model.experts else model.ffn
    per_token += halves * (1 if again else 2) * width / w.mlp_parts(model.experts > 0)
    if model.attention == "materialised" and not again:
        per_token += 2 * model.heads / w.parts.heads * model.seq_len
    return w.width * w.tokens * per_token


def most_for_a_moment(w: Workload, tables: int, has_head: bool) -> float:
    """Bytes that an emitted program needs beside what it keeps, in the layer, look-up or head that needs most: gradients of what
    it computes with, and those of its weights, in low precision and in full, while there is a sum to add them to.

    tables: in the stage, of which ZeRO-2 and 3 have whole gradients under way: in a layer one, else those of the microbatch
    before too.
    """
    model = w.model
    added = 2 * w.width if w.microbatches > 1 else 0.0
    rows = w.width * w.tokens
    halves = 1 + model.gated_mlp
    if model.experts:
        inside = 2 * model.hidden + (3 * halves + 1) * model.expert_ffn / w.parts.expert
        layer = rows * model.topk * inside + added * stage_params(w, 1, 0)[1]
    else:
        ffn = model.ffn / w.parts.mlp
        layer = rows * (model.hidden + (1 + halves) * ffn) + added * model.hidden * ffn
    table = added * model.embedding_params / w.parts.vocabulary
    head = rows * 2 * model.hidden / w.sequence_split + logits(w) + table
    sent = sent_table(w)
    all_sent = sent * (tables if w.microbatches > 1 else min(tables, 1))
    once = layer + made_again(w) + (sent if tables else 0.0)
    return max(once, all_sent + (table if tables else 0.0), all_sent + head if has_head else 0.0)


def logits(w: Workload) -> float:
    """Bytes of the logits that are there at once in an emitted program, those of one chunk of tokens, and of the sum over chunks
    of the gradient of the head's weight."""
    tokens = min(w.tokens, chunk_rows(w.model.hidden, w.device.runs_as))
    sums = 4 * w.model.embedding_params if tokens < w.tokens else 0
    return (w.width * tokens * w.model.vocab + sums) / w.parts.vocabulary


def sent_table(w: Workload) -> float:
    """Bytes of a table's gradient in 32 bits on its way to the shards of ZeRO-2 and 3."""
    p = w.parallel
    return 4 * w.model.embedding_params / w.parts.vocabulary if p.zero >= 2 and p.data_ranks > 1 else 0.0


def sent_last(w: Workload, tables: int) -> float:
    """Bytes beside the shards of gradients when a step sends its last one, the first table's: its own, in low precision and in
    full. Where tp cuts entries ZeRO cuts features, which are packed: then also its copy, and those of a layer and of further
    tables, whose memory is kept to be used again. tables: in the stage."""
    full = sent_table(w)
    alone = full * (1 + w.width / 4 if w.width < 4 else 1)
    return alone + tables * full + 4 * sum(stage_params(w, 1, 0)) if full and w.parallel.tp > 1 else alone


def made_again(w: Workload) -> float:
    """Bytes of one layer that are there while it runs: recomputed activations, and gathered parameters."""
    model, p = w.model, w.parallel
    nbytes = layer_activation_bytes(w, "none") if w.plan.recompute == "full" else 0.0
    if p.zero == 3:
        nbytes += 2 * 2 * over_tp(w, model.layer_params(True, 1 / p.ep) if model.experts else model.layer_params(False))
    return nbytes


def stage_params(w: Workload, layers: int, embeddings: int) -> tuple[float, float]:
    """Parameters on one rank of a stage, before ZeRO: (all but experts, experts). embeddings: tables in the stage."""
    model = w.model
    layer_params = model.layer_params(True, 0.0) if model.experts else model.layer_params(False)
    shared = layers * over_tp(w, layer_params) + embeddings * model.embedding_params / w.parts.vocabulary
    expert_params = model.mlp_params(model.expert_ffn) if model.experts else 0
    return shared, layers * w.local_experts * expert_params / w.parts.expert


def over_tp(w: Workload, layer_params: float) -> float:
    """How many of a layer's parameters a rank holds."""
    attention = w.model.attention_params()
    return attention / w.parts.heads + (layer_params - attention) / w.mlp_parts(w.model.experts > 0)


def stage_memory(w: Workload, stage: int, layers: int) -> Memory:
    """Bytes of one rank of a stage that holds `layers` layers (experts where the model has them)."""
    model, p, T = w.model, w.parallel, w.tokens
    embeddings = (stage == 0) + (stage == p.pp - 1 and not (model.tied_embeddings and p.pp == 1))
    weights, gradients, optimizer = state_bytes(w, *stage_params(w, layers, embeddings))
    held = microbatches_held(w.plan.schedule, stage, p.pp, w.microbatches, p.V)
    kept = layer_activation_bytes(w, w.plan.recompute)
    if w.plan.recomputed < 1:
        kept += (1 - w.plan.recomputed) * (layer_activation_bytes(w, "none") - kept)
    activations = held * layers * kept
    if stage == p.pp - 1:
        activations += 2 * T * model.hidden / w.sequence_split
    if w.software.is_emitted:
        temporary = most_for_a_moment(w, embeddings, stage == p.pp - 1)
        if w.microbatches == 1:
            last = sent_last(w, embeddings) if stage == 0 else 0.0
            gradients = max(0.0, gradients + last - activations - temporary)
    else:
        temporary = 4 * T * model.hidden / w.sequence_split + made_again(w)
        temporary += 6 * T * model.vocab / p.tp if stage == p.pp - 1 else 0.0
        if stage == 0 and not model.gated_mlp:
            activations += held * T * model.hidden / w.sequence_split
    buffers = w.software.buffer_bytes + (4 * T * model.hidden if p.tp > 1 else 0.0)
    axes = p.axes if w.software.is_emitted else {"dp": p.dp, "cp": p.cp, "tp": p.tp}
    process = sum(process_bytes(w.cluster, axes, w.device, p.ep).values())
    return Memory(weights, gradients, optimizer, activations, temporary, buffers, process, fragmentation(w.device))


def state_bytes(w: Workload, shared: float, experts: float) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, optimizer state) of that many parameters, as ZeRO shards them."""
    p, software = w.parallel, w.software
    data_ranks = p.shard_group or p.data_ranks
    weights = gradients = optimizer = 0.0
    moments = 2 * software.moment_bytes
    in_full = w.full_precision or software.is_emitted
    master = 4.0 if in_full or (w.eager and p.zero >= 2) else 2.0
    for params, ranks in ((shared, data_ranks), (experts, min(p.expert_data_ranks, data_ranks))):
        weights += master * params / (ranks if p.zero == 3 else 1)
        gradients += software.grad_bytes * params / (ranks if p.zero >= 2 and not software.late_reduction else 1)
        optimizer += (moments if in_full else 6 + moments - master) * params / (ranks if p.zero >= 1 else 1)
    return weights, gradients, optimizer


def fullest_stage(w: Workload, layers: tuple[tuple[int, ...], ...]) -> Memory:
    """Memory of the stage that holds most; the first, the second, and the last are the candidates, in emitted programs also the
    first with most layers."""
    counts = [sum(chunks) for chunks in layers]
    fullest = counts.index(max(counts)) if w.software.is_emitted else 0
    stages = sorted({0, min(1, w.parallel.pp - 1), fullest, w.parallel.pp - 1})
    return max((stage_memory(w, i, sum(layers[i])) for i in stages), key=lambda memory: memory.total)
