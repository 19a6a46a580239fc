"""The transformer that a `TransformerShape` describes, as plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.costmodel.estimator.shape import TransformerShape
from tests.zoo.transformers import rotary_tables, rotate


def _norm(shape: TransformerShape) -> nn.Module:
    return nn.RMSNorm(shape.hidden, eps=1e-5) if shape.gated_mlp else nn.LayerNorm(shape.hidden)


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

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.materialised:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-1, -2)) * self.head_dim**-0.5
            mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Norm, attention, norm, MLP; gated MLPs come with RMS norms and no biases, as in Llama, plain ones as in GPT."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        bias = not shape.gated_mlp
        self.norm_1, self.attention, self.norm_2 = _norm(shape), Attention(shape), _norm(shape)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias) if shape.gated_mlp else None
        self.up = nn.Linear(shape.hidden, shape.ffn, bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), rotary)
        y = self.norm_2(x)
        out: Tensor = x + self.down(F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y))
        return out


class Transformer(nn.Module):
    """Returns the next-token loss of ids: (batch, seq) against labels: (batch, seq). Gated models turn queries and keys by
    their position, the others look positions up."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.gated_mlp else nn.Embedding(shape.seq_len, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied_embeddings:
            self.head.weight = self.tokens.weight
        cos, sin = rotary_tables(shape.seq_len, shape.hd)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        rotary = (self.cos, self.sin) if self.positions is None else None
        for block in self.blocks:
            x = block(x, rotary)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
