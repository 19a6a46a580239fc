"""Seconds of one transformer layer, of the head, and of their communication, on one rank for one microbatch.

Forward F, backward of the inputs B and of the weights W are sums over the layer's operations at their local shapes:
matrix products (the same shape penalty holds for the product, its dx and its dw), attention, and passes over
activations in memory. With T tokens on a rank, h hidden, q and kv head widths, f ffn, t = tp:

    products   T x (q+2kv)/t x h,  T x h x q/t,  T x 2f/t x h (gated),  T x h x f/t
    attention  2 T keys (q+v)/t forward, 2.5 times that backward (flash)
    passes     bytes of norms, residuals, activations and dropout; `fused_passes` or `eager_passes` times the least

Communication follows Korthikanti et al.: with sequence parallelism all-gather + reduce-scatter around each block,
otherwise all-reduce; of it the share `tp_exposed` is not hidden behind the products. Likewise cp, ep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cluster import ClusterSpec
from autopar.costmodel.collective import strided_shape, strided_time_s
from autopar.costmodel.compute import attention_share, matmul_time_s
from autopar.costmodel.estimator.workload import LOW_PRECISIONS, Workload


@dataclass
class Cost:
    """Seconds: forward, backward of inputs, backward of weights, recomputed forward; communication by kind.

    comm[kind] = (seconds in forward, seconds in backward); exposed likewise, already multiplied by its share.
    """

    F: float = 0.0
    B: float = 0.0
    W: float = 0.0
    again: float = 0.0
    comm: dict[str, tuple[float, float]] = field(default_factory=dict)
    exposed: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add_comm(self, kind: str, forward: float, backward: float, share: float) -> None:
        """Adds communication of which `share` is exposed."""
        f, b = self.comm.get(kind, (0.0, 0.0))
        self.comm[kind] = (f + forward, b + backward)
        f, b = self.exposed.get(kind, (0.0, 0.0))
        self.exposed[kind] = (f + forward * share, b + backward * share)

    @property
    def total_s(self) -> float:
        """One microbatch's forward and backward, exposed communication included."""
        return self.F + self.B + self.W + self.again + self.exposed_forward + self.exposed_backward

    @property
    def exposed_forward(self) -> float:
        """Exposed seconds of a forward."""
        return sum(f for f, _ in self.exposed.values())

    @property
    def exposed_backward(self) -> float:
        """Exposed seconds of a backward."""
        return sum(b for _, b in self.exposed.values())


@dataclass(frozen=True)
class LayerCosts:
    """What a model is made of: a dense layer and one with experts (None where it has none), and the head."""

    dense: Cost | None
    moe: Cost | None
    head: Cost


def layer_costs(w: Workload) -> LayerCosts:
    """The costs of every kind of layer that the model has."""
    dense = layer_cost(w, False) if w.model.moe_layers < w.model.layers else None
    return LayerCosts(dense, layer_cost(w, True) if w.model.experts else None, head_cost(w))


def layer_cost(w: Workload, moe: bool) -> Cost:
    """One layer. moe: with experts in place of the dense MLP."""
    cost = Cost()
    attention_matmuls(w, cost)
    core_F, core_B = attention_core(w)
    cost.F += core_F
    cost.B += core_B
    mlp_F = cost.F
    if moe:
        moe_mlp(w, cost)
    else:
        dense_mlp(w, cost, w.model.ffn, w.tokens)
    mlp_F = cost.F - mlp_F
    products_F = cost.F - core_F
    passes_F, passes_B = memory_passes(w, moe)
    cost.F += passes_F
    cost.B += passes_B
    communication(w, cost, moe)
    if w.plan.recompute == "full":
        recompute_everything(cost)
    elif w.plan.recompute == "mlp":
        cost.again = mlp_F + 0.5 * passes_F
    elif w.plan.recompute == "selective":
        if w.model.attention == "materialised":
            cost.again = core_F
        elif w.parallel.zero == 3:
            cost.again = passes_F + 0.5 * products_F
        else:
            cost.again = 0.5 * passes_F + (0.1 * mlp_F if moe else 0.0)
    stretch_to_host_time(w, cost, moe)
    return cost


