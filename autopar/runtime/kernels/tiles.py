"""Work on large tensors in tiles: several steps over a part that stays in a CPU's cache, instead of each over the whole.

What steps need beside their result is then as small as a tile. Each tile costs the calls of its steps, microseconds on a
CPU. On other devices a tile is large enough to keep all of the device busy, and small beside its memory.
Meta tensors are not computed with, they are asked what steps need: two tiles tell, as what the first one leaves is there
while the second is made. No tile is larger than the first. Who traces the steps for a compiler, which cuts them for itself,
asks for one tile (`whole`).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..comm.devices import kind_of

LOG2_E = 1 / math.log(2)
"""exp x = 2 ** (x · log2 e), which torch has vectorized on a CPU whatever x is; its exp is slow where the result is 0."""

_ELEMENTS = {"cpu": 1 << 17}
_ELEMENTS_ELSEWHERE = 1 << 24
_OF_THREAD = threading.local()


@contextmanager
def whole() -> Iterator[None]:
    """Inside, a tile is as large as it can be asked for."""
    _OF_THREAD.whole = True
    try:
        yield
    finally:
        _OF_THREAD.whole = False


def tile_elements(device: torch.device | None) -> int:
    """How many elements a tile should have: those of 4 bytes fill a quarter of a CPU's second cache."""
    if getattr(_OF_THREAD, "whole", False):
        return 1 << 62
    return _ELEMENTS.get(kind_of(torch.device(device or "cpu")).type, _ELEMENTS_ELSEWHERE)


def tiles(shape: Sequence[int], elements: int, device: torch.device | None) -> Iterator[tuple[slice, ...]]:
    """Cuts a tensor of this shape into tiles of at most so many elements: inner dims stay whole as long as they fit."""
    sizes: list[int] = []
    for n in reversed(shape):
        sizes.insert(0, max(1, min(n, elements)))
        elements //= max(n, 1)
    on_meta = torch.device(device or "cpu").type == "meta"
    yield from itertools.islice(_cuts(shape, sizes), 2 if on_meta else None)


def is_one_tile(x: torch.Tensor) -> bool:
    """Whether a tensor is no larger than a tile: steps over parts of it would cost calls alone."""
    return x.numel() <= tile_elements(x.device)


def row_tiles(x: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tiles of x, whose last dim stays whole, each with the same rows of the others."""
    rows = max(tile_elements(x.device) // max(x.shape[-1], 1), 1)
    if x.dim() == 2 and not x.is_meta:  # a tensor is cut by one call, where each tile would take several
        yield from zip(*(tensor.split(rows) for tensor in (x, *others)), strict=True)
        return
    for tile in tiles(x.shape[:-1], rows, x.device):
        yield tuple(tensor[(*tile, slice(None))] for tensor in (x, *others))


def _cuts(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    if not shape:
        yield ()
        return
    for start in range(0, shape[0], sizes[0]):
        for inner in _cuts(shape[1:], sizes[1:]):
            yield (slice(start, min(start + sizes[0], shape[0])), *inner)
