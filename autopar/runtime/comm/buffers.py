"""Flat buffers that messages use again."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Flat buffers by (size, dtype), so that a message reuses the memory of an earlier one instead of faulting it in. most: so
    many are kept for later, those that were given last (None: all)."""

    def __init__(self, most: int | None = None) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._most, self._order = most, list[tuple[int, torch.dtype]]()

    def take(self, numel: int, like: Tensor) -> Tensor:
        key = numel, like.dtype
        free = self._free.get(key)
        if not free:
            return like.new_empty(numel)
        if self._most is not None:
            self._order.remove(key)
        return free.pop()

    def give(self, buffer: Tensor) -> None:
        key = buffer.numel(), buffer.dtype
        self._free.setdefault(key, []).append(buffer)
        if self._most is not None:
            self._order.append(key)
            if len(self._order) > self._most:
                self._free[self._order.pop(0)].pop(0)

    def clear(self) -> None:
        self._free.clear()
        self._order.clear()
