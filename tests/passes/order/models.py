"""Small causal models, each with another way in which positions come in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 24, 16, 4
SIZE = WIDTH // HEADS


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    """Attention and a gated product behind norms."""

    def __init__(self, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.dropout, self.causal = dropout, causal

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        h = self.first(x)
        q = self.q(h).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, HEADS // 2, SIZE)).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if cos is not None and sin is not None:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        causal = self.causal and mask is None
        p = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, mask, p, causal, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.up(self.second(x))))


class Causal(nn.Module):
    """Tokens, two blocks and a head; what differs stands in classes of this one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)

    def positions(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return x, (None, None)

    def logits(self, ids: Tensor) -> Tensor:
        x, told = self.positions(self.tokens(ids))
        for layer in self.layers:
            x = layer(x, *told)
        return self.norm(x) @ self.tokens.weight.T

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())


class Rotary(Causal):
    """Rotations are buffers, as long as the sequence."""

    def __init__(self, length: int = 16, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        angles = torch.outer(torch.arange(length), 0.5 ** torch.arange(SIZE // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def positions(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return x, (self.cos, self.sin)


class CutRotary(Rotary):
    """Rotations are buffers of a longer sequence."""

    def __init__(self) -> None:
        super().__init__(40)

    def positions(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return x, (self.cos[: x.shape[1]], self.sin[: x.shape[1]])


class Learned(Causal):
    """Positions are looked up by an arange."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(20, WIDTH)

    def positions(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return x + self.places(torch.arange(x.shape[1], device=x.device)), (None, None)


class Table(Causal):
    """Positions are a parameter, of which as many rows are used as there are tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(1, length, WIDTH))

    def positions(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return x + self.places[:, : x.shape[1]], (None, None)


class Shifted(Rotary):
    """Labels are shifted in the model, as in transformers: the last token has none."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(ids)
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.view(-1, VOCABULARY), shifted.reshape(-1), ignore_index=-100)


class Sliced(Rotary):
    """The last token's logits are cut away, at the full width of the vocabulary."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Masked(Rotary):
    """Some layers see through a window, by a mask made of positions, beside the causal ones."""

    def logits(self, ids: Tensor) -> Tensor:
        x, told = self.positions(self.tokens(ids))
        place = torch.arange(ids.shape[1], device=ids.device)
        distance = place[:, None] - place[None, :]
        window = (distance >= 0) & (distance < 5)
        x = self.layers[0](x, *told)
        x = self.layers[1](x, *told, window[None, None])
        return self.norm(x) @ self.tokens.weight.T


class Biased(Rotary):
    """A learned bias on the scores of every pair of places, beside the causal mask."""

    def __init__(self, length: int = 16) -> None:
        super().__init__(length)
        self.bias = nn.Parameter(torch.randn(1, HEADS, length, length))

    def logits(self, ids: Tensor) -> Tensor:
        x, told = self.positions(self.tokens(ids))
        past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        x = self.layers[0](x, *told)
        x = self.layers[1](x, *told, self.bias.masked_fill(~past, float("-inf")))
        return self.norm(x) @ self.tokens.weight.T


class Counted(Rotary):
    """Positions are counted from a mask of tokens, and the loss is a mean over those that count."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        seen = (ids > 2).long().cumsum(-1) % 3
        x = self.logits(ids) + F.one_hot(seen, VOCABULARY)
        losses = F.cross_entropy(x.transpose(1, 2), labels, reduction="none")
        weight = (labels > 4).to(losses.dtype)
        return (losses * weight).sum() / weight.sum()


class Normed(Rotary):
    """Batch statistics over all tokens of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def positions(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2), (self.cos, self.sin)


class Convolved(Rotary):
    """A convolution over neighbours in the sequence, which minds the order at the width of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def positions(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2), (self.cos, self.sin)


class Dropped(Rotary):
    """Dropout on tokens, which draws by their places."""

    def positions(self, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return F.dropout(x, 0.3, self.training), (self.cos, self.sin)


class SequenceFirst(Rotary):
    """A model whose tokens are (sequence, batch) and merged before the head, so that the sequence is the major part of a dim."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(ids).transpose(0, 1)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.T.reshape(-1))


def tokens(batch: int = 4, length: int = 16) -> tuple[Tensor, Tensor]:
    """Ids and labels."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, VOCABULARY, (batch, length), generator=generator) for _ in range(2))
    return ids, labels
