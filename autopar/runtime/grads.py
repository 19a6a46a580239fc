"""Gradients on their way to the optimizer: accumulated, bucketed, reduced while the backward still runs.

A gradient is complete after `contributions * microbatches` calls of `add`. Then its resharding steps start: leading
local steps (shard) at once, and an all_reduce or reduce_scatter as part of a bucket, one flat asynchronous collective
per (kind, axes, dtype) that is issued when the bucket is full. Steps left after that go the same way in the next
round, at `finish`. A large gradient is a bucket of its own and is reduced where it lies when that is allowed:
reduce_scatter never writes its input, all_reduce does, so it asks that the caller gave the tensor away (`owned`).

    all_reduce bucket        [ g0 ........ | g1 .... | g2 ...... ]                 results are views of the bucket
    reduce_scatter bucket    [ g0[0] g1[0] | g0[1] g1[1] | … ]  row i: the i-th shards    results are views of one row

Gradients that were computed in 16 bits are summed and reduced in the dtype of the parameter that is stored.

Compensated sums keep beside a sum of many addends what rounding lost of it (Kahan): y = g - c, t = s + y,
c = (t - s) - y, s = t. It is of use from the third addend on.

What is packed to be scattered lies in a pool for the length of a step; gradients given out by `finish` are parts of
buckets that last until `forget`, or the first `add` of the next step. So a step begins
with nothing of the last one. All ranks run the same program, so buckets fill, and collectives start, in the same order
everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .comm import Axes, Comm, Handle, Step, front_chunks
from .errors import RuntimeProgramError
from .tiers import Tiers

Steps = tuple[Step, ...]
MIB = 1 << 20
BUCKETED = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class GradEntry:
    """How often per microbatch a parameter's gradient is added to, and the steps from there to its storage spec.

    dtype: of the sum and its reduction, to which contributions are cast (None: that of the contributions).
    """

    contributions: int
    steps: Steps = ()
    dtype: torch.dtype | None = None


@dataclass(slots=True)
class _Sum:
    """What was added so far. owned: nobody else has its memory; lost: the compensation."""

    value: Tensor
    owned: bool
    lost: Tensor | None = None


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
    """Flat buffers by (size, dtype), so that a message reuses the memory of an earlier one instead of faulting it in."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, like: Tensor) -> Tensor:
        free = self._free.get((numel, like.dtype))
        return free.pop() if free else torch.empty(numel, dtype=like.dtype, device=like.device)

    def give(self, buffer: Tensor) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        self._free.clear()


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
        compensated: bool = False,
        tiers: Tiers | None = None,
        tier_of: Mapping[str, str] | None = None,
    ) -> None:
        """scale multiplies every gradient (1/microbatches when the loss is the mean over microbatches). compensated: sums
        of three and more addends carry what rounding loses. tier_of: memory tiers of `tiers` in which sums between
        microbatches, and reduced gradients, rest; their buckets are made anew each time and land early."""
        self.comm = comm
        self.table = dict(table)
        self.microbatches = microbatches
        self.bucket_bytes = bucket_bytes
        self.first_bucket_bytes = min(first_bucket_bytes, bucket_bytes)
        self.direct_bytes = direct_bytes
        self.scale = scale
        self.compensated = compensated
        self.borrowed: set[str] = set()  # of the gradients that `finish` gave out: others may hold these tensors too
        self.tiers = tiers or Tiers(comm.device)
        self.tier_of = dict(tier_of or {})
        self._pool = BufferPool()
        self._lent: list[Tensor] = []
        self._sums: dict[str, _Sum] = {}
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
        if entry.dtype not in (None, grad.dtype) and (count == 1 or (self.compensated and due > 2)):
            grad, owned = grad.to(entry.dtype), True
        if count > 1:
            total = self._brought(name, self._sums.pop(name))
            if total.lost is not None:
                total = _add_compensated(total, total.lost, grad, owned, count == due)
            else:
                total = _Sum(total.value.add_(grad) if total.owned else total.value + grad, True)
        else:
            total = _Sum(grad, owned, torch.zeros_like(grad) if self.compensated and due > 2 else None)
        if count < due:
            self._sums[name] = self._rested(name, total)
            return
        grad, owned = total.value, total.owned
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
        self._pool.clear()
        self._finished = True
        return {name: self._done.pop(name) for name in self.table if name in self._done}

    def forget(self) -> None:
        """The gradients that `finish` gave out are used: their buckets go when the caller has dropped them."""
        self._lent.clear()

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
            while flights:
                self._land(flights.pop(0))

    def _begin(self) -> None:
        """The first call after finish(): what it gave out may be overwritten from here on."""
        if self._finished:
            self._finished = False
            self.borrowed.clear()
            self.forget()

    def _route(self, name: str, grad: Tensor, owned: bool, steps: Steps, landed: bool = False) -> None:
        """landed: grad is part of a bucket of this store."""
        while steps and (steps[0][0] not in BUCKETED or self.comm.axis_size(steps[0][1]) == 1):
            if self.comm.axis_size(steps[0][1]) > 1:
                grad, owned = self.comm.run_step(grad, steps[0], site=f"gradient of {name}"), True
            steps = steps[1:]
        if not steps:
            self._done[name] = self._parked(name, grad)
            if not (owned or landed or name in self.tier_of):
                self.borrowed.add(name)
            return
        kind, axes, *dims = steps[0]
        key = (kind, axes, grad.dtype, name in self.tier_of)
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
        kind, axes, *_ = key
        self._launch(kind, axes, self._buckets.pop(key).items, packed=True)

    def _launch(self, kind: str, axes: Any, items: list[_Item], packed: bool) -> None:
        names = items[0].name if len(items) == 1 else f"{items[0].name} … {items[-1].name}"
        site = f"gradients of {names}"
        if kind == "all_reduce":
            if items[0].name in self.tier_of:
                self._land_oldest([f for f in self._flights if f.scratch is None and f.items[0].name in self.tier_of])
            self._flights.append(self._all_reduce(axes, items, packed, site))
            return
        self._land_oldest([flight for flight in self._flights if flight.scratch is not None])
        self._flights.append(self._reduce_scatter(axes, items, packed, site))

    def _land_oldest(self, flights: list[_Flight]) -> None:
        """Two of a kind may be under way at once; what has landed is let go."""
        if len(flights) >= 2:
            self._flights.remove(flights[0])
            self._land(flights.pop(0))

    def _all_reduce(self, axes: Any, items: list[_Item], packed: bool, site: str) -> _Flight:
        if not packed:
            buffer = items[0].grad
            return _Flight(items, self.comm.start_all_reduce_into(buffer, axes, site=site), [buffer], None, False)
        flat = self._take(sum(item.grad.numel() for item in items), items[0], lent=True)
        results = []
        for item, part in zip(items, flat.split([item.grad.numel() for item in items]), strict=True):
            results.append(part.view(item.grad.shape).copy_(item.grad))
            item.grad = flat
        return _Flight(items, self.comm.start_all_reduce_into(flat, axes, site=site), results, None, True)

    def _reduce_scatter(self, axes: Any, items: list[_Item], packed: bool, site: str) -> _Flight:
        n = self.comm.axis_size(axes)
        shapes = [self._shard_shape(item, n) for item in items]
        sizes = [item.grad.numel() // n for item in items]
        out = self._take(sum(sizes), items[0], lent=True)
        if packed:
            scratch = self._take(n * sum(sizes), items[0])
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
        if flight.scratch is not None and flight.packed and flight.items[0].name not in self.tier_of:
            self._pool.give(flight.scratch)
        for item, result in zip(flight.items, flight.results, strict=True):
            # Results of later all_reduce rounds are packed anew: views of a bucket are never given away.
            self._route(item.name, result, False, item.rest, landed=True)

    def _take(self, numel: int, item: _Item, lent: bool = False) -> Tensor:
        """A flat buffer: of the pool, or of its own when what lands in it leaves the device or is lent out."""
        if not lent and item.name not in self.tier_of:
            return self._pool.take(numel, item.grad)
        buffer = torch.empty(numel, dtype=item.grad.dtype, device=item.grad.device)
        if item.name not in self.tier_of:
            self._lent.append(buffer)
        return buffer

    def _parked(self, name: str, value: Tensor) -> Tensor:
        """A value in its gradient's tier, where it has one."""
        tier = self.tier_of.get(name)
        if tier is None:
            return value
        room = self.tiers.empty(value.shape, value.dtype, tier)
        self.tiers.write(room, value)
        return room

    def _rested(self, name: str, total: _Sum) -> _Sum:
        if name not in self.tier_of:
            return total
        return _Sum(
            self._parked(name, total.value), True, None if total.lost is None else self._parked(name, total.lost)
        )

    def _brought(self, name: str, total: _Sum) -> _Sum:
        if name not in self.tier_of:
            return total
        value, lost = self.tiers.read(total.value), None if total.lost is None else self.tiers.read(total.lost)
        self.tiers.arrived(self.tiers.mark())
        return _Sum(value, True, lost)


def _add_compensated(total: _Sum, lost: Tensor, grad: Tensor, owned: bool, last: bool) -> _Sum:
    """total + grad in the memory that the two have, as far as nobody else has it; after the last nothing is kept."""
    step = torch.sub(grad, lost, out=grad) if owned else grad - lost
    value = torch.add(total.value, step, out=lost)
    if last:
        return _Sum(value, True)
    lost = torch.sub(value, total.value, out=total.value) if total.owned else value - total.value
    return _Sum(value, True, lost.sub_(step))
