"""Which bytes are read and written on which timeline: races, and memory that is given back too early.

An access is an event of a timeline (clocks.py) on a range of bytes of a storage. Two of them conflict where the ranges overlap
and one writes; a conflict whose events are not ordered is a race. Strided views count as the range from their first byte to
their last one.

The caching allocator gives a block back as soon as its last tensor dies, to whoever asks next on the stream that it was
allocated on, its home. So the accesses of a storage that died on other streams live on as ghosts in every storage that is
allocated at its home from then on: the first that happens there must follow them, unless the allocator was told of the stream
(`record_stream`). A tensor that a message still holds has not died. Pinned memory is safe: its allocator asks events of every
stream that copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from tests.gpu.simulation.clocks import Timeline
from tests.gpu.simulation.findings import Place

Report = Callable[[str, str, tuple[Place, ...]], None]
"""Takes the kind of a finding, what it is, and the places."""


@dataclass(frozen=True, slots=True)
class Access:
    """The bytes from start to end of a storage, read or written by an op as the number-th event of a timeline."""

    timeline: str
    number: int
    writes: bool
    start: int
    end: int
    op: str
    place: Place

    def __str__(self) -> str:
        return f"{self.op} {'writes' if self.writes else 'reads'} on {self.timeline}"


@dataclass(frozen=True, slots=True)
class _Ghost:
    """An access of a storage that died, and the line where it did."""

    access: Access
    what: str
    ended: Place


@dataclass(slots=True)
class _Storage:
    """The accesses that later ones may conflict with. home: where it was allocated, None for memory of the host; alive: a weak
    reference that tells when the storage dies; ghosts: of what may have had this memory before."""

    home: Timeline | None
    what: str
    alive: weakref.ref[object] | None = None
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    ghosts: list[_Ghost] = field(default_factory=list)


Captured = tuple[_Storage, Access]


class Memory:
    """The storages of one rank. here: the line that is running."""

    def __init__(self, report: Report, here: Callable[[], Place]) -> None:
        self._report, self._here = report, here
        self._storages: dict[int, _Storage] = {}
        self._ghosts: dict[str, list[_Ghost]] = {}
        self.captured: list[Captured] | None = None
        """While a graph is captured, its accesses, which happen when it is played."""

    def allocated(self, tensor: Tensor, home: Timeline | None) -> _Storage:
        """The storage of a tensor; where it is new, this is its home."""
        whole = tensor.untyped_storage()
        key = whole._cdata
        storage = self._storages.get(key)
        if storage is None:
            what = f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")
            storage = self._storages[key] = _Storage(home, what)
            storage.alive = weakref.ref(whole, partial(self._ended, key))
            if home is not None and self._ghosts.get(home.name):
                ghosts = [one for one in self._ghosts[home.name] if not _follows(home, one.access)]
                self._ghosts[home.name], storage.ghosts = ghosts, list(ghosts)
        return storage

    def access(
        self,
        tensor: Tensor,
        timeline: Timeline,
        number: int,
        writes: bool,
        op: str,
        place: Place,
        home: Timeline | None,
    ) -> None:
        """An op touches all bytes of a tensor. home: of its storage, where that is new."""
        if not tensor.numel():
            return
        storage = self.allocated(tensor, home if self.captured is None else None)
        new = Access(timeline.name, number, writes, *byte_range(tensor), op, place)
        if self.captured is None:
            self._happens(storage, new, timeline)
        else:
            self.captured.append((storage, new))

    def play(self, captured: Sequence[Captured], timeline: Timeline, number: int) -> None:
        """The accesses of a graph, all of them at once and in the order of their capture."""
        for storage, access in captured:
            self._happens(storage, replace(access, timeline=timeline.name, number=number), timeline)

    def _happens(self, storage: _Storage, new: Access, timeline: Timeline) -> None:
        for ghost in storage.ghosts:
            if not _follows(timeline, ghost.access):
                what = f"{ghost.what} is given back while {ghost.access}, and may be used again"
                self._report("early free", what, (ghost.access.place, ghost.ended, new.place))
        storage.ghosts = []
        start, end, writes = new.start, new.end, new.writes
        kept = []
        for old in storage.accesses:
            overlaps = old.start < end and start < old.end
            if overlaps and (writes or old.writes) and not _follows(timeline, old):
                self._report("race", f"{storage.what}: {old}, {new}", (old.place, new.place))
            inside = start <= old.start and old.end <= end
            if not (inside and (writes or (not old.writes and old.timeline == new.timeline))):
                kept.append(old)
        kept.append(new)
        storage.accesses = kept

    def recorded(self, tensor: Tensor, stream: str) -> None:
        """The allocator is told that a stream uses a tensor."""
        self.allocated(tensor, None).recorded.add(stream)

    def _ended(self, key: int, _: object) -> None:
        """The last tensor of a storage died."""
        storage = self._storages.pop(key)
        if storage.home is not None:
            ended = self._here()
            self._ghosts.setdefault(storage.home.name, []).extend(
                _Ghost(access, storage.what, ended)
                for access in storage.accesses
                if access.timeline not in storage.recorded and not _follows(storage.home, access)
            )


def _follows(timeline: Timeline, access: Access) -> bool:
    return timeline.follows(access.timeline, access.number)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    first = tensor.storage_offset()
    last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
