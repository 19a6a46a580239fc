"""Scans along a dim of which every rank has a block: each scans its block and adds what comes before it.

    cumsum        local cumsum + sum of the blocks before                         (cumprod, logcumsumexp alike)
    cummax        the larger of local cummax and the maximum of the blocks before, with its index
    linear_scan   h[t] = a[t] · h[t-1] + b[t]: local scan from zero + (product of a so far) · (state before the block)

What comes before is known from one row of every block: these are gathered (a message of one row), never the blocks. The
way back of a scan runs from the end, with what the blocks behind say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm.axis_comm import Along

Tensor = torch.Tensor


def _ends(x: Tensor, dim: int, along: Along, at: int = -1) -> Tensor:
    """The last (or first: at = 0) row of every block, joined along dim."""
    return along.start_all_gather(x.narrow(dim, at % x.shape[dim], 1), dim).wait()


def _before(x: Tensor, dim: int, along: Along) -> Tensor:
    """The last rows of the blocks before this one."""
    return _ends(x, dim, along).narrow(dim, 0, along.index)


def cumsum(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, along: Along) -> Tensor:
    """torch.cumsum over blocks: x is this rank's block of dim."""
    own = torch.cumsum(x, dim, dtype=dtype)
    return own.add_(_before(own, dim, along).sum(dim, keepdim=True))


def cumsum_back(g: Tensor, dim: int, *, along: Along | None = None) -> Tensor:
    """The sum from each place to the end: the way back of cumsum."""
    own = g.flip(dim).cumsum(dim).flip(dim)
    if along is None:
        return own
    ends = _ends(own, dim, along, at=0)
    return own.add_(ends.narrow(dim, along.index + 1, along.size - along.index - 1).sum(dim, keepdim=True))


def cumprod(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, along: Along) -> Tensor:
    """torch.cumprod over blocks."""
    own = torch.cumprod(x, dim, dtype=dtype)
    return own.mul_(_before(own, dim, along).prod(dim, keepdim=True))


def logcumsumexp(x: Tensor, dim: int, *, along: Along) -> Tensor:
    """torch.logcumsumexp over blocks."""
    own = torch.logcumsumexp(x, dim)
    before = _before(own, dim, along)
    return own if along.index == 0 else torch.logaddexp(own, torch.logsumexp(before, dim, keepdim=True))


def cummax(x: Tensor, dim: int, *, along: Along) -> tuple[Tensor, Tensor]:
    """torch.cummax over blocks; of equal values the last one counts, as in torch."""
    return _extremes(x, dim, along, torch.cummax, torch.ge)


def cummin(x: Tensor, dim: int, *, along: Along) -> tuple[Tensor, Tensor]:
    """torch.cummin over blocks; of equal values the last one counts, as in torch."""
    return _extremes(x, dim, along, torch.cummin, torch.le)


