"""Gradients on their way to the optimizer: accumulated, bucketed, reduced while the backward still runs.

A gradient is complete after `contributions * microbatches` calls of `add`. Then its resharding steps start: leading
local steps (shard) at once, and an all_reduce or reduce_scatter as part of a bucket, one flat asynchronous collective
per (kind, axes, dtype) that is issued when the bucket is full. Steps left after that go the same way in the next
round, at `finish`. A large gradient is a bucket of its own and is reduced where it lies when that is allowed:
reduce_scatter never writes its input, all_reduce does, so it asks that the caller gave the tensor away (`owned`).

    all_reduce bucket        [ g0 ........ | g1 .... | g2 ...... ]                 results are views of the bucket
    reduce_scatter bucket    [ g0[0] g1[0] | g0[1] g1[1] | … ]  row i: the i-th shards    results are views of one row

Buckets come from a pool and return to it at the first `add` after `finish`: gradients given out by `finish` are valid
until then. All ranks run the same program, so buckets fill, and collectives start, in the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .comm import Axes, Comm, Handle, Step, front_chunks
from .errors import RuntimeProgramError

Steps = tuple[Step, ...]
MIB = 1 << 20
BUCKETED = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class GradEntry:
    """How often per microbatch a parameter's gradient is added to, and the steps from there to its storage spec."""

    contributions: int
    steps: Steps = ()


@dataclass(slots=True)
class _Item:
    name: str
    grad: Tensor
    owned: bool
    dim: int
    rest: Steps


@dataclass(slots=True)
class _Bucket:
    items: list[_Item] = field(default_factory=list)
    nbytes: int = 0
    limit: int = 0


@dataclass(slots=True)
class _Flight:
    """An issued bucket: wait, then hand every item its part of the result."""

    items: list[_Item]
    handle: Handle[Tensor]
    results: list[Tensor]
    scratch: Tensor | None
    packed: bool


