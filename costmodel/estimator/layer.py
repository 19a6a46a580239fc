"""The bill of one transformer layer, and of the head, on one rank for one microbatch (`costmodel/bill.py`).

Forward F, backward of the inputs B and of the weights W are sums over the layer's operations at their local shapes:
matrix products (the same shape penalty holds for the product, its dx and its dw), attention, and passes over
activations in memory. With T tokens on a rank, h hidden, q and kv head widths, f ffn, t = tp:

    products   T x (q+2kv)/t x h,  T x h x q/t,  T x 2f/t x h (gated),  T x h x f/t
    attention  2 T keys (q+v)/t FLOPs forward, 2.5 times that backward (flash)
    passes     the least bytes of norms, residuals, activations and dropout

Communication follows Korthikanti et al.: with sequence parallelism all-gather + reduce-scatter around each block,
otherwise all-reduce; of it the share `tp_exposed` is not hidden behind the products. Likewise cp, ep. In backward Megatron
gathers the rows of a sequence again for the gradients of weights, behind those of inputs, and scatters these behind those of
weights, also where nothing else overlaps; torch keeps what was gathered, but for selective checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.costmodel.bill import CallBill, Purpose, Work
from autopar.costmodel.collective import dispatch_time_s, strided_shape, strided_time_s
from autopar.costmodel.compute import aligned_share, matmul_time_s
from autopar.costmodel.estimator.workload import Workload
from autopar.costmodel.flash import attention_share, causal_tile
from autopar.costmodel.software import BEHIND_PRODUCTS, CAST_BYTES, LOGIT_BYTES, LOW_PRECISIONS, TORCH_RING_BYTES


@dataclass
class Seconds:
    """Seconds of what is computed: forward, backward of inputs, backward of weights."""

    F: float = 0.0
    B: float = 0.0
    W: float = 0.0


@dataclass(frozen=True)
class LayerBills:
    """The bills of the layers of a model: a dense layer and one with experts (None where it has none), the head, and
    the layer with experts that predicts a further token, whose messages and recomputation are left out."""

    dense: CallBill | None
    moe: CallBill | None
    head: CallBill
    further: CallBill | None


def layer_bills(w: Workload) -> LayerBills:
    """The bills of every kind of layer that the model has."""
    dense = layer_bill(w, False) if w.model.moe_layers < w.model.layers else None
    moe = layer_bill(w, True) if w.model.experts else None
    return LayerBills(dense, moe, head_bill(w), _further(w) if moe and w.model.mtp_layers else None)


def _further(w: Workload) -> CallBill:
    return layer_bill(w.at(replace(w.plan, recompute="none")), True).silent


def layer_bill(w: Workload, moe: bool) -> CallBill:
    """One layer. moe: with experts in place of the dense MLP."""
    cost = Seconds()
    attention_matmuls(w, cost)
    core_F, core_B = attention_core(w)
    cost.F += core_F
    cost.B += core_B
    before_F = cost.F
    unread_F = moe_mlp(w, cost) if moe else dense_mlp(w, cost, w.model.ffn, w.parts.mlp)
    unread_F *= w.software.recompute_stops
    mlp_F, products_F = cost.F - before_F, cost.F - core_F
    passes = memory_passes(w, moe)
    forward, backward = Work(cost.F) + passes, Work(cost.B) + times(passes, 1.5)
    messages_F, messages_B = communication(w, moe)
    if w.plan.recompute == "full":
        stops = w.software.recompute_stops and not moe
        sent = {what: s * made_again(w, what, stops) for what, s in messages_F.items()}
        backward += times(forward + Work(-unread_F), w.plan.recomputed) + Work(messages=sent)
    elif w.plan.recompute == "mlp":
        backward += Work(mlp_F - unread_F) + times(passes, 0.5)
    elif w.plan.recompute == "selective":
        if w.software.is_emitted:
            backward += Work(core_F) + passes
        elif w.model.attention == "materialised":
            backward += Work(core_F)
        elif w.parallel.zero == 3:
            backward += Work(unsaved_share(w, moe) * products_F) + passes
        else:
            backward += Work(0.1 * mlp_F if moe else 0.0) + times(passes, 0.5)
    forward += Work(messages=messages_F)
    return CallBill(forward, backward + Work(messages=messages_B), Work(cost.W), host_s(w, moe))


def made_again(w: Workload, purpose: Purpose, stops: bool) -> float:
    """Share of a layer's forward messages that full recomputation sends again. stops: before the last product, and what sends its
    results: of tp's messages a half, a quarter where rows of the sequence are gathered too."""
    last = (0.25 if w.parallel.sequence_parallel else 0.5) if stops and purpose.what == "tp" else 0.0
    return w.plan.recomputed * (1 - last)