def recompute_everything(cost: Cost) -> None:
    """The backward runs the forward again, its communication included."""
    cost.again = cost.F
    for kind in ("tp", "cp", "ep"):
        if kind in cost.comm:
            (f, b), (ef, eb) = cost.comm[kind], cost.exposed[kind]
            cost.comm[kind], cost.exposed[kind] = (f, b + f), (ef, eb + ef)


def stretch_to_host_time(w: Workload, cost: Cost, moe: bool) -> None:
    """A layer takes no less than the host needs to launch it."""
    c = w.software.constants
    host = c.moe_host_s + c.expert_host_s * w.model.experts / w.parallel.ep if moe else c.dense_host_s
    host *= 4 / 3 if w.plan.recompute == "full" else 1
    busy = cost.F + cost.B + cost.W + cost.again
    if busy < host:
        stretch = host / busy
        cost.F, cost.B, cost.W, cost.again = (x * stretch for x in (cost.F, cost.B, cost.W, cost.again))


def product(
    w: Workload,
    cost: Cost,
    m: float,
    n: float,
    k: float,
    *,
    precision: str | None = None,
    copies: float = 1.0,
    share: float = 1.0,
) -> None:
    """Adds a matrix product's forward, dx and dw, `copies` of it, and the quantisation passes of low precision."""
    dtype = precision or w.precision
    seconds = copies * matmul_time_s(w.device, m, n, k, dtype) / share
    cost.F += seconds
    cost.B += seconds
    cost.W += seconds
    if dtype in LOW_PRECISIONS:
        passes = w.software.constants.fp8_cast if dtype == "float8" else w.software.constants.mx_cast
        per_byte = copies * passes / w.memory_Bps
        cost.F += 4 * m * k * per_byte
        cost.B += 4 * m * n * per_byte


def attention_matmuls(w: Workload, cost: Cost) -> None:
    """The projections around attention."""
    m, t, T = w.model, w.parallel.tp, w.tokens
    if m.mla:
        q_rank, kv_rank, nope, rope, v = m.mla
        product(w, cost, T, q_rank + kv_rank + rope, m.hidden)
        product(w, cost, T, m.q_width / t, q_rank)
        product(w, cost, T, m.heads * (nope + v) / t, kv_rank)
    else:
        product(w, cost, T, (m.q_width + 2 * m.kv_width) / t, m.hidden)
    product(w, cost, T, m.hidden, m.v_width / t)


def attention_core(w: Workload) -> tuple[float, float]:
    """Seconds of softmax(QK)V, forward and backward. Kernels skip the upper triangle, but not what a window hides."""
    m, t, T, device = w.model, w.parallel.tp, w.tokens, w.device
    if m.attention == "materialised":
        products = (
            matmul_time_s(device, m.seq_len, m.seq_len, m.hd, w.wide)
            * 2
            * w.plan.micro_batch
            * m.heads
            / t
            / w.parallel.cp
        )
        scores = m.heads / t * T * m.seq_len / w.memory_Bps
        return products + 9 * scores, 2 * products + 9 * scores
    keys = m.seq_len if m.window else m.seq_len / 2
    flops = 2 * T * keys * (m.q_width + m.v_width) / t
    share = attention_share(device, m.seq_len, m.hd, eager=w.eager)
    forward = flops / (device.peak(w.wide) * share)
    return forward, 2.5 * forward


def dense_mlp(w: Workload, cost: Cost, width: float, tokens: float) -> None:
    """Up (and gate) and down."""
    up = 2 if w.model.gated_mlp else 1
    product(w, cost, tokens, up * width / w.parallel.tp, w.model.hidden)
    product(w, cost, tokens, w.model.hidden, width / w.parallel.tp)


def moe_mlp(w: Workload, cost: Cost) -> None:
    """Router, grouped expert products (balanced routing), shared experts."""
    m, p = w.model, w.parallel
    tokens = w.tokens / (p.tp if p.expert_tp == 1 else 1)
    local = m.experts / p.ep
    each = tokens * p.ep * m.topk / m.experts
    up = 2 if m.gated_mlp else 1
    wide = m.expert_ffn / p.expert_tp
    share = w.software.constants.grouped_share
    product(w, cost, each, up * wide, m.hidden, copies=local, share=share)
    product(w, cost, each, m.hidden, wide, copies=local, share=share)
    product(w, cost, w.tokens / w.sequence_split, m.experts, m.hidden, precision=w.wide)
    if m.shared_experts:
        dense_mlp(w, cost, m.shared_experts * m.expert_ffn, w.tokens)


