"""A language model with the layout of Llama in plain PyTorch, with the arithmetic that transformers gives it.

The norm's mean and root are in float32, the loss is of float32 logits against labels shifted by one; there is no cache, no mask
and no repeated head. `Traits` are what its relatives add to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Traits:
    """biased: query, key and value have a bias. normed: queries and keys are normed head by head."""

    biased: bool = False
    normed: bool = False


TWINS = {"llama": Traits(), "mistral": Traits(), "qwen2": Traits(biased=True), "qwen3": Traits(normed=True)}
"""The traits of plain twins by model type of transformers."""


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (batch, heads, positions, width)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Block(nn.Module):
    """config: of transformers, with the field names of Llama's."""

    def __init__(self, config: Any, traits: Traits) -> None:
        super().__init__()
        dim, ffn, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.width = head_width(config)
        queries, keys = config.num_attention_heads * self.width, config.num_key_value_heads * self.width
        self.wq = nn.Linear(dim, queries, bias=traits.biased)
        self.wk = nn.Linear(dim, keys, bias=traits.biased)
        self.wv = nn.Linear(dim, keys, bias=traits.biased)
        self.wo = nn.Linear(queries, dim, bias=False)
        self.query_norm, self.key_norm = (
            Norm(self.width, eps) if traits.normed else nn.Identity(),
            Norm(self.width, eps) if traits.normed else nn.Identity(),
        )
        self.attention_norm, self.ffn_norm = Norm(dim, eps), Norm(dim, eps)
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, positions, dim)."""
        normed = self.attention_norm(x)
        q = rotated(self.query_norm(self._heads(self.wq(normed))).transpose(1, 2), cos, sin)
        k = rotated(self.key_norm(self._heads(self.wk(normed))).transpose(1, 2), cos, sin)
        v = self._heads(self.wv(normed)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width))


class Twin(nn.Module):
    """Returns the loss of the next token."""

    def __init__(self, config: Any, traits: Traits) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, traits) for _ in range(config.num_hidden_layers))
        self.width = head_width(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """ids, labels: (batch, positions)."""
        x = self.embed(ids)
        half = self.width // 2
        powers = 10000.0 ** (-torch.arange(half, device=ids.device) / half)
        angles = torch.arange(ids.shape[1], device=ids.device).float()[:, None] * powers
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        following = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())