def unsaved_share(w: Workload, moe: bool) -> float:
    """Share of a layer's products that torch's selective checkpoints by op make again: they save every second result of
    `torch.mm`, and none of a product in 8 bits, which is another op; the last one is read by nothing. Of experts half."""
    m = w.model
    if moe:
        return 0.5
    sizes = (m.q_width, m.kv_width, m.kv_width, m.v_width, *[m.ffn] * (1 + m.gated_mlp), m.ffn)
    return sum(sizes[:-1] if w.software.low_dtype else sizes[1:-1:2]) / sum(sizes)


def times(passes: Work, factor: float) -> Work:
    """The work of so many times the passes."""
    return Work(factor * passes.computed_s, factor * passes.fused_s, factor * passes.apart_s)


def host_s(w: Workload, moe: bool) -> float:
    """Seconds that the host needs to launch a layer."""
    host = w.software.layer_host_s + (w.software.mixture_host_s(w.model.experts / w.parallel.ep) if moe else 0.0)
    return host * (1 + w.plan.recomputed / 3 if w.plan.recompute == "full" else 1)


def product(
    w: Workload,
    cost: Seconds,
    shape: tuple[float, float, float],
    *,
    precision: str | None = None,
    copies: float = 1.0,
    share: float = 1.0,
    grouped: bool = False,
) -> float:
    """Adds a matrix product's forward, dx and dw, `copies` of it, and the quantisation passes of low precision. Gives the seconds
    of its forward.

    shape: (m, n, k). share: of a plain product's efficiency that this one reaches with aligned rows. grouped: the copies are one
    kernel.
    """
    m, n, k = shape
    dtype = precision or w.precision
    share *= aligned_share(w.device, dtype, (round(n), round(k)))
    seconds = copies * matmul_time_s(w.device, m, n, k, dtype, grouped=grouped) / share
    cost.F += seconds
    cost.B += seconds
    cost.W += seconds
    if dtype in LOW_PRECISIONS:
        per_byte = copies * w.software.cast_passes / w.memory_Bps
        cost.F += CAST_BYTES * m * k * per_byte
        cost.B += CAST_BYTES * m * n * per_byte
    return seconds


def side_by_side(w: Workload, *widths: float) -> tuple[float, ...]:
    """The widths of products of one input: a plain model makes each by itself, a framework all at once."""
    return widths if w.software.is_emitted else (sum(widths),)


def attention_matmuls(w: Workload, cost: Seconds) -> None:
    """The projections around attention."""
    m, t, T = w.model, w.parts.heads, w.tokens
    if m.mla:
        q_rank, kv_rank, nope, rope, v = m.mla
        product(w, cost, (T, q_rank + kv_rank + rope, m.hidden))
        product(w, cost, (T, m.q_width / t, q_rank))
        product(w, cost, (T, m.heads * (nope + v) / t, kv_rank))
    else:
        for width in side_by_side(w, m.q_width, m.kv_width, m.kv_width):
            product(w, cost, (T, width / t, m.hidden))
    product(w, cost, (T, m.hidden, m.v_width / t))