def memory_passes(w: Workload, moe: bool) -> tuple[float, float]:
    """Seconds of norms, residuals, rotary or bias, activation, dropout: least bytes times the kernels' factor.

    Forward per token, in 16 bits: 20 h (two norms, two residual additions), 4 (q + kv) (rotary), 2 (up + 1) f
    (activation). Backward moves half as much again.
    """
    m, p = w.model, w.parallel
    factor = w.software.constants.eager_passes if w.eager else w.software.constants.fused_passes
    up = 2 if m.gated_mlp else 1
    width = (m.topk + m.shared_experts) * m.expert_ffn if moe else m.ffn
    per_token = 20 * m.hidden / w.sequence_split + (4 * (m.q_width + m.kv_width) + 2 * (up + 1) * width) / p.tp
    nbytes = factor * w.tokens * per_token * w.width / 2
    if moe:
        nbytes += w.software.constants.permute_passes * w.width * w.tokens * m.topk * m.hidden / p.tp
    forward = nbytes / w.memory_Bps
    return forward, 1.5 * forward


def communication(w: Workload, cost: Cost, moe: bool) -> None:
    """Adds tp, cp and ep communication of one layer."""
    m, p, c, cluster = w.model, w.parallel, w.software.constants, w.cluster
    activations = w.width * w.tokens * m.hidden
    if p.tp > 1:
        blocks = 1 if moe and p.expert_tp == 1 else 2
        if p.sequence_parallel:
            one = strided_time_s(cluster, "all_gather", activations, 1, p.tp)
            cost.add_comm("tp", 2 * blocks * one, 3 * blocks * one, c.tp_exposed if w.software.overlap_tp else 1.0)
        else:
            one = strided_time_s(cluster, "all_reduce", activations, 1, p.tp)
            cost.add_comm("tp", blocks * one, blocks * one, 1.0)
    if p.cp > 1:
        kv = 2 * w.width * w.tokens * m.kv_width / p.tp * p.cp
        one = strided_time_s(cluster, "all_gather", kv, p.tp, p.cp)
        cost.add_comm("cp", one, 2 * one, c.cp_exposed)
    if moe and p.ep > 1:
        stride = p.tp if p.expert_tp > 1 or p.tp == 1 else 1
        one = dispatch_s(cluster, w.width * (w.tokens / p.tp) * m.hidden, m.topk, stride, p.ep)
        cost.add_comm("ep", 2 * one, 2 * one, c.ep_exposed)


def dispatch_s(cluster: ClusterSpec, token_bytes: float, topk: int, stride: int, ep: int) -> float:
    """Seconds to send each token to its topk experts (or back), once per group of a level that has any of them.

    With G groups a token has G (1 - (1 - 1/G)^topk) of them to visit, (G-1)/G of these across the level.
    """
    slowest, latency, groups, inner = 0.0, 0.0, 1, 1
    for fan, level, touched in strided_shape(cluster.levels, stride, ep):
        groups = ep // inner
        visits = groups * (1 - (1 - 1 / groups) ** topk) * (groups - 1) / groups
        across = 1.0 if inner > 1 else (fan - 1) / fan * groups / max(1, groups - 1)
        slowest = max(slowest, token_bytes * visits * across / level.rate_Bps(touched))
        latency += level.base_s + min(fan - 1, 16) * level.latency_s
        inner *= fan
    return slowest + latency


def head_cost(w: Workload) -> Cost:
    """Final norm, logits and loss: products in 16 bits, the softmax in fp32 (about 12 bytes a logit each way)."""
    m, p = w.model, w.parallel
    cost = Cost()
    product(w, cost, w.tokens, m.vocab / p.tp, m.hidden, precision=w.wide)
    passes = 12 * w.tokens * m.vocab / p.tp / w.memory_Bps
    cost.F += passes
    cost.B += passes
    if p.tp > 1:
        kind = "all_gather" if p.sequence_parallel else "all_reduce"
        activations = w.width * w.tokens * m.hidden
        one = strided_time_s(w.cluster, kind, activations, 1, p.tp)
        cost.add_comm("tp", one if p.sequence_parallel else 0.0, one, 1.0)
    heads = 1 + m.mtp_layers
    cost.F, cost.B, cost.W = cost.F * heads, cost.B * heads, cost.W * heads
    return cost
