"""The largest entries along a dim of which every rank has a block: each sends its own few, and all choose among those.

Values are those of the whole dim, bit for bit. Of equal values `max`, `min`, `argmax` and `argmin` take the first, as torch
does on one device. Which of equal values `topk` takes torch leaves open; here those of earlier blocks come first.
"""

from __future__ import annotations

import torch

from ..comm.axis_comm import Along

Tensor = torch.Tensor


def largest(x: Tensor, dim: int, keepdim: bool = False, *, along: Along) -> tuple[Tensor, Tensor]:
    """torch.max(x, dim) over blocks: values and their places in the whole dim."""
    return _extreme(x, dim, keepdim, along, least=False)


def smallest(x: Tensor, dim: int, keepdim: bool = False, *, along: Along) -> tuple[Tensor, Tensor]:
    """torch.min(x, dim) over blocks."""
    return _extreme(x, dim, keepdim, along, least=True)


def argmax(x: Tensor, dim: int, keepdim: bool = False, *, along: Along) -> Tensor:
    """torch.argmax over blocks."""
    return _extreme(x, dim, keepdim, along, least=False)[1]


def argmin(x: Tensor, dim: int, keepdim: bool = False, *, along: Along) -> Tensor:
    """torch.argmin over blocks."""
    return _extreme(x, dim, keepdim, along, least=True)[1]


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, along: Along
) -> tuple[Tensor, Tensor]:
    """torch.topk over blocks, always sorted; no rank has to send more than k candidates."""
    values, places = x.topk(min(k, x.shape[dim]), dim, largest)
    candidates, where = _candidates(values, places, x.shape[dim], dim, along)
    order = candidates.argsort(dim=dim, descending=largest, stable=True).narrow(dim, 0, k)
    return candidates.gather(dim, order), where.gather(dim, order)


def put(g: Tensor, index: Tensor, dim: int, size: int, offset: int = 0) -> Tensor:
    """Zeros with g at the places `index` of a dim, of which this block of `size` begins at `offset`."""
    local = index - offset
    outside = (local < 0) | (local >= size)
    zeros = g.new_zeros([size if i == dim else n for i, n in enumerate(g.shape)])
    return zeros.scatter_add_(dim, local.masked_fill_(outside, 0), g.masked_fill(outside, 0))


def _extreme(x: Tensor, dim: int, keepdim: bool, along: Along, least: bool) -> tuple[Tensor, Tensor]:
    choose = torch.min if least else torch.max
    values, places = choose(x, dim, keepdim=True)
    candidates, where = _candidates(values, places, x.shape[dim], dim, along)
    values, blocks = choose(candidates, dim, keepdim=True)
    places = where.gather(dim, blocks)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _candidates(values: Tensor, places: Tensor, size: int, dim: int, along: Along) -> tuple[Tensor, Tensor]:
    """The candidates of all ranks, with their places in the whole dim. size: of a block."""
    started = along.start_all_gather(values, dim), along.start_all_gather(places + along.index * size, dim)
    return started[0].wait(), started[1].wait()
