"""Values reduced over mesh axes, many in one message, while what makes them still runs.

A value goes along its resharding steps: leading local steps (shard) at once, and an all_reduce or reduce_scatter as part
of a bucket, one flat asynchronous collective per (kind, axes, dtype) that is issued when the bucket is full. Steps left
after that go the same way in the next round, when the bucket lands. A large value is a bucket of its own and is reduced
where it lies when that is allowed: reduce_scatter never writes its input, all_reduce does, so it asks that the caller
gave the tensor away (`owned`). Nothing hides a message that starts when backward is over, so no large bucket has more than
half of what is left of the step: the last one is small, also of a model that would fit into one.

    all_reduce bucket        [ g0 ........ | g1 .... | g2 ...... ]                 results are views of the bucket
    reduce bucket            the same, of values that one rank is to have; the others let go of it
    reduce_scatter bucket    [ g0[0] g1[0] | g0[1] g1[1] | … ]  row i: the i-th shards    results are views of one row

A block that ranks cut in runs and that does not divide (runs.py) is filled up with zeros where its runs are packed. A large
one is scattered where it lies, and the ends of the runs are packed; or it is sent in parts, columns of its runs, where there are
so many ranks that the ends are not small. So no second block is there meanwhile.

What is packed to be scattered lies in a pool; results are parts of buckets that last until `forget`. All ranks run the
same program, so buckets fill, and collectives start, in the same order everywhere. Values that are to be compressed have
buckets of their own, always packed, whose rows compression.py sums. Each then has blocks of its own, so that what it becomes
does not depend on its neighbours: ranks that hold the same parameter may hold other shards of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..comm.buffers import BufferPool
from ..comm.calls import Handle
from ..comm.chunks import front_chunks
from ..comm.comm import Comm
from ..comm.mesh import run_shape
from ..comm.reshard import TABLE_STEPS, run_step
from ..errors import RuntimeProgramError
from .bucket_sizes import BUCKETED, BucketSizes, Steps
from .compression import Codec, Unsent, start_gathered_rows, start_scattered_sum
from .runs import PARTS, Run, ends, ends_are_small, filled, packed

UNDER_WAY = 2
"""Messages of a kind that are under way at once, and buffers that wait for the next ones."""


@dataclass(slots=True)
class _Item:
    """rows: as many as a value's elements, (elements, 1, …), are filled up to with zeros (0: it is sent as it is). run: the one
    of which this is a half. root: the place of the rank that is to have the sum alone."""

    name: str
    value: Tensor
    owned: bool
    dim: int
    rest: Steps
    codec: Codec | None = None
    rows: int = 0
    run: Run | None = None
    half: str = ""
    root: int | None = None

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return self.rows or self.value.numel()


@dataclass(slots=True)
class _Bucket:
    items: list[_Item] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class _Flight:
    """An issued bucket: wait, then hand every item its part of the result. pooled: what it scatters lies in the pool; second:
    starts the message that has to follow the first before there is a result; to_one: one rank alone keeps what comes of it."""

    items: list[_Item]
    handle: Handle[Tensor]
    results: list[Tensor]
    scratch: Tensor | None
    pooled: bool
    second: Callable[[], Handle[Tensor]] | None = None
    to_one: bool = False


class Buckets:
    """Values under way; `arrive(name, value, owned)` is called for each that has no step left.

    leaving: names whose results leave the device when they arrive, so their buckets are made anew each time and land
    early. added: names whose results are added to others when they arrive, so that nobody needs their buckets later.
    codecs: of names that are compressed. unsent: what compressing these lost and sends later.
    """

    _packed = staticmethod(packed)

    def __init__(
        self,
        comm: Comm,
        arrive: Callable[[str, Tensor, bool], None],
        leaving: Collection[str],
        sizes: BucketSizes,
        codecs: Mapping[str, Codec],
        added: Collection[str] = (),
    ) -> None:
        self.comm = comm
        self.arrive = arrive
        self.leaving = leaving
        self.sizes = sizes
        self.codecs = codecs
        self.added = added
        self.unsent = Unsent()
        self._pool = BufferPool(most=UNDER_WAY)
        self._lent: list[Tensor] = []
        self._buckets: dict[tuple[Any, ...], _Bucket] = {}
        self._flights: list[_Flight] = []
        self._sent = 0

    def flush(self) -> None:
        """Issue every bucket that is open, without waiting. To issue one may land others, whose values fill, and so issue,
        buckets of the steps that follow."""
        for key in list(self._buckets):
            if key in self._buckets:
                self._issue(key)

    def next_round(self) -> None:
        """Issue what is open: a microbatch has sent all that it sends, and the next one sends as much."""
        self.flush()
        self._sent = 0

    def drain(self) -> None:
        """Issue what is open, wait for everything; all values have arrived."""
        while self._buckets or self._flights:
            self.flush()
            flights, self._flights = self._flights, []
            while flights:
                self._land(flights.pop(0))

    def clear(self) -> None:
        """The step's values have all arrived: let go of the pool."""
        self._pool.clear()
        self._sent = 0

    def forget(self) -> None:
        """Let go of the buckets that arrived once the caller has used and dropped their values."""
        self._lent.clear()

    def add(self, name: str, value: Tensor, owned: bool, steps: Steps, landed: bool = False) -> None:
        """Send a value along its steps. owned: it may be reduced in place. landed: it is part of a bucket of ours."""
        rows, whole = 0, True
        while steps and (steps[0][0] not in BUCKETED or self.comm.axis_size(steps[0][1]) == 1):
            (kind, axes, *_), n = steps[0], self.comm.axis_size(steps[0][1])
            if n > 1 and kind == "flatten" and value.is_contiguous() and value.numel() % n:
                length, *ones = run_shape(value.shape, n)
                rows, value = n * length, value.view(-1, *ones)
            elif n > 1 and rows:  # a shard of these
                rows, whole = rows // n, False
                value = value[self.comm.axis_index(axes) * rows :][:rows]
            elif n > 1:
                value = run_step(self.comm, value, steps[0], site=f"gradient of {name}")
                owned = owned or not TABLE_STEPS[kind].view
            steps = steps[1:]
        if not steps:
            if rows:
                value, owned = filled(value, rows), True
            self.arrive(name, value, owned or landed)
            return
        kind, axes, *dims = steps[0]
        codec = self.codecs.get(name)
        root = dims[0] if TABLE_STEPS[kind].of_owner else None
        key = (kind, axes, value.dtype, name in self.leaving, codec, root)
        dim = dims[0] % value.dim() if dims and root is None else 0
        item = _Item(name, value, owned, dim, steps[1:], codec, rows, root=root)
        nbytes = self._bytes(item)
        if self._direct(kind, item, nbytes):
            n = self.comm.axis_size(axes)
            if rows and whole and ends_are_small(value, n, rows // n, self.sizes.direct):
                item.rows, item.run, item.half = 0, Run(rows // n, self.comm.axis_index(axes)), "chunk"
                end = replace(item, value=ends(value, n, rows // n), half="end")
                item.value = value[: value.shape[0] // n * n]
                self._put(key, end)
            self._launch(kind, axes, [item], packed=item.rows > 0)
        else:
            self._put(key, item)
        if key in self._buckets and self._buckets[key].nbytes >= self._limit():
            self._issue(key)

    def _put(self, key: tuple[Any, ...], item: _Item) -> None:
        bucket = self._buckets.setdefault(key, _Bucket())
        bucket.items.append(item)
        bucket.nbytes += self._bytes(item)

    def _bytes(self, item: _Item) -> int:
        """The bytes by which all ranks count an item; the end of a value that goes in two parts counts with the first."""
        elements, means = item.numel, self.sizes.means.get(item.name)
        if means is not None:
            elements = 0 if item.half == "end" else means[len(item.rest) + 1]
        return elements * item.value.element_size()

    def _limit(self) -> int:
        return self.sizes.limit(bool(self._flights), self._sent)

    def _direct(self, kind: str, item: _Item, nbytes: int) -> bool:
        """Whether a value is reduced where it lies. A message of its own must pay: an all_reduce as large as a bucket."""
        least = self.sizes.direct if kind == "reduce_scatter" else self._limit()
        if nbytes < least or item.codec is not None or not item.value.is_contiguous():
            return False
        return item.dim == 0 if kind == "reduce_scatter" else item.owned

    def _issue(self, key: tuple[Any, ...]) -> None:
        kind, axes, *_ = key
        self._launch(kind, axes, self._buckets.pop(key).items, packed=True)

    def _launch(self, kind: str, axes: Any, items: list[_Item], packed: bool) -> None:
        names = items[0].name if len(items) == 1 else f"{items[0].name} … {items[-1].name}"
        site = f"gradients of {names}"
        self._sent += sum(map(self._bytes, items))
        if kind == "all_reduce":
            if items[0].name in self.leaving:
                self._land_oldest([f for f in self._flights if f.scratch is None and f.items[0].name in self.leaving])
            if items[0].codec is not None:
                self._land_oldest([flight for flight in self._flights if flight.second is not None])
            self._flights.append(self._all_reduce(axes, items, packed, site))
            return
        if items[0].root is not None:
            self._land_oldest([flight for flight in self._flights if flight.to_one])
            self._flights.append(self._reduce(axes, items, packed, site))
            return
        if len(items) == 1 and items[0].rows and items[0].codec is None:
            self._scatter_parts(axes, items[0], site)
            return
        self._land_oldest([flight for flight in self._flights if flight.scratch is not None])
        self._flights.append(self._reduce_scatter(axes, items, packed, site))

    def _scatter_parts(self, axes: Any, item: _Item, site: str) -> None:
        """Scatter a value that is filled up, in as many messages as keep its copy small."""
        n = self.comm.axis_size(axes)
        length, *ones = self._shard_shape(item, n)
        width = max(-(-length // PARTS), self.sizes.full // (n * item.value.element_size()))
        out, value = self._take(length, item, lent=True), item.value
        for start in self._starts(length, width):
            stop = min(start + width, length)
            self._land_oldest([flight for flight in self._flights if flight.scratch is not None])
            scratch = self._take(n * (stop - start), item)
            rows = scratch.view(n, stop - start)
            self._packed(rows.view(*rows.shape, *ones), value, start, length)
            handle = self.comm.start_reduce_scatter_into(out[start:stop], rows, axes, site=site)
            last = ([item], [out.view(length, *ones)]) if stop == length else ([], [])
            self._flights.append(_Flight(last[0], handle, last[1], scratch, item.name not in self.leaving))
        item.value = out

    def _starts(self, length: int, width: int) -> Sequence[int]:
        """Where the parts of runs of some length begin."""
        return range(0, length, width)

    def _land_oldest(self, flights: list[_Flight]) -> None:
        """Two of a kind may be under way at once; what has landed is let go."""
        if len(flights) >= UNDER_WAY:
            self._flights.remove(flights[0])
            self._land(flights.pop(0))

    def _all_reduce(self, axes: Any, items: list[_Item], packed: bool, site: str) -> _Flight:
        if not packed:
            buffer = items[0].value
            return _Flight(items, self.comm.start_all_reduce_into(buffer, axes, site=site), [buffer], None, False)
        codec, n = items[0].codec, self.comm.axis_size(axes)
        sizes = [item.value.numel() for item in items]
        starts, used = _places(sizes, codec)
        flat = self._take(used if codec is None else n * codec.padded(-(-used // n)), items[0], lent=True)
        if used > sum(sizes):
            flat.zero_()
        results = []
        for item, start, size in zip(items, starts, sizes, strict=True):
            results.append(flat[start : start + size].view(item.value.shape).copy_(item.value))
            item.value = flat
        if codec is None:
            return _Flight(items, self.comm.start_all_reduce_into(flat, axes, site=site), results, None, True)
        rows, index = flat.view(n, -1), self.comm.axis_index(axes)
        lost = [(item.name, len(item.rest), result) for item, result in zip(items, results, strict=True)]
        self.unsent.add_to(lost, codec)
        row = torch.empty_like(rows[0])
        first = start_scattered_sum(self.comm, codec, rows, row, axes, site)

        def second() -> Handle[Tensor]:
            handle = start_gathered_rows(self.comm, codec, row, rows, axes, site)
            if codec.feedback:
                rows[index].add_(row)
            self.unsent.keep(lost, codec)
            return handle

        return _Flight(items, first, results, None, True, second)

    def _reduce(self, axes: Any, items: list[_Item], packed: bool, site: str) -> _Flight:
        root = items[0].root
        assert root is not None
        flat, results = items[0].value, [items[0].value]
        keeps = self.comm.axis_index(axes) == root
        if packed:
            sizes = [item.value.numel() for item in items]
            numel, results = sum(sizes), []
            flat = self._take(numel, items[0], lent=True) if keeps else flat.new_empty(numel)
            for item, start, size in zip(items, _places(sizes, None)[0], sizes, strict=True):
                results.append(flat[start : start + size].view(item.value.shape).copy_(item.value))
                item.value = flat
        handle = self.comm.start_reduce_into(flat, axes, root, site=site)
        return _Flight(items, handle, results, None, False, to_one=True)

    def _reduce_scatter(self, axes: Any, items: list[_Item], packed: bool, site: str) -> _Flight:
        n = self.comm.axis_size(axes)
        shapes = [self._shard_shape(item, n) for item in items]
        sizes = [item.numel // n for item in items]
        codec = items[0].codec
        starts, width = _places(sizes, codec)
        out = self._take(width, items[0], lent=True)
        lost = []
        if packed:
            scratch = self._take(n * width, items[0])
            rows = scratch.view(n, width)
            if width > sum(sizes):
                rows.zero_()
            for item, start, size, shape in zip(items, starts, sizes, shapes, strict=True):
                part = rows[:, start : start + size].view(n, *shape)
                if item.rows:
                    self._packed(part, item.value, 0, size)
                else:
                    part.copy_(front_chunks(item.value, item.dim, n))
                lost.append((item.name, len(item.rest), part))
                item.value = scratch
        else:
            scratch = items[0].value
            rows = scratch.view(n, sizes[0])
        results = [
            out[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)
        ]
        if codec is None:
            handle = self.comm.start_reduce_scatter_into(out, rows, axes, site=site)
        else:
            self.unsent.add_to(lost, codec)
            handle = start_scattered_sum(self.comm, codec, rows, out, axes, site)
            self.unsent.keep(lost, codec)
        return _Flight(items, handle, results, scratch, packed and items[0].name not in self.leaving)

    def _shard_shape(self, item: _Item, n: int) -> tuple[int, ...]:
        shape = list(item.value.shape)
        shape[item.dim] = item.rows or shape[item.dim]
        if shape[item.dim] % n:
            raise RuntimeProgramError(
                f"gradient of {item.name!r}: dim {item.dim} of {tuple(shape)} cannot be split in {n}"
            )
        shape[item.dim] //= n
        return tuple(shape)

    def _land(self, flight: _Flight) -> None:
        flight.handle.wait()
        if flight.second is not None:
            self._flights.append(replace(flight, handle=flight.second(), second=None))
            return
        if flight.scratch is not None and flight.pooled:
            self._pool.give(flight.scratch)
        for item, result in zip(flight.items, flight.results, strict=True):
            # Results of later all_reduce rounds are packed anew: views of a bucket are never given away.
            landed = result if item.run is None else item.run.joined(item.half, result)
            if landed is not None:
                self.add(item.name, landed, False, item.rest, landed=True)

    def _take(self, numel: int, item: _Item, lent: bool = False) -> Tensor:
        """A flat buffer: of the pool, or of its own when what lands in it leaves the device or is lent out."""
        if not lent and item.name not in self.leaving:
            return self._pool.take(numel, item.value)
        buffer = item.value.new_empty(numel)
        if item.name not in self.leaving and item.name not in self.added and item.half != "chunk":
            self._lent.append(buffer)
        return buffer


def _places(sizes: Sequence[int], codec: Codec | None) -> tuple[list[int], int]:
    """Where values of so many elements start in a bucket, and where the last one's blocks end."""
    ends = list(accumulate(sizes if codec is None else map(codec.padded, sizes)))
    return [0, *ends[:-1]], ends[-1]
