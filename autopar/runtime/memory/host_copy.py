"""Copies of tensors in one host buffer that is kept: what is saved while training goes on changing the originals.

The buffer is pinned where tensors come from a GPU. Filling it asks for no memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..comm.backends import backend_of
from ..errors import CheckpointError

_ALIGNED = 64
"""Bytes, to a multiple of which every tensor's place is rounded up."""


class HostCopy:
    """Room for tensors of these shapes and dtypes. tensors: the copies by name; numbers: their bytes."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        starts, end = [], 0
        for value in like.values():
            starts.append(end)
            end += -(-value.nbytes // _ALIGNED) * _ALIGNED
        self._devices = {value.device for value in like.values() if not backend_of(value.device).is_host}
        buffer = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=bool(self._devices))
        every = memoryview((ctypes.c_ubyte * end).from_address(buffer.data_ptr())).cast("B")
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, memoryview] = {}
        for start, (name, value) in zip(starts, like.items(), strict=True):
            room = buffer[start : start + value.nbytes]
            self.tensors[name] = room.view(value.dtype).view(value.shape)
            self.numbers[name] = every[start : start + value.nbytes]

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copy these values of the same names; they may change when it returns."""
        for name, room in self.tensors.items():
            room.copy_(values[name], non_blocking=True)
        for device in self._devices:
            backend_of(device).catch_up(device)

    def check_finite(self) -> None:
        """Raises CheckpointError where a copy has entries that are no numbers: from such a step nothing can go on."""
        for name, value in self.tensors.items():
            if value.is_floating_point() and value.numel():
                least, most = torch.aminmax(value)  # NaN where an entry is; a tenth of isfinite's time
                if not (math.isfinite(least) and math.isfinite(most)):
                    raise CheckpointError(f"{name} is not finite")
