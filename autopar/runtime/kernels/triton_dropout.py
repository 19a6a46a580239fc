"""Dropout as one kernel of Triton: hashes are made in registers, so that x is read, y is written, and no mask is in memory.

    y = x · keep · 1 / (1 - p)        keep: bits(hash(key + golden · (r · W + w))) > least        (`draws`)

A program of the grid has some rows of a block and some words of each, with the neighbours that a word decides about; a place is
64 bits wide. As on a CPU a dropped number is x · 0, of the sign of x, and the product is rounded once, so results are those of
`random.plain_dropout` to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .draws import GOLDEN, MIX1, MIX2, MOST_DIMS, Key, merged, signed, threshold

_GOLDEN, _MIX1, _MIX2 = tl.constexpr(GOLDEN), tl.constexpr(MIX1), tl.constexpr(MIX2)
_WORDS = 256
"""Hashes of a program."""


@triton.jit
def hashed(counters, key):
    """The hashes of int64 counters."""
    x = counters * _GOLDEN + key
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def kept(hashes, lane, least, LANES: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether what a lane of hashes decides about is kept. least: a number of DTYPE where it is of all of a
    hash, as they are compared in it."""
    if LANES == 1:
        return hashes.to(DTYPE) > least
    return (hashes >> (16 * lane)).to(tl.int16).to(tl.int32) > least


@triton.jit(do_not_specialize=["key", "row_count", "first", "across", "o0", "o1", "o2"])
def _dropout(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    key,
    row_count,
    column_count,
    first,
    begin,
    across,
    words_a_row,
    n1,
    n2,
    o0,
    o1,
    o2,
    s1,
    s2,
    LEAST: tl.constexpr,
    SCALE: tl.constexpr,
    LANES: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    KEYED: tl.constexpr,
):
    """key: where it lies if KEYED.

    first: the word in which the rows begin; begin: the column at which it does, 0 or less; across: programs side by side.
    n, o, s: sizes of the block's leading dims, where it starts along them, and sizes of the tensor's."""
    tile = tl.program_id(0).to(tl.int64)
    rows = (tile // across) * ROWS + tl.arange(0, ROWS)
    words = (tile % across) * WORDS + tl.arange(0, WORDS)
    inner = rows // n2
    places = ((inner // n1 + o0) * s1 + inner % n1 + o1) * s2 + rows % n2 + o2
    key = tl.load(key) if KEYED else key
    hashes = hashed(places[:, None] * words_a_row + (words + first)[None, :], key)
    lane = tl.arange(0, LANES)
    columns = (words * LANES + begin)[None, :, None] + lane[None, None, :]
    inside = (rows < row_count)[:, None, None] & (columns >= 0) & (columns < column_count)
    at = rows[:, None, None] * column_count + columns
    x = tl.load(x_ptr + at, mask=inside).to(DTYPE)
    keep = kept(hashes[:, :, None], lane[None, None, :], LEAST, LANES, DTYPE).to(DTYPE)
    tl.store(y_ptr + at, ((x * keep) * SCALE).to(y_ptr.dtype.element_ty), mask=inside)


def dropout(
    x: torch.Tensor, p: float, key: Key, shape: Sequence[int] | None, offsets: Sequence[int] | None
) -> torch.Tensor:
    """Zero elements with probability p < 1, scale the rest. The block starts inside at most MOST_DIMS dims."""
    lanes, least = threshold(p)
    block = merged(x.shape, shape, offsets, lanes)
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (*leading, columns), (*of_leading, width), (*starts, start) = block
    missing = MOST_DIMS - 1 - len(leading)
    n, s, o = [1] * missing + leading, [1] * missing + of_leading, [0] * missing + starts
    words = min(triton.next_power_of_2(-(-(columns + start % lanes) // lanes)), _WORDS)
    rows = _WORDS // words
    begin = -(start % lanes)
    across = -(-(columns - begin) // (lanes * words))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    places = (start // lanes, begin, across, -(-width // lanes), n[1], n[2], *o, s[1], s[2])
    _dropout[(-(-math.prod(leading) // rows) * across,)](
        x,
        y,
        key if isinstance(key, torch.Tensor) else signed(key),
        math.prod(leading),
        columns,
        *places,
        LEAST=least if lanes > 1 else torch.tensor(least, dtype=wide).item(),
        SCALE=1.0 / (1.0 - p),
        LANES=lanes,
        DTYPE=tl.float64 if wide == torch.float64 else tl.float32,
        ROWS=rows,
        WORDS=words,
        KEYED=isinstance(key, torch.Tensor),
    )
    return y
