"""The kind of device by which kernels are chosen: the one that a tensor lies on, or stands for.

A tensor on the meta device is asked what it would need elsewhere: it stands for one on a CPU, or on the device that
`standing_for` says. So do fake tensors of a GPU where there is none.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .backends import CUDA, HOST, Backend, backend_of


@dataclass(frozen=True)
class Device:
    """type: "cpu", "cuda", "rocm". capability: of a CUDA device, (9, 0) of an H100. resident_threads: those that run on it at
    once, where a cluster says it (None: not known)."""

    type: str
    capability: tuple[int, int] = (0, 0)
    resident_threads: int | None = None

    @staticmethod
    def of_architecture(name: str) -> Device:
        """The device of an architecture by the compiler's name of it: "sm90", "gfx942", "" for a CPU."""
        if name.startswith("sm"):
            return Device(CUDA.device_type, (int(name[2:-1]), int(name[-1])))
        return Device("rocm") if name.startswith("gfx") else CPU


CPU = Device(HOST.device_type)
LEAST_CUDA = Device(CUDA.device_type, CUDA.least)
"""The device that is assumed for a CUDA device of which nothing else is known."""
_OF_THREAD = threading.local()


@contextmanager
def standing_for(device: Device) -> Iterator[None]:
    """Inside, tensors without data are asked about this device."""
    before = getattr(_OF_THREAD, "device", None)
    _OF_THREAD.device = device
    try:
        yield
    finally:
        _OF_THREAD.device = before


def device_of(tensor: torch.Tensor) -> Device:
    """The device that kernels for a tensor are chosen for."""
    return kind_of(tensor.device)


def kind_of(device: torch.device) -> Device:
    """The same by where a tensor lies."""
    row = backend_of(device)
    if row.is_host and device.type == row.device_type:
        return CPU
    stands_for: Device | None = getattr(_OF_THREAD, "device", None)
    if row.is_host:
        return stands_for or CPU
    if not row.count():
        return stands_for or Device(row.device_type, row.least)
    return _present(row, device.index or 0)


def runs_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of a device's kernels and messages, so that it had to wait to know what they find."""
    return kind_of(device) != CPU


@functools.cache
def _present(row: Backend, index: int) -> Device:
    """A device of this machine."""
    return Device(*row.kernels(index)) if row.kernels else Device(row.device_type)
