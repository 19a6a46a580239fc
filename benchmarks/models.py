"""The models that the benchmarks measure: a Llama of any shape, of the zoo's blocks, and a small GPT. Plain PyTorch."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.transformers import LlamaBlock


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


class Llama(nn.Module):
    """The next-token loss of ids: (batch, seq) against labels: (batch, seq); without labels the logits."""

    def __init__(self, shape: LlamaShape, seq: int) -> None:
        super().__init__()
        head_dim = shape.dim // shape.heads
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(
            LlamaBlock(shape.dim, shape.heads, shape.kv_heads, shape.ffn) for _ in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        angles = torch.outer(torch.arange(seq).float(), 500000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class GptBlock(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
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
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
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


def seeded_gpt(seq: int = 128, dim: int = 256) -> Gpt:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return Gpt(seq=seq, dim=dim)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """logits: (batch, seq, vocab), labels: (batch, seq)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
