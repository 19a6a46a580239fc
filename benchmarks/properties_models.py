"""Models that `benchmarks.properties` draws cases of, beside those of its list: kinds that the search was not built on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ViT(nn.Module):
    """Images of 224 x 224 in patches of 16, the mean of their blocks' rows into classes."""

    def __init__(self, width: int, layers: int, heads: int, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = encoders(width, layers, heads)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows.mean(1))


class Clip(nn.Module):
    """Images and texts of 77 tokens, each the nearest to its own of the batch."""

    def __init__(self, width: int = 1024, text: int = 768, layers: int = 6) -> None:
        super().__init__()
        self.images = ViT(width, layers, width // 64, 512)
        self.embedding = nn.Embedding(49408, text)
        self.blocks = encoders(text, layers, text // 64)
        self.head = nn.Linear(text, 512)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        rows = self.embedding(ids)
        for block in self.blocks:
            rows = block(rows)
        seen, read = F.normalize(self.images(images), dim=-1), F.normalize(self.head(rows.mean(1)), dim=-1)
        alike = seen @ read.T * self.scale.exp()
        own = torch.arange(alike.shape[0], device=alike.device)
        return F.cross_entropy(alike, own) + F.cross_entropy(alike.T, own)


class Conformer(nn.Module):
    """Speech of 80 bands, a quarter of its frames into tokens."""

    def __init__(self, width: int = 1024, layers: int = 6, heads: int = 16, vocab: int = 5000) -> None:
        super().__init__()
        self.fewer = nn.Sequential(nn.Conv2d(1, 256, 3, 2, 1), nn.ReLU(), nn.Conv2d(256, 256, 3, 2, 1), nn.ReLU())
        self.first = nn.Linear(256 * 20, width)
        self.blocks = nn.ModuleList(ConformerBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, frames: Tensor) -> Tensor:
        maps = self.fewer(frames.unsqueeze(1))
        batch, channels, steps, bands = maps.shape
        rows = self.first(maps.transpose(1, 2).reshape(batch, steps, channels * bands))
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


class ConformerBlock(nn.Module):
    """Attention and a convolution over time between two halves of a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.last = half(width), half(width)
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm_rows, self.wider = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.over_time = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.norm_groups, self.mixed = nn.GroupNorm(8, width), nn.Conv1d(width, width, 1)
        self.norm_out = nn.LayerNorm(width)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows + 0.5 * self.first(rows)
        asked = self.norm(rows)
        rows = rows + self.attention(asked, asked, asked, need_weights=False)[0]
        gated = F.glu(self.wider(self.norm_rows(rows).transpose(1, 2)), 1)
        rows = rows + self.mixed(F.silu(self.norm_groups(self.over_time(gated)))).transpose(1, 2)
        return self.norm_out(rows + 0.5 * self.last(rows))


class Scans(nn.Module):
    """A language model of gated scans over the sequence, without attention."""

    def __init__(self, width: int = 1536, layers: int = 8, vocab: int = 32000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Scan(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.embedding(ids)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


class Scan(nn.Module):
    """A convolution over the last four steps and a decayed sum over all before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wider = nn.RMSNorm(width), nn.Linear(width, 4 * width)
        self.over_time = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.decay, self.out = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        values, gates = self.wider(self.norm(rows)).chunk(2, -1)
        values = F.silu(self.over_time(values.transpose(1, 2))[..., : values.shape[1]]).transpose(1, 2)
        decayed = F.logsigmoid(self.decay(values)).cumsum(1).clamp(min=-20)
        values = torch.cumsum(values * torch.exp(-decayed), 1) * torch.exp(decayed)
        return rows + self.out(values * F.silu(gates))


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, width: int = 1024, vocab: int = 50000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids))[0])


class TwoTowers(nn.Module):
    """Bags of two large tables, each through a tower of its own."""

    def __init__(self, users: int = 2_000_000, items: int = 500_000, width: int = 128) -> None:
        super().__init__()
        self.users, self.items = nn.EmbeddingBag(users, width), nn.EmbeddingBag(items, width)
        self.of_users, self.of_items = tower(width), tower(width)
        self.head = nn.Linear(512, 2)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.head(torch.cat([self.of_users(self.users(users)), self.of_items(self.items(items))], -1))


def tower(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, 256))


def half(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))


def encoders(width: int, layers: int, heads: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        for _ in range(layers)
    )
