"""The small models whose plans are measured on calibrated machines: each a function to (model, batch, loss function).

Every call gives the same weights and the same batch. A `loss` of None: the model returns it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import make_batch
from benchmarks.models import Gpt, Llama, LlamaShape, next_token_loss, seeded_gpt

Made = tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor] | None]
Model = Callable[[], Made]


class Mlp(nn.Module):
    """The loss of classifying x: (batch, dim)."""

    def __init__(self, dim: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.head = nn.Linear(dim, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


class Conv(nn.Module):
    """The loss of classifying images: (batch, 3, height, width) by residual convolutions."""

    def __init__(self, channels: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Bags(nn.Module):
    """The loss of classifying bags of words: (batch, words) by the mean of their embeddings; most parameters are its table's."""

    def __init__(self, words: int = 4096, dim: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.head = nn.Linear(dim, 10)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.table(words).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


def _seeded() -> None:
    torch.manual_seed(0)


def gpt() -> Made:
    """5.0 million parameters, 8 sequences of 128."""
    return seeded_gpt(), make_batch(0, 8, 128), next_token_loss


def tied() -> Made:
    """A GPT whose head is its table: 0.9 million parameters, 8 sequences of 128."""
    _seeded()
    model = Gpt(dim=128, layers=4)
    model.head.weight = model.tokens.weight
    return model, make_batch(0, 8, 128), next_token_loss


def _llama(shape: LlamaShape, batch: int, seq: int) -> Made:
    _seeded()
    ids = torch.randint(0, shape.vocab, (batch, seq))
    return Llama(shape, seq), (ids, ids.roll(-1, 1)), None


def llama() -> Made:
    """4.2 million parameters, 4 sequences of 256."""
    return _llama(LlamaShape(4, 256, 704, 8, 4, 2048), 4, 256)


def small_llama() -> Made:
    """0.6 million parameters, 8 sequences of 128."""
    return _llama(LlamaShape(2, 128, 352, 4, 2, 1024), 8, 128)


def mlp() -> Made:
    """1.6 million parameters, 1024 rows."""
    _seeded()
    return Mlp(), (torch.randn(1024, 512), torch.randint(0, 64, (1024,))), None


def wide() -> Made:
    """4.3 million parameters, 128 rows."""
    _seeded()
    return Mlp(1024, 4), (torch.randn(128, 1024), torch.randint(0, 64, (128,))), None


def conv() -> Made:
    """57 thousand parameters, 32 images of 32 x 32."""
    _seeded()
    return Conv(), (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))), None


def bags() -> Made:
    """1.2 million parameters, 512 bags of 16 words, which read every row of the table: the optimizer's state of a row that is
    never read stays zero, and roots of zeros take a CPU several times as long."""
    _seeded()
    return Bags(), (torch.randperm(8192).view(512, 16) % 4096, torch.randint(0, 10, (512,))), None
