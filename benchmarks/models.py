"""The models that the benchmarks measure: a Llama of any shape, of the zoo's blocks, and a small GPT. Plain PyTorch."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

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


LLAMA_8B = LlamaShape(layers=32, dim=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
LLAMA_70B = LlamaShape(layers=80, dim=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256)
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


class ResidualBlock(nn.Module):
    """Two convolutions of an image, told the time of diffusion between them. x: (batch, channels, height, width)."""

    def __init__(self, channels: int, out: int, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, out)
        self.conv_1, self.conv_2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(width, out)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv_1(F.silu(self.norm_1(x))) + self.time(time)[:, :, None, None]
        out: Tensor = self.skip(x) + self.conv_2(F.silu(self.norm_2(h)))
        return out


class UNet(nn.Module):
    """The noise in x: (batch, 3, height, width) at times t: (batch,), by a U-Net of three resolutions."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(1, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(ResidualBlock(a, b, time) for a, b in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, stride=2, padding=1) for _, b in pairs)
        self.middle = ResidualBlock(widths[-1], widths[-1], time)
        self.grow = nn.ModuleList(nn.Conv2d(b, b, 3, padding=1) for _, b in reversed(pairs))
        self.up = nn.ModuleList(ResidualBlock(2 * b, a, time) for a, b in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time(t[:, None])
        x = self.first(x)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x, time)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = grow(F.interpolate(x, scale_factor=2.0))
            x = block(torch.cat((x, skips.pop()), 1), time)
        out: Tensor = self.last(x)
        return out
