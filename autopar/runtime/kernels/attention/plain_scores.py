"""Attention of a block of queries to a block of keys by the plain formula, in tiles of its scores, without autograd.

    S = scale · Q Kᵀ + bias      L = log Σ exp S      P = exp(S - L)      O = (P ∘ D) V
    dV = (P ∘ D)ᵀ dO      dS = P ∘ (D ∘ dO Vᵀ - δ), δ = Σ dO ∘ O      dQ = scale · dS K      dK = scale · dSᵀ Q

D is dropout: 1 / (1 - p) where a weight is kept, else 0. A tile has some samples, key heads and query rows, the query heads
of these key heads, and of a causal block the keys up to its last row; its scores stay in a CPU's cache from the product to the
last one, and nothing has the size of all scores but a mask's gradient. Scores of a tile are S · log2 e, as powers of two are
vectorized on a CPU whatever the numbers are, while exp is slow where it becomes 0. Layouts are those of `scores`. Of a row that
sees nothing the result is 0 and L is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import random as rng
from ..draws import Key
from ..kernels import HALF
from ..tiles import LOG2_E, tile_elements, tiles

Tensor = torch.Tensor
_FEWEST_ROWS = 32
"""The fewest rows of a tile: products of fewer rows are slow."""


def softmax_dtype(q: Tensor) -> torch.dtype:
    """Scores and their softmax are in float32 where queries are in 16 bits."""
    return torch.float32 if q.dtype in HALF else q.dtype


class Config(NamedTuple):
    """The settings of a block of scores beside its queries and keys.

    key, shape, offsets: dropout draws by the place of the block in all scores (None: the block is all).
    """

    mask: Tensor | None
    p: float
    causal: bool
    scale: float
    key: Key
    shape: tuple[int, ...] | None
    offsets: tuple[int, ...] | None


@dataclass(frozen=True)
class _Tile:
    """samples, heads (of the keys), rows; keys: so many are seen; group: query heads to a key head."""

    samples: slice
    heads: slice
    rows: slice
    keys: int
    group: int

    @property
    def query_heads(self) -> slice:
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    def of_rows(self, x: Tensor) -> Tensor:
        """This tile's part of a tensor (batch, heads, rows, …), the query heads of a key head one after another:
        (batch, key heads, group · rows, …)."""
        part = x[self.samples, self.query_heads, self.rows]
        return part.reshape(part.shape[0], -1, self.group * part.shape[2], *part.shape[3:])

    def like_rows(self, x: Tensor) -> Tensor:
        """The inverse: (batch, heads, rows, …)."""
        count = self.rows.stop - self.rows.start
        return x.reshape(x.shape[0], -1, count, *x.shape[3:])

    def of_keys(self, x: Tensor) -> Tensor:
        """This tile's part of keys or values (batch, key heads, keys, …)."""
        return x[self.samples, self.heads, : self.keys]

    def of_mask(self, mask: Tensor) -> Tensor:
        """This tile's part of a mask whose dims may be 1."""
        places = (self.samples, self.query_heads, self.rows, slice(self.keys))
        return mask[tuple(slice(None) if n == 1 else place for n, place in zip(mask.shape, places, strict=True))]