def attention_core(w: Workload) -> tuple[float, float]:
    """Seconds of softmax(QK)V, forward and backward, on the mean of layers. Kernels skip the upper triangle, but with a window
    nothing. Scores that are written are passed over in 16 bits by a softmax with its mask (4 bytes forward, 6 backward) and by
    dropout (5 each way)."""
    m, t, T, device = w.model, w.parts.heads, w.tokens, w.device
    if m.attention == "materialised":
        products = (
            matmul_time_s(device, m.seq_len, m.seq_len, m.hd, w.wide) * 2 * w.sequences * m.heads / t / w.parallel.cp
        )
        scores = m.heads / t * T * m.seq_len / w.memory_Bps
        return products + 9 * scores, 2 * products + 11 * scores
    windowed = 1 / m.window_every if m.window else 0.0
    flops = 2 * T * m.seq_len * (m.q_width + m.v_width) / t
    dtype = w.software.attention_dtype or w.wide
    seconds = []
    for products, added in zip((1.0, 2.5), TORCH_RING_BYTES, strict=True):
        way = {"eager": w.software.eager_attention, "backward": products > 1}
        below = (1 + causal_tile(device, m.seq_len, **way) / m.seq_len) / 2
        share = attention_share(device, m.seq_len, m.hd, dtype=dtype, **way) * w.software.attention_share
        merged = added * (w.parallel.cp - 1) * T * m.q_width / t if w.software.repeats_keys else 0.0
        seen = windowed + (1 - windowed) * below
        seconds.append(products * flops * seen / (device.peak(dtype) * share) + merged / w.memory_Bps)
    return seconds[0], seconds[1]


def dense_mlp(w: Workload, cost: Seconds, width: float, parts: float) -> float:
    """Up (and gate) and down. parts: that the width is cut into.

    Gives the forward seconds of down, which backward does not read."""
    for wide in side_by_side(w, *[width] * (1 + w.model.gated_mlp)):
        product(w, cost, (w.tokens, wide / parts, w.model.hidden))
    return product(w, cost, (w.tokens, w.model.hidden, width / parts))


def moe_mlp(w: Workload, cost: Seconds) -> float:
    """Router, grouped expert products (balanced routing), shared experts. Backward reads all results, for the gradients of the
    router's weights."""
    m, p = w.model, w.parallel
    tokens = w.tokens / (p.tp if p.expert_tp == 1 else 1)
    local = w.local_experts
    each = tokens * p.ep * m.topk / m.experts
    up = 2 if m.gated_mlp else 1
    wide = m.expert_ffn / w.parts.expert
    share = w.software.constants.grouped_share
    before_F = cost.F
    product(w, cost, (each, up * wide, m.hidden), copies=local, share=share, grouped=True)
    cost.B += 0.0 if w.software.keeps_rows else cost.F - before_F
    product(w, cost, (each, m.hidden, wide), copies=local, share=share, grouped=True)
    product(w, cost, (w.tokens / w.sequence_split, m.experts, m.hidden), precision=w.wide)
    if m.shared_experts:
        dense_mlp(w, cost, m.shared_experts * m.expert_ffn, w.mlp_parts(True))
    return 0.0


def memory_passes(w: Workload, moe: bool) -> Work:
    """Passes of norms, residuals, rotary or bias, activation, dropout in forward; backward moves half as much again.

    The least bytes per token, in 16 bits: 20 h (two norms, two residual additions), 4 (q + kv) (rotary), 2 (up + 1) f
    (activation). Routed tokens are moved `routed_passes` times whatever the kernels.
    """
    m, p = w.model, w.parallel
    up = 2 if m.gated_mlp else 1
    width = ((m.topk + m.shared_experts) * m.expert_ffn if moe else m.ffn) / w.mlp_parts(moe)
    per_token = 20 * m.hidden / w.sequence_split
    per_token += 4 * (m.q_width + m.kv_width) / w.parts.heads + 2 * (up + 1) * width
    least_s = w.tokens * per_token * w.width / 2 / w.memory_Bps
    apart_s = w.tokens * bytes_op_by_op(w, width) / w.memory_Bps
    moved = w.software.routed_passes * w.width * w.tokens * m.topk * m.hidden / p.tp if moe else 0.0
    return Work(moved / w.memory_Bps, least_s, apart_s)


