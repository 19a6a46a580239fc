"""Everything that is no language transformer: images, sound, recurrence, trees of inputs, parameters out of use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self, d_in: int = 32, hidden: int = 64, classes: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class BasicBlock(nn.Module):
    """Two convolutions with BatchNorm; the shortcut is a strided 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """x: (batch, 3, 16, 16). Statistics are those of the global batch, as on one device."""

    def __init__(self, width: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential(
            BasicBlock(width, width, 1), BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class LstmClassifier(nn.Module):
    """Two layers, the last hidden state decides. ids: (batch, seq)."""

    def __init__(self, vocab: int = 32, hidden: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embed(ids))
        return self.head(hidden[-1])


class GruClassifier(nn.Module):
    """Bidirectional, mean over time. x: (batch, seq, features)."""

    def __init__(self, features: int = 8, hidden: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x)
        return self.head(y.mean(dim=1))


class PartlyFrozen(nn.Module):
    """A frozen projection inside the path, a layer and a buffer that nothing reads, a parameter outside any layer."""

    def __init__(self, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(width, width)
        self.register_buffer("unread", torch.arange(4.0))
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.gain = nn.Parameter(torch.ones(width))
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x)) * self.gain + self.shift
        return self.last(F.gelu(self.frozen(y)))


class AudioNet(nn.Module):
    """Strided conv1d stack with GroupNorm, then a transposed convolution back to the waveform. x: (batch, 1, time)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv1d(1, width, 8, stride=4, padding=2),
            nn.GroupNorm(4, width),
            nn.GELU(),
            nn.Conv1d(width, 2 * width, 3, padding=2, dilation=2, groups=2),
            nn.GroupNorm(8, 2 * width),
            nn.GELU(),
        )
        self.decode = nn.ConvTranspose1d(2 * width, 1, 8, stride=4, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(F.pad(x, (4, 4))))[..., 4:-4]


class VitBlock(nn.Module):
    """qkv as one projection, unbound by a five-dimensional permute."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Linear(2 * d_model, d_model))
        self.scale1 = nn.Parameter(torch.full((d_model,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, d_model = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, d_model // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        x = x + self.proj((attention @ v).transpose(1, 2).reshape(batch, tokens, d_model)) * self.scale1
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """Patches by a strided convolution, a class token in front (so 17 tokens: nothing divides them)."""

    def __init__(self, d_model: int = 32, heads: int = 4, layers: int = 2, classes: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, d_model, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, d_model))
        self.position = nn.Parameter(torch.randn(1, 17, d_model) * 0.02)
        self.blocks = nn.ModuleList(VitBlock(d_model, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.cls.expand(x.shape[0], -1, -1), tokens), dim=1) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


class Recommender(nn.Module):
    """Takes a nested dict and a list, returns a nested dict: two towers and their dot product."""

    def __init__(self, users: int = 64, items: int = 128, d_model: int = 16) -> None:
        super().__init__()
        self.user = nn.Embedding(users, d_model)
        self.item = nn.Embedding(items, d_model)
        self.dense = nn.Linear(8, d_model)
        self.tower = nn.Linear(2 * d_model, d_model)

    def forward(self, features: dict, history: list[Tensor]) -> dict:
        """features: {"user": {"id": (batch,), "dense": (batch, 8)}, "item": (batch,)}; history: two of (batch, 4)."""
        seen = sum(self.item(part).mean(dim=1) for part in history)
        user = self.user(features["user"]["id"]) + self.dense(features["user"]["dense"])
        user = F.normalize(self.tower(torch.cat((user, seen), dim=-1)), dim=-1)
        item = self.item(features["item"])
        return {"score": (user * item).sum(dim=-1), "towers": {"user": user, "item": item}}


def recommender_loss(output: dict, clicked: Tensor) -> Tensor:
    """Clicks by their score, with the item vectors kept short."""
    score, item = output["score"], output["towers"]["item"]
    return F.binary_cross_entropy_with_logits(score, clicked) + 0.01 * item.pow(2).mean()