def _extremes(
    x: Tensor, dim: int, along: Along, scan: Callable[..., Any], beats: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    own, places = scan(x, dim)
    places += along.index * x.shape[dim]
    end = x.shape[dim] - 1
    values = along.start_all_gather(own.narrow(dim, end, 1), dim)
    indices = along.start_all_gather(places.narrow(dim, end, 1), dim)
    values_before, indices_before = (t.wait().narrow(dim, 0, along.index) for t in (values, indices))
    if along.index == 0:
        return own, places
    best, block = (t.narrow(dim, along.index - 1, 1) for t in scan(values_before, dim))
    kept = beats(own, best) | own.isnan()
    if best.is_floating_point():
        kept &= own.isnan() | ~best.isnan()
    return torch.where(kept, own, best), torch.where(kept, places, indices_before.gather(dim, block))


def cumextreme_back(g: Tensor, indices: Tensor, dim: int, *, along: Along | None = None) -> Tensor:
    """The way back of cummax and cummin: every gradient goes to where its value was found, in this block or before."""
    if along is None:
        return torch.zeros_like(g).scatter_add_(dim, indices, g)
    first, size = along.index * g.shape[dim], g.shape[dim]
    earlier = indices < first
    # whatever was found before this block was found at one place in every row, that of the block's first index
    sums = along.start_all_gather(g.masked_fill(~earlier, 0).sum(dim, keepdim=True), dim)
    places = along.start_all_gather(torch.where(earlier, indices, -1).amax(dim, keepdim=True), dim)
    local = (indices - first).masked_fill_(earlier, 0)
    own = torch.zeros_like(g).scatter_add_(dim, local, g.masked_fill(earlier, 0))
    theirs = places.wait() - first
    outside = (theirs < 0) | (theirs >= size)
    return own.scatter_add_(dim, theirs.masked_fill(outside, 0), sums.wait().masked_fill(outside, 0))


# --- linear recurrences


def linear_scan(a: Tensor, b: Tensor, dim: int, *, along: Along | None = None) -> Tensor:
    """h[t] = a[t] · h[t-1] + b[t] along dim, from a state of zero; a may have size one where b has more, but in dim.

    It takes about three passes over b, in 2 · log2(steps) rounds. Products of a over a span of steps must not overflow.
    """
    h = b.clone(memory_format=torch.contiguous_format)
    _scan(a.movedim(dim, 0), h.movedim(dim, 0))
    if along is None:
        return h
    products = torch.cumprod(a, dim)
    factors, states = _rows([t.narrow(dim, t.shape[dim] - 1, 1) for t in (products, h)], dim, along)
    carry = _carry(factors, states, dim, range(along.index))
    return h if carry is None else h.addcmul_(products, carry)


def linear_scan_back(
    a: Tensor, h: Tensor, g: Tensor, dim: int, start: float = 0.0, *, along: Along | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of a and b, where those of the states h are g. start: the state before the first.

    s[t] = g[t] + a[t+1] · s[t+1] is the gradient of b[t], and s[t] · h[t-1], summed where a has size one, that of a[t].
    """
    steps, a = a.shape[dim], a.conj_physical()
    s = g.clone(memory_format=torch.contiguous_format)
    _scan_back(a.narrow(dim, 1, steps - 1).movedim(dim, 0), s.movedim(dim, 0))
    h_before = torch.full_like(h.narrow(dim, 0, 1), start)
    if along is not None:
        # behind[t] is the product of a after t; the block before sees this one through a[0]
        behind = torch.cat([a.narrow(dim, 1, steps - 1), torch.ones_like(a.narrow(dim, 0, 1))], dim)
        behind = behind.flip(dim).cumprod(dim).flip(dim)
        first = a.narrow(dim, 0, 1)
        rows = [first * behind.narrow(dim, 0, 1), first * s.narrow(dim, 0, 1), h.narrow(dim, steps - 1, 1)]
        factors, states, ends = _rows(rows, dim, along)
        carry = _carry(factors, states, dim, range(along.size - 1, along.index, -1))
        if carry is not None:
            s.addcmul_(behind, carry)
        del behind
        if along.index > 0:
            h_before = ends.narrow(dim, along.index - 1, 1)
    da = torch.cat([h_before, h.narrow(dim, 0, steps - 1)], dim).conj_physical_().mul_(s)
    summed = [i for i, n in enumerate(a.shape) if n == 1 and da.shape[i] > 1]
    return (da.sum(summed, keepdim=True) if summed else da), s


def _rows(rows: list[Tensor], dim: int, along: Along) -> tuple[Tensor, ...]:
    """Each of these rows of every block, in one message; those of size one where the last is larger are repeated."""
    joined = torch.stack([row.expand_as(rows[-1]) for row in rows])
    return along.start_all_gather(joined, dim + 1).wait().unbind(0)


def _carry(factors: Tensor, states: Tensor, dim: int, blocks: range) -> Tensor | None:
    """The state after going through these blocks, of which factors and states have a row each; None: there are none."""
    carry = None
    for i in blocks:
        state = states.narrow(dim, i, 1)
        carry = state if carry is None else torch.addcmul(state, factors.narrow(dim, i, 1), carry)
    return carry


def _scan(a: Tensor, h: Tensor) -> None:
    """In place along dim 0: h is b, and becomes the states.

    Steps are joined in pairs, h[2i+1] += a[2i+1] · h[2i] with factor a[2i+1] · a[2i], the pairs are scanned, and then every
    other step follows from the one before: as much work as three loops over the steps, without one.
    """
    steps = h.shape[0]
    if steps < 2:
        return
    even, odd = a[: steps // 2 * 2 : 2], a[1::2]
    h[1::2].addcmul_(odd, h[: steps // 2 * 2 : 2])
    if steps > 2:
        _scan(odd * even, h[1::2])
        h[2::2].addcmul_(a[2::2], h[1 : steps - 1 : 2])


def _scan_back(c: Tensor, s: Tensor) -> None:
    """In place along dim 0: s[t] += c[t] · s[t+1], from the end; c has one row fewer."""
    steps = s.shape[0]
    if steps < 2:
        return
    s[: steps // 2 * 2 : 2].addcmul_(c[::2], s[1::2])
    if steps > 2:
        links = (steps - 1) // 2
        _scan_back(c[: 2 * links : 2] * c[1::2], s[::2])
        s[1 : 2 * links : 2].addcmul_(c[1::2], s[2::2])