def bytes_op_by_op(w: Workload, width: float) -> float:
    """Bytes per token that forward passes move where every op is a kernel, of an MLP of a width on a rank: norms in 32 bits
    between casts, two residual additions, of queries and keys two products, two halves put together, one negated and a sum, and
    the activation, times what it gates."""
    m = w.model
    norms = 2 * m.hidden * (8 + (2 * (w.width + 4) if w.width < 4 else 0)) / w.sequence_split
    turned = 11 * (m.q_width + m.kv_width) / w.parts.heads if m.gated_mlp else 0.0
    return norms + w.width * (6 * m.hidden / w.sequence_split + turned + (5 if m.gated_mlp else 2) * width)


Messages = dict[Purpose, float]


def communication(w: Workload, moe: bool) -> tuple[Messages, Messages]:
    """Seconds of tp, cp and ep messages of one layer: (forward, backward)."""
    m, p, cluster = w.model, w.parallel, w.cluster
    activations = w.width * w.tokens * m.hidden
    forward: Messages = {}
    backward: Messages = {}
    if p.tp > 1:
        blocks = 1 if moe and p.expert_tp == 1 else 2
        if p.sequence_parallel:
            one = strided_time_s(cluster, "all_gather", activations, 1, p.tp)
            forward[TP] = backward[TP] = 2 * blocks * one
            if w.software.regathers:
                backward[TP], backward[TP_BEHIND] = blocks * one, 2 * blocks * one
            elif w.plan.recompute == "selective" and p.zero == 3:
                backward[TP] += blocks * one
        else:
            one = strided_time_s(cluster, "all_reduce", activations, 1, p.tp)
            forward[WAITED] = blocks * one
            backward[TP_BEHIND if w.software.regathers else WAITED] = blocks * one
    if p.cp > 1:
        repeats = w.software.repeats_keys
        kv = w.width * w.tokens * (m.q_width + m.v_width if repeats else 2 * m.kv_width) / w.parts.heads * p.cp
        one = strided_time_s(cluster, "all_gather", kv, p.tp, p.cp)
        cp = Purpose("cp") if repeats else CP
        forward[cp], backward[cp] = one, (3 if repeats else 2) * one
    if moe and p.ep > 1:
        stride = p.tp if p.expert_tp > 1 or p.tp == 1 else 1
        shape = strided_shape(cluster.levels, stride, p.ep)
        once = w.software.dispatch == "once"
        one = dispatch_time_s(shape, w.width * (w.tokens / p.tp) * m.hidden, m.topk, p.ep, once)
        forward[EP], backward[EP] = 2 * one, (2 if w.software.keeps_rows else 3) * one
    return forward, backward


TP, CP, EP = Purpose("tp", "tp_exposed"), Purpose("cp", "cp_exposed"), Purpose("ep", "ep_exposed")
WAITED, TP_BEHIND = Purpose("tp"), Purpose("tp", BEHIND_PRODUCTS)


def head_bill(w: Workload) -> CallBill:
    """Final norm, logits and loss: products in 16 bits, the softmax in fp32 (`LOGIT_BYTES`)."""
    m, p = w.model, w.parallel
    cost = Seconds()
    product(w, cost, (w.tokens, m.vocab / w.parts.vocabulary, m.hidden), precision=w.wide)
    passes = LOGIT_BYTES * w.tokens * m.vocab / w.parts.vocabulary / w.memory_Bps
    messages_F: Messages = {}
    messages_B: Messages = {}
    if p.tp > 1:
        kind = "all_gather" if p.sequence_parallel else "all_reduce"
        activations = w.width * w.tokens * m.hidden
        one = strided_time_s(w.cluster, kind, activations, 1, p.tp)
        messages_F[HEAD], messages_B[HEAD] = one if p.sequence_parallel else 0.0, one
    heads = 1 + m.mtp_layers
    F, B = Work(heads * (cost.F + passes), messages=messages_F), Work(heads * (cost.B + passes), messages=messages_B)
    return CallBill(F, B, Work(heads * cost.W))


HEAD = Purpose("head")
