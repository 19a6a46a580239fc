"""Flat buffers that messages use again."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Flat buffers by (size, dtype), so that a message reuses the memory of an earlier one instead of faulting it in."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, like: Tensor) -> Tensor:
        free = self._free.get((numel, like.dtype))
        return free.pop() if free else like.new_empty(numel)

    def give(self, buffer: Tensor) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        self._free.clear()
