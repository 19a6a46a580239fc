"""The transformer that a `TransformerShape` describes, as plain PyTorch, and shapes of published mixtures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.costmodel.estimator.shape import TransformerShape
from tests.zoo.transformers import rotary_tables, rotate

MIXTRAL = TransformerShape(
    layers=32,
    hidden=4096,
    heads=32,
    ffn=14336,
    vocab=32000,
    seq_len=4096,
    kv_heads=8,
    gated_mlp=True,
    experts=8,
    topk=2,
    moe_ffn=14336,
)
QWEN3_30B = TransformerShape(
    layers=48,
    hidden=2048,
    heads=32,
    head_dim=128,
    ffn=6144,
    vocab=151936,
    seq_len=4096,
    kv_heads=4,
    gated_mlp=True,
    experts=128,
    topk=8,
    moe_ffn=768,
)
DEEPSEEK_V3 = TransformerShape(
    61, 7168, 128, 18432, 129280, 4096, kv_heads=128, gated_mlp=True, experts=256, topk=8, moe_ffn=2048, shared_experts=1,
    first_dense_layers=3, mla=(1536, 512, 128, 64, 128), name="DeepSeek-V3",
)  # fmt: skip


def _norm(shape: TransformerShape) -> nn.Module:
    return nn.RMSNorm(shape.hidden, eps=1e-5) if shape.gated_mlp else nn.LayerNorm(shape.hidden)


class LowRankAttention(nn.Module):
    """DeepSeek's attention: queries, keys and values come out of narrow products; a part of every head, which keys share, is
    turned by the position."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        assert shape.mla is not None
        q_rank, self.kv_rank, self.nope, self.rope, self.v_dim = shape.mla
        self.heads = shape.heads
        self.q_down, self.q_norm = nn.Linear(shape.hidden, q_rank, bias=False), nn.RMSNorm(q_rank, eps=1e-5)
        self.q_up = nn.Linear(q_rank, shape.q_width, bias=False)
        self.kv_down = nn.Linear(shape.hidden, self.kv_rank + self.rope, bias=False)
        self.kv_norm = nn.RMSNorm(self.kv_rank, eps=1e-5)
        self.kv_up = nn.Linear(self.kv_rank, shape.heads * (self.nope + self.v_dim), bias=False)
        self.o = nn.Linear(shape.v_width, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], window: Tensor | None) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        narrow, turned = self.kv_down(x).split((self.kv_rank, self.rope), -1)
        kv = self.kv_up(self.kv_norm(narrow)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_still, q_turned = q.split((self.nope, self.rope), -1)
        k_still, v = kv.split((self.nope, self.v_dim), -1)
        k_turned = rotate(turned.unsqueeze(1), *rotary).expand(-1, self.heads, -1, -1)
        q, k = torch.cat((q_still, rotate(q_turned, *rotary)), -1), torch.cat((k_still, k_turned), -1)
        mixed = F.scaled_dot_product_attention(q, k, v, window, is_causal=window is None)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Attention(nn.Module):
    """Causal attention of grouped queries; scores are written to memory where the shape says so."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.head_dim, self.materialised = shape.hd, shape.attention == "materialised"
        bias = not shape.gated_mlp
        self.q = nn.Linear(shape.hidden, shape.q_width, bias)
        self.k = nn.Linear(shape.hidden, shape.kv_width, bias)
        self.v = nn.Linear(shape.hidden, shape.kv_width, bias)
        self.o = nn.Linear(shape.v_width, shape.hidden, bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, window: Tensor | None) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.materialised:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-1, -2)) * self.head_dim**-0.5
            mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        else:
            grouped = q.shape[1] != k.shape[1]
            mixed = F.scaled_dot_product_attention(q, k, v, window, is_causal=window is None, enable_gqa=grouped)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two layers, or three where the first is gated."""

    def __init__(self, shape: TransformerShape, width: int) -> None:
        super().__init__()
        bias = not shape.gated_mlp
        self.gate = nn.Linear(shape.hidden, width, bias) if shape.gated_mlp else None
        self.up = nn.Linear(shape.hidden, width, bias)
        self.down = nn.Linear(width, shape.hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))
        return out


class Mixture(nn.Module):
    """The experts that the router gives the largest probabilities, weighted by these, and the shared ones of every token."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.topk, self.act = shape.topk, "silu" if shape.gated_mlp else "gelu"
        inner, halves = shape.expert_ffn, 2 if shape.gated_mlp else 1
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(shape.experts, shape.hidden, halves, inner) * shape.hidden**-0.5)
        self.w_out = nn.Parameter(torch.randn(shape.experts, inner, shape.hidden) * inner**-0.5)
        self.shared = MLP(shape, shape.shared_experts * inner) if shape.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.topk)
        weights = weights / weights.sum(-1, keepdim=True)
        routed = autopar.experts(x, chosen, weights, self.w_in, self.w_out, act=self.act)
        return routed if self.shared is None else routed + self.shared(x)


class Block(nn.Module):
    """Norm, attention, norm, MLP or mixture; gated MLPs come with RMS norms and no biases, as in Llama, plain ones as in GPT."""

    def __init__(self, shape: TransformerShape, mixture: bool, windowed: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.windowed = _norm(shape), _norm(shape), windowed
        self.attention = LowRankAttention(shape) if shape.mla else Attention(shape)
        self.mlp = Mixture(shape) if mixture else MLP(shape, shape.ffn)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, window: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), rotary, window if self.windowed else None)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Transformer(nn.Module):
    """Returns the next-token loss of ids: (batch, seq) against labels: (batch, seq). Gated models turn queries and keys by
    their position, with tables in a dtype, the others look positions up."""

    def __init__(self, shape: TransformerShape, tables: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.gated_mlp else nn.Embedding(shape.seq_len, shape.hidden)
        dense = shape.layers - shape.moe_layers
        self.blocks = nn.ModuleList(
            Block(shape, i >= dense, bool(shape.window) and i % shape.window_every == 0) for i in range(shape.layers)
        )
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied_embeddings:
            self.head.weight = self.tokens.weight
        cos, sin = rotary_tables(shape.seq_len, shape.mla[3] if shape.mla else shape.hd)
        self.register_buffer("cos", cos.to(tables), persistent=False)
        self.register_buffer("sin", sin.to(tables), persistent=False)
        seen = torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool).tril() if shape.window else None
        window = None if seen is None else seen.triu(1 - shape.window)
        self.register_buffer("window", window, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        rotary = (self.cos, self.sin) if self.positions is None else None
        for block in self.blocks:
            x = block(x, rotary, self.window)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
