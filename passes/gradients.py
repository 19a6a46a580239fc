"""The bytes of a stage's gradient store over a step: the runtime's order of events (runtime/grads.py) over numbers.

Gradients are summed over microbatches, packed in buckets, reduced and handed out; flat buffers stay in a pool from step
to step. `hold` is what the store holds now, `top` the most since it was set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.ir.lowered import StoredParameter
from autopar.runtime.grads import BUCKETED, MIB

Steps = tuple[Any, ...]


class StoreBytes:
    """Mirrors GradStore: names are the same, tensors are their bytes."""

    def __init__(
        self, parameters: Mapping[str, StoredParameter], sizes: Mapping[str, int], microbatches: int, scaled: bool,
        bucket_bytes: int = 25 * MIB,
    ) -> None:  # fmt: skip
        self.due = {n: p.contributions * microbatches for n, p in parameters.items() if p.contributions}
        self.steps = {n: p.reduce for n, p in parameters.items()}
        self.itemsize = {n: p.type.dtype.itemsize for n, p in parameters.items()}
        self.dims = {n: len(p.type.shape) for n, p in parameters.items()}
        self.sizes, self.scaled, self.bucket_bytes = sizes, scaled, bucket_bytes
        self.hold = self.top = 0
        self._pool: dict[tuple[int, int], int] = {}
        self._lent: list[tuple[int, int]] = []
        self._sums: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._buckets: dict[Any, list[tuple[str, int, int, Steps]]] = {}
        self._flights: list[tuple[list[tuple[str, int, int, Steps]], list[int], int, bool]] = []
        self._done: dict[str, int] = {}
        self._limits: dict[Any, int] = {}
        self._finished = False

    def peak(self, nbytes: int = 0) -> None:
        self.top = max(self.top, self.hold + nbytes)

    def add(self, name: str, nbytes: int, owned: bool) -> None:
        """A gradient that the store now holds alone."""
        if self._finished:
            self._finished = False
            for buffer in self._lent:
                self._pool[buffer] = self._pool.get(buffer, 0) + 1
            self._lent.clear()
        self.hold += nbytes
        self.peak()
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count > 1:
            if not self._sums.pop(name):
                self.peak(nbytes)
            self.hold -= nbytes
            owned = True
        if count < self.due[name]:
            self._sums[name] = int(owned)
            return
        if self.scaled and not owned:
            self.peak(nbytes)
            owned = True
        self._route(name, nbytes, owned, self.steps[name])

    def flush(self) -> None:
        for key in list(self._buckets):
            self._launch(key, self._buckets.pop(key), True)

    def finish(self) -> None:
        """All reduced; gradients that are views of lent buffers cost nothing beside them."""
        while self._buckets or self._flights:
            self.flush()
            flights, self._flights = self._flights, []
            for flight in flights:
                self._land(flight)
        self._counts.clear()
        self._finished = True

    def forget(self) -> None:
        """The step after: gradients handed out are let go."""
        self.hold -= sum(self._done.values())
        self._done.clear()

    # ---- small print

    def _route(self, name: str, nbytes: int, owned: bool, steps: Steps, view: bool = False) -> None:
        """view: the bytes are part of a lent buffer."""
        while steps and (steps[0][0] not in BUCKETED or self._size(steps[0]) == 1):
            size = self._size(steps[0])
            if size > 1:
                kind = steps[0][0]
                made = nbytes // size if kind == "shard" else nbytes * size if kind == "all_gather" else nbytes
                self.peak(made if kind == "shard" else made + max(made, nbytes))
                self.hold += made - (0 if view else nbytes)
                nbytes, owned, view = made, True, False
            steps = steps[1:]
        if not steps:
            if not view:
                self._done[name] = nbytes
            return
        kind, axes, *dims = steps[0]
        item = (name, nbytes, 0 if view else nbytes, steps)
        least = self.bucket_bytes if kind == "all_reduce" else MIB
        dim = dims[0] % max(self.dims[name], 1) if dims else 0
        key = (kind, axes, self.itemsize[name])
        if nbytes >= least and not view and (owned if kind == "all_reduce" else dim == 0):
            self._launch(key, [item], False)
            return
        bucket = self._buckets.setdefault(key, [])
        if not bucket:
            self._limits[key] = min(MIB, self.bucket_bytes) if not self._flights else self.bucket_bytes
        bucket.append(item)
        if sum(n for _, n, _, _ in bucket) >= self._limits[key]:
            self._launch(key, self._buckets.pop(key), True)

    def _launch(self, key: Any, items: list[tuple[str, int, int, Steps]], packed: bool) -> None:
        kind, itemsize = key[0], key[2]
        total = sum(n for _, n, _, _ in items)
        if kind == "all_reduce":
            if packed:
                self._take((total, itemsize), lent=True)
                self._release(items)
            self._flights.append((items, [n for _, n, _, _ in items], 0, packed))
            return
        waiting = [f for f in self._flights if f[2]]
        if len(waiting) >= 2:
            self._flights.remove(waiting[0])
            self._land(waiting[0])
        size = self._size(items[0][3][0])
        self._take((total // size, itemsize), lent=True)
        if packed:
            self._take((total, itemsize))
            self._release(items)
        self._flights.append((items, [n // size for _, n, _, _ in items], total, packed))

    def _land(self, flight: tuple[list[tuple[str, int, int, Steps]], list[int], int, bool]) -> None:
        items, results, scratch, packed = flight
        if scratch and packed:
            key = (scratch, self.itemsize[items[0][0]])
            self._pool[key] = self._pool.get(key, 0) + 1
        view = packed or bool(scratch)
        for (name, _, _, steps), result in zip(items, results, strict=True):
            self._route(name, result, False, steps[1:], view)
        if scratch and not packed:
            self._release(items)

    def _release(self, items: Sequence[tuple[str, int, int, Steps]]) -> None:
        """What items held goes, one by one, after it is copied."""
        self.hold -= sum(own for _, _, own, _ in items)

    def _take(self, buffer: tuple[int, int], lent: bool = False) -> None:
        if self._pool.get(buffer, 0):
            self._pool[buffer] -= 1
        else:
            self.hold += buffer[0]
        self.peak()
        if lent:
            self._lent.append(buffer)

    def _size(self, step: Any) -> int:
        size = 1
        for axis in (step[1],) if isinstance(step[1], str) else step[1]:
            size *= self.sizes[axis]
        return size