class BufferPool:
    """Flat buffers by (size, dtype), so that a step reuses the memory of the last one instead of faulting it in."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, like: Tensor) -> Tensor:
        free = self._free.get((numel, like.dtype))
        return free.pop() if free else torch.empty(numel, dtype=like.dtype, device=like.device)

    def give(self, buffer: Tensor) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


class GradStore:
    """The gradients of one step; see the module docstring for the order of events."""

    def __init__(
        self,
        comm: Comm,
        table: Mapping[str, GradEntry],
        microbatches: int = 1,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        direct_bytes: int = MIB,
        scale: float = 1.0,
    ) -> None:
        """scale multiplies every gradient (1/microbatches when the loss is the mean over microbatches)."""
        self.comm = comm
        self.table = dict(table)
        self.microbatches = microbatches
        self.bucket_bytes = bucket_bytes
        self.first_bucket_bytes = min(first_bucket_bytes, bucket_bytes)
        self.direct_bytes = direct_bytes
        self.scale = scale
        self._pool = BufferPool()
        self._lent: list[Tensor] = []
        self._sums: dict[str, tuple[Tensor, bool]] = {}
        self._counts: dict[str, int] = {}
        self._buckets: dict[tuple[Any, ...], _Bucket] = {}
        self._flights: list[_Flight] = []
        self._done: dict[str, Tensor] = {}
        self._values = 0
        self._finished = False

    @torch.no_grad()
    def add(self, name: str, grad: Tensor, owned: bool = False) -> None:
        """Add a contribution. owned: nobody else reads or holds this tensor, it may be reduced in place."""
        entry = self.table.get(name)
        if entry is None:
            raise RuntimeProgramError(f"the program has no gradient entry for parameter {name!r}")
        self._begin()
        count = self._counts.get(name, 0) + 1
        due = entry.contributions * self.microbatches
        if count > due:
            raise RuntimeProgramError(f"gradient of {name!r}: contribution {count} of {due} since the last finish()")
        self._counts[name] = count
        if count > 1:
            total, owned_total = self._sums.pop(name)
            grad = total.add_(grad) if owned_total else total + grad
            owned = True
        if count < due:
            self._sums[name] = (grad, owned)
            return
        if self.scale != 1.0:
            grad = grad.mul_(self.scale) if owned else grad * self.scale
            owned = True
        self._route(name, grad, owned, entry.steps)

    @torch.no_grad()
    def flush(self) -> None:
        """Issue what is open without waiting: nothing more will be added in this step."""
        for key in list(self._buckets):
            self._issue(key)

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        """Issue what is open, wait for everything: name -> reduced local gradient, in table order."""
        for name, entry in self.table.items():
            due = entry.contributions * self.microbatches
            if self._counts.get(name, 0) != due:
                raise RuntimeProgramError(f"gradient of {name!r}: {self._counts.get(name, 0)} of {due} contributions")
        self._drain()
        self._counts.clear()
        self._finished = True
        return {name: self._done.pop(name) for name in self.table if name in self._done}

    @torch.no_grad()
    def start_sum(self, value: Tensor, axes: Axes) -> Handle[Tensor]:
        """Sum a small value (a loss) over axes in the same message as the next gradients of these axes.

        Best waited for after finish(): an earlier wait sends open buckets at once.
        """
        name = f"value {self._values} to sum"
        self._values += 1
        self._begin()
        self._route(name, value, False, (("all_reduce", axes),))

        def wait() -> Tensor:
            if name not in self._done:
                self._drain()
            return self._done.pop(name).clone()

        return Handle(wait)

    def _drain(self) -> None:
        while self._buckets or self._flights:
            for key in list(self._buckets):
                self._issue(key)
            flights, self._flights = self._flights, []
            for flight in flights:
                self._land(flight)

    def _begin(self) -> None:
        """The first call after finish(): what it gave out may be overwritten from here on."""
        if self._finished:
            self._finished = False
            for buffer in self._lent:
                self._pool.give(buffer)
            self._lent.clear()

    def _route(self, name: str, grad: Tensor, owned: bool, steps: Steps) -> None:
        while steps and (steps[0][0] not in BUCKETED or self.comm.axis_size(steps[0][1]) == 1):
            if self.comm.axis_size(steps[0][1]) > 1:
                grad, owned = self.comm.run_step(grad, steps[0], site=f"gradient of {name}"), True
            steps = steps[1:]
        if not steps:
            self._done[name] = grad
            return
        kind, axes, *dims = steps[0]
        key = (kind, axes, grad.dtype)
        nbytes = grad.numel() * grad.element_size()
        item = _Item(name, grad, owned, dims[0] % grad.dim() if dims else 0, steps[1:])
        if self._direct(kind, item, nbytes):
            self._launch(kind, axes, [item], packed=False)
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            fresh = not self._flights
            limit = self.first_bucket_bytes if fresh else self.bucket_bytes
            bucket = self._buckets[key] = _Bucket(limit=limit)
        bucket.items.append(item)
        bucket.nbytes += nbytes
        if bucket.nbytes >= bucket.limit:
            self._issue(key)

    def _direct(self, kind: str, item: _Item, nbytes: int) -> bool:
        """Whether a gradient is reduced where it lies. A message of its own must pay: an all_reduce as large as a bucket."""
        least = self.bucket_bytes if kind == "all_reduce" else self.direct_bytes
        if nbytes < least or not item.grad.is_contiguous():
            return False
        return item.owned if kind == "all_reduce" else item.dim == 0

    def _issue(self, key: tuple[Any, ...]) -> None:
        kind, axes, _ = key
        self._launch(kind, axes, self._buckets.pop(key).items, packed=True)

    def _launch(self, kind: str, axes: Any, items: list[_Item], packed: bool) -> None:
        names = items[0].name if len(items) == 1 else f"{items[0].name} … {items[-1].name}"
        site = f"gradients of {names}"
        if kind == "all_reduce":
            self._flights.append(self._all_reduce(axes, items, packed, site))
            return
        in_flight = [flight for flight in self._flights if flight.scratch is not None]
        if len(in_flight) >= 2:
            self._flights.remove(in_flight[0])
            self._land(in_flight[0])
        self._flights.append(self._reduce_scatter(axes, items, packed, site))

    def _all_reduce(self, axes: Any, items: list[_Item], packed: bool, site: str) -> _Flight:
        if not packed:
            buffer = items[0].grad
            return _Flight(items, self.comm.start_all_reduce_into(buffer, axes, site=site), [buffer], None, False)
        flat = self._pool.take(sum(item.grad.numel() for item in items), items[0].grad)
        self._lent.append(flat)
        results = []
        for item, part in zip(items, flat.split([item.grad.numel() for item in items]), strict=True):
            results.append(part.view(item.grad.shape).copy_(item.grad))
            item.grad = flat
        return _Flight(items, self.comm.start_all_reduce_into(flat, axes, site=site), results, None, True)

    def _reduce_scatter(self, axes: Any, items: list[_Item], packed: bool, site: str) -> _Flight:
        n = self.comm.axis_size(axes)
        shapes = [self._shard_shape(item, n) for item in items]
        sizes = [item.grad.numel() // n for item in items]
        out = self._pool.take(sum(sizes), items[0].grad)
        self._lent.append(out)
        if packed:
            scratch = self._pool.take(n * sum(sizes), items[0].grad)
            rows, start = scratch.view(n, sum(sizes)), 0
            for item, size, shape in zip(items, sizes, shapes, strict=True):
                rows[:, start : start + size].view(n, *shape).copy_(front_chunks(item.grad, item.dim, n))
                start += size
                item.grad = scratch
        else:
            scratch = items[0].grad
            rows = scratch.view(n, sizes[0])
        results = [part.view(shape) for part, shape in zip(out.split(sizes), shapes, strict=True)]
        handle = self.comm.start_reduce_scatter_into(out, rows, axes, site=site)
        return _Flight(items, handle, results, scratch, packed)

    def _shard_shape(self, item: _Item, n: int) -> tuple[int, ...]:
        shape = list(item.grad.shape)
        if shape[item.dim] % n:
            raise RuntimeProgramError(
                f"gradient of {item.name!r}: dim {item.dim} of {tuple(shape)} cannot be split in {n}"
            )
        shape[item.dim] //= n
        return tuple(shape)

    def _land(self, flight: _Flight) -> None:
        flight.handle.wait()
        if flight.scratch is not None and flight.packed:
            self._pool.give(flight.scratch)
        for item, result in zip(flight.items, flight.results, strict=True):
            # Results of later all_reduce rounds are packed anew: views of a bucket are never given away.
            self._route(item.name, result, False, item.rest)
