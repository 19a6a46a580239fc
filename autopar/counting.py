"""A dispatch mode that counts bytes: a storage counts from the op that made it until it is freed; views share theirs.

Used on real tensors to measure a running rank, and on meta tensors to see what one op makes and needs beside it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ByteCounter(TorchDispatchMode):
    """Counts the storages that are made under it, on this thread, until they are freed, on any thread.

    alive: bytes now; peak: the most since `restart`. What is a view of a storage made elsewhere is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._lock = threading.RLock()  # a storage may be freed on this thread while it counts another
        self._refs: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            given: set[int] | None = None
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._refs:
                        given = storages((args, kwargs)) if given is None else given
                        if storage._cdata not in given:
                            self._add(storage)
        return result

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.alive

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside is not counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            with self._lock:
                if self._refs.pop(key, None) is not None:
                    self.alive -= nbytes

        with self._lock:
            self._refs[key] = (weakref.ref(storage, freed), nbytes)
            self.alive += nbytes
            self.peak = max(self.peak, self.alive)


def storages(values: Any) -> set[int]:
    """Keys of the storages of all tensors in a tree."""
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
