"""Randomness that does not depend on the plan.

Every random number is a hash of (key, global element position): whichever rank holds an element draws the same number
for it, whatever the sharding, and a recomputed op draws the same numbers again. The hash is splitmix64 in int64
arithmetic (Steele, Lea, Flood 2014), of which the top 24 or 53 bits make a uniform number in [0, 1). Where 16 bits decide,
as in most dropout, a hash serves four neighbours of the last dim (`draws`). A GPU's kernel for dropout makes the same
hashes in registers (`triton_dropout`).

Hashes are made in place, in tiles that stay in a CPU's cache (`tiles`). torch shifts signed integers arithmetically, so that a
step x ^ x >> n takes two states of the 2^64 to one, which nobody can tell at 2^32 counters, and leaves the sign 0: only the
last step masks what it shifts.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.backends import backend_of
from ..comm.devices import device_of
from .draws import GOLDEN, LANES, MASK64, MIX1, MIX2, MOST_DIMS, Block, Key, merged, signed, threshold
from .fused import fused_dropout
from .kernels import has_fused_dropout
from .tiles import tile_elements, tiles

_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def make_key(*parts: int) -> int:
    """One 63-bit key out of seed, step, microbatch, call and site."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = ((state ^ (part & MASK64)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK64
        state ^= state >> 29
    return state >> 1


def _further(key: Key, part: int) -> Key:
    """`make_key` of a key and a number; of a tensor by int64 arithmetic, whose shifts take the sign along."""
    if not isinstance(key, torch.Tensor):
        return make_key(key, part)
    state = key ^ 0x243F6A8885A308D3
    state = state * GOLDEN + 0x632BE59BD9B4E019
    state = (state ^ ((state >> 29) & (MASK64 >> 29)) ^ part) * GOLDEN + 0x632BE59BD9B4E019
    return ((state ^ ((state >> 29) & (MASK64 >> 29))) >> 1) & (MASK64 >> 1)


class StepKeys:
    """The keys of a step's random ops in a tensor on the device, once one step has shown which ops there are: kernels that are
    played again read there what `write` has put there for their step."""

    def __init__(self, device: torch.device) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._device = device
        self.table: torch.Tensor | None = None
        self._keys: tuple[torch.Tensor, ...] = ()

    def of(self, seed: int, step: int, parts: tuple[int, ...]) -> Key:
        """The key of a random op by its other parts; a number in the first step, and of an op that was not in that."""
        place = self._places.setdefault(parts, len(self._places)) if self.table is None else self._places.get(parts, -1)
        known = self.table is not None and place >= 0
        return self._keys[place] if known else make_key(seed, step, *parts)

    def write(self, seed: int, step: int) -> None:
        """Put the keys of a step into the tensor, which is made when there is one to put in."""
        if not self._places:
            return
        pinned = not backend_of(self._device).is_host
        keys = torch.tensor([make_key(seed, step, *parts) for parts in self._places], pin_memory=pinned)
        if self.table is None:
            self.table = torch.empty(len(keys), dtype=torch.int64, device=self._device)
            self._keys = self.table.unbind()
        self.table.copy_(keys, non_blocking=True)


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


