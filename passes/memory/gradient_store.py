"""The bytes of a stage's gradient store over a step: the runtime's order of events (runtime/gradients/grads.py) over numbers.

Gradients are summed over microbatches, packed in buckets, reduced and handed out; scratch stays in a pool until `finish`,
what is handed out until `forget`. `hold` is what the store holds now, `top` the most since it was set.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.lowered import StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.steps import RuntimeStep, bytes_after
from autopar.passes.price.gradients import summed_bytes
from autopar.runtime.gradients.buckets import BUCKETED, BucketSizes
from autopar.runtime.gradients.compression import CODECS, Codec

Steps = tuple[RuntimeStep, ...]


@dataclass(frozen=True)
class Wire:
    """Messages of a compressed bucket: n ranks sum rows of so many bytes, which are encoded in row_wire bytes. second: the row is
    gathered when it is summed."""

    codec: Codec
    n: int
    row: int
    row_wire: int
    second: bool

    @staticmethod
    def of(codec: Codec, nbytes: Iterable[int], n: int, itemsize: int, second: bool) -> Wire:
        """The wire of a bucket of values of so many bytes each."""
        parts = 1 if second else n  # a value is cut into rows, or the bucket is
        used = sum(codec.padded(size // itemsize // parts) for size in nbytes)
        elements = codec.padded(-(-used // n)) if second else used
        return Wire(codec, n, elements * itemsize, codec.wire_bytes(elements), second)

    @property
    def lost(self) -> int:
        """Bytes that encoding a row with feedback needs for a moment."""
        return self.row if self.codec.feedback else 0


@dataclass(frozen=True)
class Flight:
    """A bucket under way: items, and what each becomes; bytes of scratch; whether it was packed. landing: bytes that are let go
    when it lands."""

    items: list[tuple[str, int, int, Steps]]
    results: list[int]
    scratch: int
    packed: bool
    wire: Wire | None = None
    landing: int = 0


@dataclass(frozen=True)
class Storage:
    """One of so many bytes in which gradients of a microbatch lie that the store was lent."""

    microbatch: int
    block: int
    nbytes: int


class StoreBytes:
    """Mirrors GradStore: names are the same, tensors are their bytes."""

    def __init__(
        self, parameters: Mapping[str, StoredParameter], mesh: Mesh, microbatches: int, compensated: bool = False
    ) -> None:
        self.due = {n: p.contributions * microbatches for n, p in parameters.items() if p.contributions}
        self.microbatches = microbatches
        self.steps = {n: p.reduce for n, p in parameters.items()}
        self.itemsize = {n: p.type.dtype.itemsize for n, p in parameters.items()}
        self.codecs = {n: CODECS[p.compression] for n, p in parameters.items() if p.compression}
        self.dims = {n: len(p.type.shape) for n, p in parameters.items()}
        self.sizes, self.compensated = mesh.sizes, compensated
        self.bucket_sizes = BucketSizes(step=sum(summed_bytes(p, mesh) for p in parameters.values() if p.contributions))
        self.hold = self.top = 0
        self.tier = {n: p.tier for n, p in parameters.items() if p.tier}
        self.parked: dict[str, int] = {}
        self._given: dict[str, int] = {}
        self._pool: dict[tuple[int, int], int] = {}
        self._lent = 0
        self._sums: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._buckets: dict[Any, list[tuple[str, int, int, Steps]]] = {}
        self._flights: list[Flight] = []
        self._done: dict[str, int] = {}
        self._borrowed: dict[str, int] = {}
        self._storage: dict[str, Storage] = {}
        self._lying: Counter[Storage] = Counter()
        self._twice = 0  # of what is added now, bytes that are counted elsewhere
        self._sent = 0
        self._finished = False

    def peak(self, nbytes: int = 0) -> None:
        self.top = max(self.top, self.hold - self._twice + nbytes)

    def add(
        self, name: str, nbytes: int, owned: bool, itemsize: int = 0, storage: Storage | None = None, held: bool = False
    ) -> None:
        """A gradient that the store now holds. itemsize: of its elements, where that is not the parameter's; storage: what a
        lent one lies in, maybe with others (None: it lies alone); held: the caller counts that already."""
        if self._finished:
            self._finished = False
            self.forget()
        self.hold += nbytes
        if storage is not None and not owned:
            self._twice = nbytes - storage.nbytes * (1 - held - (self._lying[storage] > 0))
        self.peak()
        count = self._counts[name] = self._counts.get(name, 0) + 1
        compensated = self.compensated and self.due[name] > 2
        wide, cast = nbytes // (itemsize or self.itemsize[name]) * self.itemsize[name], 0
        if wide != nbytes and (count == 1 or compensated):
            self.hold += wide
            self.peak()
            nbytes, cast, owned = wide, nbytes, True  # the caller has the narrow one until the end
        if count > 1:
            if name in self.tier:
                self._move(name, -wide * (2 if compensated else 1))
                self.peak()
            own = bool(self._sums.pop(name)) or name in self.tier
            if compensated:
                self.peak(wide * ((not owned) + (not own and count < self.due[name])))
                self.hold -= wide if count == self.due[name] else 0
            elif not own:
                self.peak(wide)
            if cast:
                self.hold -= nbytes
            else:
                cast = nbytes  # the caller has what it gave until the end
            self._leave(name, wide)
            owned = True
        elif compensated:  # what the sum loses rests beside it
            self.hold += wide
            self.peak()
        if count < self.due[name]:
            self._sums[name] = int(owned)
            if not owned and name not in self.tier:
                self._lie(name, storage, wide)
            if name in self.tier:
                self._move(name, wide * (2 if compensated else 1))
        else:
            self._route(name, wide, owned, self.steps[name], storage=None if count > 1 or cast else storage)
        self.hold -= cast
        self._twice = 0

    def skip(self, microbatches: int) -> None:
        """Skip so many microbatches more, none of them the last, which add to sums that are there: what is held stays
        the same."""
        for name, count in self._counts.items():
            self._counts[name] = count + self.due[name] // self.microbatches * microbatches

    def flush(self) -> None:
        for key in list(self._buckets):
            if key in self._buckets:  # to launch one may land others, which fill the buckets of later steps
                self._launch(key, self._buckets.pop(key), True)

    def finish(self) -> None:
        """All reduced; gradients that are views of lent buffers cost nothing beside them."""
        while self._buckets or self._flights:
            self.flush()
            flights, self._flights = self._flights, []
            for flight in flights:
                self._land(flight)
        self._counts.clear()
        self._sent = 0
        self.hold -= sum(nbytes * count for (nbytes, _), count in self._pool.items())
        self._pool.clear()
        self._finished = True

    def earn(self, name: str) -> None:
        """A gradient goes to the stage that owns its parameter."""
        nbytes = self._done.pop(name, 0)
        self.hold -= nbytes
        self._leave(name, nbytes)
        self._borrowed.pop(name, None)

    def copy_borrowed(self) -> None:
        """Gradients that others may hold are copied, one at a time, before they are changed."""
        for name, nbytes in self._borrowed.items():
            self.hold += nbytes
            self.peak()
            self.hold -= nbytes
            self._leave(name, nbytes)
            self._done[name] = nbytes
        self._borrowed.clear()

    def forget(self) -> None:
        """The step after: gradients handed out are let go."""
        for name in list(self._done):
            self.earn(name)
        self.hold -= self._lent
        self._lent = 0
        for name, nbytes in self._given.items():
            self.parked[self.tier[name]] -= nbytes
        self._given.clear()

    # ---- small print

    def _lie(self, name: str, storage: Storage | None, nbytes: int) -> None:
        """Count what is now held for a name, `nbytes` bytes, by its storage, which counts once for all that lie there."""
        if storage is not None:
            self._storage[name], self._twice = storage, 0
            self._lying[storage] += 1
            self.hold += (storage.nbytes if self._lying[storage] == 1 else 0) - nbytes

    def _leave(self, name: str, nbytes: int) -> None:
        """Take so many bytes that were let go for a name from the storage that it lay in, which goes with the last one."""
        storage = self._storage.pop(name, None)
        if storage is not None:
            self._lying[storage] -= 1
            self.hold += nbytes - (storage.nbytes if self._lying[storage] == 0 else 0)

    def _route(
        self,
        name: str,
        nbytes: int,
        owned: bool,
        steps: Steps,
        view: bool = False,
        landed: bool = False,
        storage: Storage | None = None,
    ) -> None:
        """view: the bytes are part of a lent buffer; landed: they come out of a bucket; storage: as `add` has it."""
        while steps and (steps[0].kind not in BUCKETED or self._size(steps[0]) == 1):
            size = self._size(steps[0])
            if size > 1:
                kind = steps[0].kind
                after = int(bytes_after(kind, nbytes, size))
                joined = kind == "shard" or (kind == "all_gather" and steps[0].dims[0] == 0)  # no second copy
                self.peak(after if joined else after + max(after, nbytes))
                self.hold += after - (0 if view else nbytes)
                nbytes, owned, view = after, True, False
            steps = steps[1:]
        if not steps:
            if name in self.tier:
                self._move(name, nbytes, free=not view)
                self._given[name] = nbytes
            elif not view:
                self._done[name] = nbytes
                if not (owned or landed):
                    self._lie(name, storage, nbytes)
                    self._borrowed[name] = nbytes
            return
        kind, axes, dims = steps[0].kind, steps[0].axes, steps[0].dims
        item = (name, nbytes, 0 if view else nbytes, steps)
        least = self._limit() if kind == "all_reduce" else self.bucket_sizes.direct
        dim = dims[0] % max(self.dims[name], 1) if dims else 0
        codec = self.codecs.get(name)
        key = (kind, axes, self.itemsize[name], name in self.tier, codec)
        if codec is None and nbytes >= least and not view and (owned if kind == "all_reduce" else dim == 0):
            self._launch(key, [item], False)
        else:
            self._buckets.setdefault(key, []).append(item)
        if sum(n for _, n, _, _ in self._buckets.get(key, ())) >= self._limit():
            self._launch(key, self._buckets.pop(key), True, item[2])

    def _limit(self) -> int:
        return self.bucket_sizes.limit(bool(self._flights), self._sent)

    def _launch(self, key: Any, items: list[tuple[str, int, int, Steps]], packed: bool, adding: int = 0) -> None:
        """adding: bytes of an item that whoever adds it still has when it is packed."""
        kind, _, itemsize, parked, codec = key
        nbytes, size = [n for _, n, _, _ in items], self._size(items[0][3][0])
        wire = Wire.of(codec, nbytes, size, itemsize, kind == "all_reduce") if codec is not None else None
        total = sum(nbytes) if wire is None else size * wire.row
        self._sent += sum(nbytes)
        if kind == "all_reduce":
            if parked:
                self._land_oldest([f for f in self._flights if not f.scratch and f.items[0][0] in self.tier])
            if wire is not None:
                self._land_oldest([f for f in self._flights if f.wire is not None and f.wire.second])
            if packed:
                self._take((total, itemsize), lent=True, fresh=parked)
                self._release(items)
            flight = Flight(items, [n for _, n, _, _ in items], 0, packed)
        else:
            self._land_oldest([f for f in self._flights if f.scratch])
            self._take((total // size, itemsize), lent=True, fresh=parked)
            if packed:
                self._take((total, itemsize), fresh=parked)
                self._release(items)
            flight = Flight(items, [n // size for _, n, _, _ in items], total, packed)
        self._flights.append(flight if wire is None else self._encoded(flight, wire, adding))

    def _encoded(self, flight: Flight, wire: Wire, adding: int) -> Flight:
        """The first message of a compressed bucket: what is sent, room for as much, and for the row of an all_reduce."""
        sent = wire.n * wire.row_wire
        row = wire.row if wire.second else 0
        self.hold += row + sent
        self.peak(wire.lost + adding)
        self.hold += sent
        self.peak(adding)
        return replace(flight, wire=wire, landing=row + 2 * sent)

    def _summed(self, flight: Flight, wire: Wire) -> Flight:
        """The first message has come: its rows are added, and the sum is encoded and gathered where it is wanted whole."""
        self.peak(wire.row - wire.n * wire.row_wire)  # what was sent is gone when rows are decoded
        if not wire.second:
            self.hold -= flight.landing
            return flight
        self.hold -= flight.landing - wire.row
        self.hold += wire.row_wire
        self.peak(wire.lost)
        self.hold += wire.n * wire.row_wire
        self.peak()
        self.hold -= wire.row
        return replace(flight, wire=None, landing=(wire.n + 1) * wire.row_wire)

    def _land(self, flight: Flight) -> None:
        if flight.wire is not None:
            flight = self._summed(flight, flight.wire)
            if flight.wire is None:
                self._flights.append(flight)
                return
        else:
            self.hold -= flight.landing
        items, results, scratch, packed = flight.items, flight.results, flight.scratch, flight.packed
        parked = items[0][0] in self.tier
        if scratch and packed and parked:
            self.hold -= scratch
        elif scratch and packed:
            key = (scratch, self.itemsize[items[0][0]])
            self._pool[key] = self._pool.get(key, 0) + 1
        view = packed or bool(scratch)
        for (name, _, _, steps), result in zip(items, results, strict=True):
            self._route(name, result, False, steps[1:], view, landed=True)
        if parked and view:
            self.hold -= sum(results)
        if scratch and not packed:
            self._release(items)

    def _land_oldest(self, flights: list[Flight]) -> None:
        if len(flights) >= 2:
            self._flights.remove(flights[0])
            self._land(flights[0])

    def _move(self, name: str, nbytes: int, free: bool = True) -> None:
        """Bytes of a gradient to its tier (negative: back). free: they were its own on the device."""
        tier = self.tier[name]
        self.parked[tier] = self.parked.get(tier, 0) + nbytes
        self.hold -= nbytes if free else 0

    def _release(self, items: Sequence[tuple[str, int, int, Steps]]) -> None:
        """Let go what items held, one by one, after it is copied."""
        self.hold -= sum(own for _, _, own, _ in items)
        self._twice = 0

    def _take(self, buffer: tuple[int, int], lent: bool = False, fresh: bool = False) -> None:
        """A buffer of the pool; lent: one to be handed out; fresh: one that is let go when it has landed."""
        if not (lent or fresh) and self._pool.get(buffer, 0):
            self._pool[buffer] -= 1
        else:
            self.hold += buffer[0]
        self.peak()
        if lent and not fresh:
            self._lent += buffer[0]

    def _size(self, step: RuntimeStep) -> int:
        return math.prod(self.sizes[axis] for axis in step.axes)
