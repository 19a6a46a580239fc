"""A dispatch mode that counts bytes: a storage counts from the op that made it until it is freed; views share theirs.

Used on real tensors to measure a running rank, and on meta tensors to see what one op makes and needs beside it. A
storage that is resized, by an op or by `untyped_storage().resize_`, counts with its size of the moment. Of a tensor
that wraps others (a DTensor) the tensors inside count. With a limit, a counter is an allocator that runs out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.errors import MemoryLimitError
from autopar.runtime.memory.tiers import allocating


class ByteCounter(TorchDispatchMode):
    """Counts the storages that are made under it, on this thread, until they are freed, on any thread.

    alive: bytes now; peak: the most since `restart`. What is a view of a storage made elsewhere is not counted. What is
    made in a memory tier counts there alone: parked: bytes now by tier, parked_peak: the most.
    """

    def __init__(self, limit_bytes: float | None = None, name: str = "") -> None:
        """limit_bytes: of what is alive; an op that passes it raises MemoryLimitError. name: whose memory it is."""
        super().__init__()
        self.limit_bytes = limit_bytes
        self.name = name
        self.alive = 0
        self.peak = 0
        self.parked: dict[str, int] = {}
        self.parked_peak: dict[str, int] = {}
        self._lock = threading.RLock()  # a storage may be freed on this thread while it counts another
        self._refs: dict[int, _Held] = {}
        self._paused = False

    def __enter__(self) -> Any:
        _RESIZES.watch(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _RESIZES.leave(self)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper comes first, its ops on the tensors inside come back here
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            argument_storages: set[int] | None = None
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "__tensor_flatten__"):
                    storage = tensor.untyped_storage()
                    if storage._cdata in self._refs:
                        self._resized(storage, func)
                        continue
                    argument_storages = storages((args, kwargs)) if argument_storages is None else argument_storages
                    if storage._cdata not in argument_storages:
                        self._add(storage, func)
        return result

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.alive
        self.parked_peak = dict(self.parked)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Tensors that are made inside are not counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _add(self, storage: torch.UntypedStorage, func: Any) -> None:
        key, tier = storage._cdata, allocating()

        def freed(_: Any) -> None:
            with self._lock:
                held = self._refs.pop(key, None)
                if held is not None:
                    self._change(tier, -held.nbytes)

        with self._lock:
            self._refs[key] = _Held(weakref.ref(storage, freed), storage.nbytes(), tier)
            self._change(tier, storage.nbytes())
        self._check(storage.nbytes(), tier, func)

    def _resized(self, storage: torch.UntypedStorage, func: Any) -> None:
        """Count a known storage with the size that it has now."""
        with self._lock:
            held = self._refs.get(storage._cdata)
            if held is None or held.nbytes == storage.nbytes():
                return
            grown, held.nbytes = storage.nbytes() - held.nbytes, storage.nbytes()
            self._change(held.tier, grown)
        self._check(grown, held.tier, func)

    def _change(self, tier: str | None, nbytes: int) -> None:
        if tier:
            self.parked[tier] = self.parked.get(tier, 0) + nbytes
            self.parked_peak[tier] = max(self.parked_peak.get(tier, 0), self.parked[tier])
            return
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)

    def _check(self, nbytes: int, tier: str | None, func: Any) -> None:
        if self.limit_bytes is None or tier or nbytes <= 0 or self.alive <= self.limit_bytes:
            return
        raise MemoryLimitError(
            f"{self.name or 'the program'}: {func} asked for {nbytes:,} bytes with {self.alive - nbytes:,} in use, "
            f"the limit is {self.limit_bytes:,.0f}: {self.alive - self.limit_bytes:,.0f} bytes are short; compile with "
            "Options(memory_bytes=...) at the limit, or use more ranks"
        )


class ChangeCounter(ByteCounter):
    """The same, with every change of the bytes alive in order, as a storage is made, resized or freed."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[int] = []

    def _change(self, tier: str | None, nbytes: int) -> None:
        super()._change(tier, nbytes)
        if not tier:
            self.changes.append(nbytes)


@dataclass(slots=True)
class _Held:
    """A storage that counts: nbytes as counted, in a memory tier or on the device."""

    ref: weakref.ref[Any]
    nbytes: int
    tier: str | None


class _Resizes:
    """`UntypedStorage.resize_` goes past the dispatcher: while counters are at work it tells them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: list[ByteCounter] = []
        self._plain: Any = None

    def watch(self, counter: ByteCounter) -> None:
        with self._lock:
            if not self._counters:
                plain = self._plain = torch.UntypedStorage.resize_

                def resize_(storage: torch.UntypedStorage, size: int) -> Any:
                    result = plain(storage, size)
                    for one in list(self._counters):
                        one._resized(storage, "resize_ of a storage")
                    return result

                torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
            self._counters.append(counter)

    def leave(self, counter: ByteCounter) -> None:
        with self._lock:
            self._counters.remove(counter)
            if not self._counters:
                torch.UntypedStorage.resize_ = self._plain  # type: ignore[method-assign]


_RESIZES = _Resizes()


def storages(values: Any) -> set[int]:
    """Keys of the storages of all tensors in a tree."""
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