def _hashes(
    block: Block, key: Key, device: torch.device | None, lanes: int = 1
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows and columns of a block as a matrix, and integers for them, int64 or `lanes` of a hash each.

    The integers are good until the next ones are asked for, and may be overwritten.
    """
    local, shape, offsets = block
    first, after = offsets[-1] // lanes, -(-(offsets[-1] + local[-1]) // lanes)
    made = tile_elements(device) // LANES
    if isinstance(key, torch.Tensor):
        rows = key.view(1, 1)
    else:
        rows = torch.full((1, 1), signed(key), dtype=torch.int64, device=device)
    if len(local) > 1:
        words_a_row = -(-shape[-1] // lanes)
        places = positions(local[:-1], shape[:-1], offsets[:-1], device).reshape(-1, 1)
        rows = places * signed(words_a_row * GOLDEN) + rows
    room: list[torch.Tensor] = []
    for some, wide in tiles((len(rows), after - first), made, device):
        size = (some.stop - some.start, wide.stop - wide.start)
        room = room or [torch.empty(size, dtype=torch.int64, device=device) for _ in range(2)]
        x, shifted = room if room[0].shape == size else [half.view(-1)[: math.prod(size)].view(size) for half in room]
        words = torch.arange(first + wide.start, first + wide.stop, out=shifted.view(-1)[: size[1]]).mul_(GOLDEN)
        torch.add(rows[some], words, out=x)
        x.bitwise_xor_(torch.bitwise_right_shift(x, 30, out=shifted)).mul_(MIX1)
        x.bitwise_xor_(torch.bitwise_right_shift(x, 27, out=shifted)).mul_(MIX2)
        x.bitwise_xor_(torch.bitwise_right_shift(x, 31, out=shifted).bitwise_and_(0x1FFFFFFFF))
        numbers = x if lanes == 1 else x.view(torch.int16)
        begin = (first + wide.start) * lanes - offsets[-1]
        columns = slice(max(begin, 0), min(begin + size[1] * lanes, local[-1]))
        yield some, columns, numbers[:, columns.start - begin : columns.stop - begin]


def uniform(
    local: Sequence[int],
    dtype: torch.dtype,
    key: Key,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Uniform numbers in [0, 1) for a local block of a tensor of global `shape` that starts at `offsets`.

    As many bits as the dtype has digits, so that no number rounds up to 1.
    """
    digits = _DIGITS.get(dtype, 53)
    out = torch.empty((*local,), dtype=dtype, device=device)
    block = merged(local, shape, offsets)
    for rows, columns, bits in _hashes(block, key, device):
        numbers = bits.bitwise_right_shift_(64 - digits).to(torch.float64 if digits > 24 else torch.float32)
        block.matrix(out)[rows, columns].copy_(numbers.mul_(2.0**-digits).add_(0.5))
    return out


def normal(
    local: Sequence[int],
    dtype: torch.dtype,
    key: Key,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Standard normal numbers by Box and Muller, one pair of hashes an element."""
    u = uniform(local, torch.float64, _further(key, 1), shape, offsets, device)
    v = uniform(local, torch.float64, _further(key, 2), shape, offsets, device)
    radius = u.neg_().log1p_().mul_(-2.0).sqrt_()
    return v.mul_(2 * math.pi).cos_().mul_(radius).to(dtype)


def keep_mask(
    local: Sequence[int],
    p: float,
    key: Key,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.bool,
) -> torch.Tensor:
    """1 where an element is kept, which it is with probability 1 - p, 0 elsewhere."""
    lanes, least = threshold(p)
    out = torch.empty((*local,), dtype=dtype, device=device)
    block = merged(local, shape, offsets, lanes)
    for rows, columns, numbers in _hashes(block, key, device, lanes):
        tile = block.matrix(out)[rows, columns]
        if dtype in (torch.float32, torch.float64):
            tile.copy_(numbers).gt_(least)
        else:  # comparisons are vectorized where numbers are compared in their own dtype, which must hold 16 bits
            tile.copy_(numbers.float().gt_(least))
    return out


def dropout(
    x: torch.Tensor, p: float, key: Key, shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None
) -> torch.Tensor:
    """Zero elements with probability p, scale the rest; its own backward when called with the same key."""
    if p >= 1.0:
        return torch.zeros_like(x)
    if x.numel() and has_fused_dropout(x.dtype, device_of(x)) and _fits(x, shape, offsets):
        return fused_dropout(x, p, key, shape, offsets)
    return plain_dropout(x, p, key, shape, offsets)


def plain_dropout(
    x: torch.Tensor, p: float, key: Key, shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None
) -> torch.Tensor:
    """The same by torch's ops."""
    keep = keep_mask(tuple(x.shape), p, key, shape, offsets, x.device, x.dtype)
    return keep.mul_(x).mul_(1.0 / (1.0 - p))


def _fits(x: torch.Tensor, shape: Sequence[int] | None, offsets: Sequence[int] | None) -> bool:
    """Whether the kernel of a GPU takes a block, and gives there what torch's ops give."""
    if x.ndim > MOST_DIMS and len(merged(x.shape, shape, offsets, LANES).local) > MOST_DIMS:
        return False
    return not (x.is_cuda and torch.cuda.is_available()) or _equals_plain(x.dtype, x.device)


@functools.cache
def _equals_plain(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel of a GPU gives the bits of torch's ops on a CPU; a warning says where it does not."""
    place = (11, (4, 10, 301), (1, 2, 7))
    x = torch.linspace(-1.0, 1.0, 3 * 5 * 37, dtype=torch.float64).view(3, 5, 37).to(dtype)
    said = "gives other bits than torch's ops"
    with _disable_current_modes(), torch.no_grad():
        try:
            results = ((fused_dropout(x.to(device), p, *place).cpu(), plain_dropout(x, p, *place)) for p in (0.1, 3e-6))
            if all(torch.equal(one, other) for one, other in results):
                return True
        except Exception as error:  # Triton's are of many kinds
            said = f"fails: {(str(error).splitlines() or [repr(error)])[0]}"
    text = f"the kernel for dropout {said} on {torch.cuda.get_device_name(device)}; torch's ops are used"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return False
