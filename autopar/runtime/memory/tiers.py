"""Memory tiers of one rank, beside the device's own memory: one row of `TIER_KINDS` says all that is known of a kind of tier.

What is parked in a tier is a tensor of the host: pinned memory where the device is a GPU, or a memory-mapped file (unlinked
as soon as it is mapped, so nothing is left behind however the process ends). On a CPU the device and the host are one
memory, and bytes are copied all the same: a tier is then a second allocator, whose bytes whoever counts tells apart by
`allocating()`.

Copies run on streams of their own, one for each direction, of which a CPU has the name alone: a read waits for what was written
to its own room, and for nothing else that is on its way out. A fetched value may be used after `ready` or `arrived`, and what
lies in a tier may be read or written by the host after `settle`. What goes to files goes through pinned memory (staging.py).

    forward    saved = [x, h, m]  --park(0, 1)-->  [Parked, Parked, m]          x's and h's device memory is free
    backward   fetch: [x', h', m], on their way     ready: they are there        the tier's memory is free
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import threading
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.backends import backend_of
from ..errors import RuntimeProgramError
from .staging import Staging


@dataclass(frozen=True)
class TierKind:
    """A kind of memory tier. rank: its place among the kinds, fastest first, which is the order in which a device has its tiers
    and in which they are filled. holds: what its bytes lie in, in words; in_files: whether that is a file, else it is memory of
    the host."""

    name: str
    rank: float
    holds: str
    in_files: bool = False


HOST_MEMORY = TierKind("ddr", 1, "host memory")
TIER_KINDS = {kind.name: kind for kind in (HOST_MEMORY, TierKind("nvme", 2, "a file", in_files=True))}
"""Every kind of tier by its name; to add one, add its row."""


def tier_names() -> tuple[str, ...]:
    """The names of all kinds of tiers, fastest first."""
    return tuple(sorted(TIER_KINDS, key=lambda name: TIER_KINDS[name].rank))


_thread = threading.local()


def allocating() -> str:
    """The tier in which this thread is making a tensor ("": on the device)."""
    return getattr(_thread, "tier", "")


@contextmanager
def _in_tier(tier: str) -> Iterator[None]:
    before, _thread.tier = allocating(), tier
    try:
        yield
    finally:
        _thread.tier = before


@dataclass(slots=True)
class Parked:
    """A tensor whose whole storage lies in a tier, as `flat`; views of one storage share it."""

    flat: Tensor
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Tiers:
    """Where one rank parks tensors. directory: of the files of tiers that lie in files (default: that of temporary files)."""

    def __init__(self, device: torch.device | str = "cpu", directory: str | os.PathLike[str] | None = None) -> None:
        self.device = torch.device(device)
        self.directory = directory
        self._backend = backend_of(self.device)
        self._module = self._backend.module
        self._out, self._back = self._module.Stream(self.device), self._module.Stream(self.device)
        self._events: dict[int, Any] = {}
        self._written: dict[int, Any] = {}
        """By room, an event behind the last copy into it that no read has waited for yet."""
        self._staging = Staging(pin=not self._backend.is_host)

    # ---- tensors

    def empty_like(self, value: Tensor, tier: str) -> Tensor:
        """Room for a tensor in a tier, dense and in its order of dims."""
        return self.empty(tuple(value.shape), value.dtype, tier).as_strided(value.shape, _dense(value))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, tier: str) -> Tensor:
        """Room for a contiguous tensor in a tier."""
        if tier not in TIER_KINDS:
            raise RuntimeProgramError(f"unknown memory tier {tier!r}; tiers are {', '.join(tier_names())}")
        with _in_tier(tier):
            if TIER_KINDS[tier].in_files:
                return self._file(math.prod(shape), dtype, tier).view(tuple(shape))
            if not self._backend.is_host:
                _warn_where_rounded()
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=not self._backend.is_host)

    def write(self, target: Tensor, value: Tensor) -> None:
        """Start copying a device tensor into its room in a tier."""
        staged = self._pageable(target)
        room = self._staging.room_like(target) if staged else target
        self._out.wait_stream(self._module.current_stream(self.device))
        self._copy(room, value, self._out)
        self._backend.hold(value, self._out)
        event = self._out.record_event()
        if staged:
            self._staging.add(target, room, event)
        elif event is not None:
            self._written[target.untyped_storage()._cdata] = event

    def read(self, source: Tensor) -> Tensor:
        """Start copying a tensor of a tier to the device; use it after `arrived`."""
        on_device = torch.empty_like(source, device=self.device)
        event = self._written.pop(source.untyped_storage()._cdata, None)
        if event is not None:
            self._back.wait_event(event)  # as do all reads behind this one
        self._back.wait_stream(self._module.current_stream(self.device))
        self._copy(on_device, self._staging.read(source) if self._pageable(source) else source, self._back)
        return on_device

    def mark(self) -> Any:
        """A mark behind all that was read so far."""
        return self._back.record_event()

    def arrived(self, mark: Any) -> None:
        """Make the kernels that follow wait for what was read before the mark."""
        if mark is not None:
            self._module.current_stream(self.device).wait_event(mark)

    def settle(self) -> None:
        """Wait until all copies to and from tiers are done: the host may read and write what lies there."""
        if not self._backend.is_host:
            self._out.synchronize()
            self._back.synchronize()
            self._staging.settle()
            self._written.clear()

    # ---- saved values

    def park(self, saved: list[Any], places: Sequence[int], tier: str, resting: Collection[int] = ()) -> None:
        """Move these entries of a list to a tier, where they are `Parked`. resting: storages that stay as they are."""
        flats: dict[int, Tensor] = {}
        for place in places:
            value = saved[place]
            storage = value.untyped_storage()
            key, itemsize = storage._cdata, value.element_size()
            if key in resting or storage.nbytes() % itemsize:
                continue
            flat = flats.get(key)
            if flat is None:
                whole = value.as_strided((storage.nbytes() // itemsize,), (1,), 0)
                flat = flats[key] = self.empty_like(whole, tier)
                self.write(flat, whole)
            saved[place] = Parked(flat, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())

    def fetch(self, saved: list[Any]) -> None:
        """Start bringing the parked entries of a list back; `ready` says when they may be used."""
        flats: dict[int, Tensor] = {}
        for place, entry in enumerate(saved):
            if isinstance(entry, Parked):
                key = id(entry.flat)
                if key not in flats:
                    flats[key] = self.read(entry.flat)
                saved[place] = flats[key].view(entry.dtype).as_strided(entry.size, entry.stride, entry.offset)
        if flats:
            self._events[id(saved)] = self.mark()

    def ready(self, saved: list[Any]) -> None:
        """Make the kernels that follow wait for the fetched entries of a list."""
        self.arrived(self._events.pop(id(saved), None))

    def _copy(self, target: Tensor, value: Tensor, stream: Any) -> None:
        with self._module.stream(stream):
            target.copy_(value, non_blocking=True)

    def _pageable(self, room: Tensor) -> bool:
        """Whether a device would keep the host waiting while it copies."""
        return not (self._backend.is_host or room.is_pinned())

    def _file(self, numel: int, dtype: torch.dtype, tier: str) -> Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        handle, path = tempfile.mkstemp(prefix="autopar_", suffix=".tier", dir=self.directory)
        try:
            os.posix_fallocate(handle, 0, numel * dtype.itemsize)  # a full disk is an error here, not a signal later
            return torch.from_file(path, shared=True, size=numel, dtype=dtype)
        except OSError as error:
            raise RuntimeProgramError(
                f"memory tier {tier}: no file of {numel * dtype.itemsize} bytes in {os.path.dirname(path)} ({error.strerror}); "
                "make room there or give another directory"
            ) from error
        finally:
            os.close(handle)
            os.unlink(path)


@functools.cache
def _warn_where_rounded() -> None:
    """Warn once where torch rounds pinned memory up to powers of two, as it does unless its environment says otherwise."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if "pinned_max_round_threshold_mb" not in next((os.environ[name] for name in names if name in os.environ), ""):
        warnings.warn(
            "what is offloaded takes up to twice its bytes of pinned memory, as torch rounds them up to powers of two; set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True,pinned_max_round_threshold_mb:1 before torch is imported (run.py does)",
            stacklevel=2,
        )


def _dense(value: Tensor) -> tuple[int, ...]:
    """The strides that `torch.empty_like` gives: its own where they leave no holes, else contiguous ones."""
    step = 1
    for stride, size in sorted((st, n) for st, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if stride != step:
            strides = [1]
            for n in reversed(value.shape[1:]):
                strides.append(strides[-1] * max(n, 1))
            return tuple(reversed(strides[: value.dim()])) if value.dim() else ()
        step *= size
    return tuple(value.stride())
