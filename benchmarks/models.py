"""The models that the benchmarks measure: a Llama of any shape, and a small GPT. Plain PyTorch, nothing of autopar."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """`ffn` is the width of SwiGLU; `heads` query heads share `kv_heads` key heads."""

    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int

    @staticmethod
    def of_width(layers: int, dim: int, vocab: int = 32000) -> LlamaShape:
        """Llama's proportions at any width: heads of up to 128, four query heads to a key head, ffn about 8/3 dim."""
        heads = max(dim // 128, 4)
        ffn = (8 * dim // 3 + 255) // 256 * 256
        return LlamaShape(layers, dim, ffn, heads, max(heads // 4, min(heads, 8)), vocab)


LLAMA_405B = LlamaShape(layers=126, dim=16384, ffn=53248, heads=128, kv_heads=8, vocab=128256)


class LlamaAttention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.dim // shape.heads
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q = self.wq(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = LlamaAttention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Returns the next-token loss of ids: (batch, seq) against labels: (batch, seq)."""

    def __init__(self, shape: LlamaShape, seq: int) -> None:
        super().__init__()
        head_dim = shape.dim // shape.heads
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        angles = torch.outer(torch.arange(seq).float(), 500000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class GptBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm_2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Logits of ids: (batch, seq). 256 wide and 6 deep: 5.0 million parameters."""

    def __init__(self, vocab: int = 512, seq: int = 128, dim: int = 256, heads: int = 8, layers: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(torch.randn(seq, dim) * 0.02)
        self.blocks = nn.ModuleList(GptBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """logits: (batch, seq, vocab), labels: (batch, seq)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