def attend(q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """(out: like q with v's head dim, lse: (batch, heads, query) in the dtype of the scores)."""
    out = q.new_empty([*q.shape[:3], v.shape[3]])
    lse = q.new_empty(q.shape[:3], dtype=softmax_dtype(q))
    for of_heads in _tiles(q, k, config):
        for tile in of_heads:
            weights = _scores(tile, q, k, config)
            top = weights.amax(-1, keepdim=True)
            if config.mask is not None:
                top.masked_fill_(top == -math.inf, 0.0)
            total = weights.sub_(top).exp2_().sum(-1, keepdim=True)
            if config.mask is not None:
                total.masked_fill_(total == 0, 1.0)
            place = (tile.samples, tile.query_heads, tile.rows)
            lse[place] = tile.like_rows(top.div_(LOG2_E).add_(total.log()).squeeze(-1))
            weights.div_(total)
            if config.p > 0:
                weights.mul_(_dropped(tile, q, k, config))
            out[place] = tile.like_rows(weights.to(v.dtype) @ tile.of_keys(v))
    return out, lse


def attend_grad(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for of_heads in _tiles(q, k, config):
        sums: tuple[Tensor, Tensor] | None = None
        for tile in of_heads:
            weights, dscores, drop = _score_grad(tile, g, q, k, v, out, lse, config)
            dscores = dscores.to(q.dtype)
            dq[tile.samples, tile.query_heads, tile.rows] = tile.like_rows(
                (dscores @ tile.of_keys(k)).mul_(config.scale)
            )
            weights = weights if drop is None else weights.mul_(drop)
            parts = (
                dscores.transpose(-1, -2) @ (tile.of_rows(q) * config.scale),
                weights.to(g.dtype).transpose(-1, -2) @ tile.of_rows(g),
            )
            if sums is None:  # the tile with the last rows, which see all keys
                sums = (parts[0].to(lse.dtype), parts[1].to(lse.dtype))
            else:
                for total, part in zip(sums, parts, strict=True):
                    total[:, :, : tile.keys].add_(part)
        assert sums is not None
        for grad, total in zip((dk, dv), sums, strict=True):
            grad[tile.samples, tile.heads] = total
    return dq, dk, dv


def mask_grad(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: Config) -> Tensor:
    """Gradient of an additive mask, at full size (batch, heads, query, key), in the dtype of the scores."""
    grad = q.new_zeros([*q.shape[:3], k.shape[2]], dtype=lse.dtype)
    for of_heads in _tiles(q, k, config):
        for tile in of_heads:
            dscores = _score_grad(tile, g, q, k, v, out, lse, config)[1]
            grad[tile.samples, tile.query_heads, tile.rows, : tile.keys] = tile.like_rows(dscores)
    return grad


def _tiles(q: Tensor, k: Tensor, config: Config) -> Iterator[Iterator[_Tile]]:
    """Tiles of the same samples and heads together, the last rows first, as they see most keys."""
    (samples, heads, rows), keys, group = (q.shape[0], k.shape[1], q.shape[2]), k.shape[2], q.shape[1] // k.shape[1]
    elements = max(tile_elements(q.device) // max(group * keys, 1), min(rows, _FEWEST_ROWS))

    def of_heads(sample: slice, head: slice) -> Iterator[_Tile]:
        for (row,) in tiles((rows,), elements, q.device):
            last = slice(rows - row.stop, rows - row.start)
            yield _Tile(sample, head, last, last.stop if config.causal else keys, group)

    for sample, head in tiles((samples, heads), max(elements // max(rows, 1), 1), q.device):
        yield of_heads(sample, head)


def _scores(tile: _Tile, q: Tensor, k: Tensor, config: Config) -> Tensor:
    """S · log2 e: (batch, key heads, group · rows, keys)."""
    keys = tile.of_keys(k).transpose(-1, -2)
    scores = ((tile.of_rows(q) * (config.scale * LOG2_E)) @ keys).to(softmax_dtype(q))
    by_head = tile.like_rows(scores)
    if config.mask is not None:
        by_head.add_(_bias(tile.of_mask(config.mask), scores.dtype), alpha=LOG2_E)
    if config.causal:  # the last keys that the tile sees are its rows
        count = by_head.shape[2]
        triangle = torch.full((count, count), -math.inf, dtype=scores.dtype, device=q.device).triu_(1)
        by_head[..., tile.keys - count :].add_(triangle)
    return scores


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The summand of a mask for scores: itself, or of a boolean one 1 - 1 / m, which is 0 or -inf."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return mask.view(torch.uint8).to(dtype).reciprocal_().neg_().add_(1.0)


def _dropped(tile: _Tile, q: Tensor, k: Tensor, config: Config) -> Tensor:
    """The factors D of dropout for a tile."""
    place = (tile.samples, tile.query_heads, tile.rows, slice(tile.keys))
    size = [part.stop - (part.start or 0) for part in place]
    within = config.offsets or (0, 0, 0, 0)
    offsets = [before + (part.start or 0) for before, part in zip(within, place, strict=True)]
    shape = config.shape or (*q.shape[:3], k.shape[2])
    keep = rng.keep_mask(size, config.p, config.key, shape, offsets, q.device, softmax_dtype(q))
    return keep.mul_(1.0 / (1.0 - config.p)).view(size[0], -1, tile.group * size[2], size[3])


def _score_grad(
    tile: _Tile, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: Config
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(P, dS, D) of a tile."""
    base = tile.of_rows(lse).to(softmax_dtype(q)).unsqueeze(-1) * LOG2_E
    weights = _scores(tile, q, k, config).sub_(base).exp2_()
    rows = tile.of_rows(g)
    dscores = (rows @ tile.of_keys(v).transpose(-1, -2)).to(weights.dtype)
    drop = _dropped(tile, q, k, config) if config.p > 0 else None
    if drop is not None:
        dscores.mul_(drop)
    delta = (rows.to(weights.dtype) * tile.of_rows(out)).sum(-1, keepdim=True)
    return weights, dscores.sub_(delta).mul_(weights), drop
