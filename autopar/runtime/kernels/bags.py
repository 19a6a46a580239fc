"""Sums of rows of a table by bags of indices, without a tensor of all these rows.

Bags are the rows of an index of two dims, or runs of an index of one dim, which begin at `offsets` (`last`: one entry more says
where the last one ends). `padding` is a row that no bag counts (-1: none). With `offset` a table is a block of rows: what other
blocks hold counts nothing, so that the sums of all blocks are to be added.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
aten = torch.ops.aten
_SUM, _MAX = 0, 2


def embedding_bag(
    w: Tensor,
    index: Tensor,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    padding: int = -1,
    last: bool = False,
    offset: int | None = None,
) -> Tensor:
    """(bags, h): the sums of rows of w: (v, h), each times its weight."""
    if offset is not None:
        index, outside = _in_block(index, w.shape[0], padding, offset)
        weights = (~outside).to(w.dtype) if weights is None else weights.masked_fill(outside, 0)
        padding = -1
    return F.embedding_bag(
        index,
        w,
        offsets,
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=last,
        padding_idx=padding if padding >= 0 else None,
    )


def embedding_bag_grad(
    g: Tensor,
    index: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    rows: int,
    padding: int,
    last: bool,
    offset: int | None = None,
) -> Tensor:
    """Gradient of the table, (rows, h), of that of the sums: (bags, h)."""
    bags, places, own = _bag_of_each(index, offsets, last), index, g.dtype
    dtype = torch.float32 if own in (torch.bfloat16, torch.float16) else own  # a row is the sum of many
    g, weights = g.to(dtype), None if weights is None else weights.to(dtype)
    if offset is not None:
        places, outside = _in_block(index, rows, padding, offset)
        weights = (~outside).to(dtype) if weights is None else weights.masked_fill(outside, 0)
        padding = -1
    flat = None if weights is None else _flat(weights)
    unread = bags.new_empty(0)  # of means and maxima
    dw: Tensor = aten._embedding_bag_dense_backward.default(
        g.contiguous(), _flat(places), bags, unread, unread, rows, False, _SUM, flat, padding
    )
    return dw.to(own)


def embedding_bag_dweights(
    w: Tensor, g: Tensor, index: Tensor, offsets: Tensor | None, padding: int, last: bool, offset: int | None = None
) -> Tensor:
    """Gradient of the weights, like index: the product of each one's row with the gradient of its bag's sum."""
    places, outside = index, None
    if offset is not None:
        places, outside = _in_block(index, w.shape[0], padding, offset)
        padding = -1
    bags = _bag_of_each(index, offsets, last)
    products: Tensor = aten._embedding_bag_per_sample_weights_backward.default(
        g.contiguous(), w, _flat(places), bags.new_empty(0), bags, _SUM, padding
    )
    products = products.view(index.shape)
    return products if outside is None else products.masked_fill(outside, 0)


def embedding_bag_max(
    w: Tensor, index: Tensor, offsets: Tensor | None, padding: int, last: bool
) -> tuple[Tensor, Tensor]:
    """The largest entry in each column of the rows of a bag, and the row that has it; 0 of the row -1 where a bag is empty."""
    if offsets is None:
        offsets, last = torch.arange(0, index.numel(), index.shape[1], device=index.device), False
    largest, _, sizes, places = aten._embedding_bag.default(
        w, _flat(index), offsets, False, _MAX, False, None, last, padding
    )
    return largest, places.to(torch.int64).masked_fill((sizes[: len(largest)] == 0).unsqueeze(1), -1)


def _in_block(index: Tensor, rows: int, padding: int, offset: int) -> tuple[Tensor, Tensor]:
    """Indices into a block of rows, 0 of those that it has no row for, and which these are."""
    local = index - offset
    outside = (local < 0) | (local >= rows) | (index == padding)
    return local.masked_fill(outside, 0), outside


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous()


def _bag_of_each(index: Tensor, offsets: Tensor | None, last: bool) -> Tensor:
    """The number of the bag of every index, one after another."""
    if offsets is None:
        return torch.arange(len(index), dtype=index.dtype, device=index.device).repeat_interleave(index.shape[1])
    begins = offsets[:-1] if last else offsets
    places = torch.arange(len(index), dtype=begins.dtype, device=index.device)
    return (torch.bucketize(places, begins, right=True) - 1).to(index.dtype)
