"""Randomness that does not depend on the plan.

Every random number is a hash of (key, global element position): whichever rank holds an element draws the same number
for it, whatever the sharding, and a recomputed op draws the same numbers again. The hash is splitmix64 in int64
arithmetic (Steele, Lea, Flood 2014), of which the top 24 or 53 bits make a uniform number in [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MASK64 = (1 << 64) - 1
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _MIX1, _MIX2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def make_key(*parts: int) -> int:
    """One 63-bit key out of seed, step, microbatch, call and site."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = ((state ^ (part & _MASK64)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK64
        state ^= state >> 29
    return state >> 1


def positions(
    local: Sequence[int], shape: Sequence[int], offsets: Sequence[int], device: torch.device | None = None
) -> torch.Tensor:
    """Row-major global index of every element of a local block: int64 of shape `local`."""
    index = torch.zeros((1,) * len(local), dtype=torch.int64, device=device)
    stride = math.prod(shape)
    for dim, (n, size, start) in enumerate(zip(local, shape, offsets, strict=True)):
        stride //= max(size, 1)
        line = (torch.arange(start, start + n, dtype=torch.int64, device=device)) * stride
        index = index + line.view((1,) * dim + (n,) + (1,) * (len(local) - dim - 1))
    return index.expand(local)


def _hash(index: torch.Tensor, key: int) -> torch.Tensor:
    x = index * _GOLDEN + _signed(key)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(
    local: Sequence[int],
    dtype: torch.dtype,
    key: int,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Uniform numbers in [0, 1) for a local block of a tensor of global `shape` that starts at `offsets`.

    As many bits as the dtype has digits, so that no number rounds up to 1.
    """
    shape, offsets = shape or local, offsets or (0,) * len(local)
    bits = _hash(positions(local, shape, offsets, device), key)
    digits = _DIGITS.get(dtype, 53)
    return ((bits >> (64 - digits)) & ((1 << digits) - 1)).to(torch.float64).mul_(2.0**-digits).to(dtype)


def normal(
    local: Sequence[int],
    dtype: torch.dtype,
    key: int,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Standard normal numbers by Box and Muller, one pair of hashes an element."""
    u = uniform(local, torch.float64, make_key(key, 1), shape, offsets, device)
    v = uniform(local, torch.float64, make_key(key, 2), shape, offsets, device)
    return ((-2.0 * torch.log1p(-u)).sqrt() * torch.cos(2 * math.pi * v)).to(dtype)


def keep_mask(
    local: Sequence[int],
    p: float,
    key: int,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Boolean mask that keeps each element with probability 1 - p."""
    bits = _hash(positions(local, shape or local, offsets or (0,) * len(local), device), key)
    return ((bits >> 40) & 0xFFFFFF) >= int(p * (1 << 24))
