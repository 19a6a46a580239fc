"""Whether all ranks are given the same global batches: asked before a step sends anything, before state is read, and at the end.

Every rank is to get the same global batch. One that reads another file, or shuffles otherwise, trains on and spoils the run
without a word. So a rank keeps one checksum of all batches that it was given, and ranks compare it: at their first two batches,
at every one where a program takes several shapes (whoever runs another shape's lines sends messages that meet nobody's), and
else as often as this takes less than SHARE of a step. The checksum is of all batches, so what differed in between is found
too; and whoever reads the state, as every way to save does, compares first. A rank whose data ended earlier is then at
something else than the others, which is compared as well.

    own  =  (what, batches, step, checksum)      one all-reduce of own and -own: maxima, and minima

Ranks that are given their own rows alone (`DataShard`) are compared with those that take the same ones: a second message has the
checksum of every group of readers in a place of its own.

Of batches that are too large to be read whole for that, pieces are taken that are others every time, and all of it where ranks
compare. What lies on a GPU is read when it has arrived, one step late, so that the host does not wait.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..comm.backends import Arriving, backend_of
from ..comm.comm import Comm
from ..comm.environment import machine_name
from ..data.schema import integer, listed, row, text
from ..errors import RankError

SHARE = 1e-3
"""The share of a step that all this may take: one half to read batches, the other to compare."""
FIRST = 2
"""Batches that are compared in any case."""
MOST_APART = 50
"""Steps between two comparisons."""
PIECE_BYTES = 4096
LEAST_BYTES = 1 << 16
"""Bytes of every tensor of a batch that are read even where a step leaves no time for them."""
READ_BYTES_S = 2e9
"""Bytes that a checksum reads in a second, on slow machines."""
Readers = tuple[int, ...] | None
"""Whose rows a batch has: of every rank the number of the group that takes the same ones; None: the global batch."""
BATCH = "taking"
ROWS = "taking its rows of"
NOBODY = -(1 << 40)
"""A place of a message that a rank has nothing to say in."""
_COUNT = integer(0, 1 << 53)
_DOING = row(text(), _COUNT, _COUNT, listed(integer(0, (1 << 32) - 1)), text())
"""The message of a rank that differs: its action, how many batches it took, for which step, their checksums, and its machine."""
WHY_DATA = (
    "got another batch than the others; every rank is to read the same global batches in the same order: are the files the "
    "same on every machine, and is the order drawn from the same seed on every rank (generator= of the DataLoader, no "
    'DistributedSampler, which gives each rank a part: load(rows="local") and run.py\'s data functions with a shard take parts), '
    "and does every rank run the same entry? Or is its optimizer set otherwise, as by a rank that changes its own learning rate?"
)


WHY_ROWS = (
    "got other rows than the ranks that take the same ones (DataShard.readers); these are to read the same samples in the same "
    "order: are the files the same on every machine, and is the order drawn from the same seed on every rank?"
)


def checksum(tensors: Sequence[Tensor], start: int = 0) -> int:
    """A checksum of contents, shapes and dtypes of tensors. start: the checksum of what was before."""
    return _folded(start, tensors, [_bytes(tensor) for tensor in tensors])


def odd_ranks(said: Sequence[object]) -> list[int]:
    """Ranks that said something else than most (of equally many: than rank 0)."""
    counts = Counter(said)
    usual = max(counts, key=lambda one: (counts[one], one == said[0]))
    return [rank for rank, one in enumerate(said) if one != usual]


def odd_readers(said: Sequence[object], readers: Sequence[int] | None) -> list[int]:
    """Odd ranks among those that were to be given the same. readers: the group of each rank (None: all are one)."""
    if readers is None:
        return odd_ranks(said)
    odd = list[int]()
    for group in dict.fromkeys(readers):
        ranks = [rank for rank, own in enumerate(readers) if own == group]
        odd += [ranks[place] for place in odd_ranks([said[rank] for rank in ranks])]
    return sorted(odd)


def pieces(tensor: Tensor, most_bytes: int, turn: int) -> Tensor:
    """The bytes of a tensor, on its device; where there are more than most_bytes, pieces of it, others in every turn."""
    flat = _bytes(tensor)
    if flat.numel() <= most_bytes:
        return flat
    rows = flat[: flat.numel() // PIECE_BYTES * PIECE_BYTES].view(-1, PIECE_BYTES)
    every = math.ceil(len(rows) / max(most_bytes // PIECE_BYTES, 1))
    return rows[turn % every :: every].reshape(-1)


def steps_apart(cost_s: float, step_s: float) -> int:
    """Steps from one comparison to the next. cost_s: seconds of this thread that one takes."""
    return min(max(math.ceil(cost_s / max(SHARE / 2 * step_s, 1e-9)), 1), MOST_APART)


@dataclass(frozen=True)
class _Read:
    """Bytes of a batch on their way to the host. entry: the step that it is for; readers: as of `SameData.take`."""

    batch: Sequence[Tensor]
    parts: Arriving
    entry: str
    readers: Readers

    def folded(self, start: int) -> int:
        """The checksum of all up to this batch. Waits until it is there."""
        return _folded(zlib.crc32(self.entry.encode(), start), self.batch, self.parts.wait())


@dataclass(frozen=True)
class _Asked:
    """A comparison under way. own: what this rank said of itself; numbers: largest of all ranks' numbers, and of their
    negatives; groups: the same of the checksums of groups of readers, where ranks were given their own rows."""

    what: str
    own: tuple[int, ...]
    numbers: Arriving
    groups: Sequence[Arriving] = ()

    def answer(self) -> tuple[list[int], list[int]]:
        """Largest and least numbers of all ranks."""
        return _extremes(self.numbers)

    def alike(self) -> bool:
        """Whether the checksums in every group of readers are the same."""
        return all(most == least for most, least in map(_extremes, self.groups))


class SameData:
    """The checks of one rank on its batches. Every rank calls the methods in the same order.

    every: compare every batch; late: an answer is read one call later, as it comes from a device that the host does not wait
    for (default: on GPUs).
    """

    def __init__(self, comm: Comm, every: bool = False, late: bool | None = None) -> None:
        self.apart, self.taken = 1, 0
        self.waiting: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        """A context that tells others that this rank waits for all of them (end_of_data.py)."""
        self._comm, self._every = comm, every
        self._late = not backend_of(comm.device).is_host if late is None else late
        self._step = 0
        self._given: Counter[Readers] = Counter()
        """How many batches this rank was given by whose rows they have; `_checksums` is of each of these apart."""
        self._arriving: _Read | None = None
        self._read = 0
        self._checksums: dict[Readers, int] = {None: 0}
        self._unsure: list[tuple[int, int, Readers]] = []
        """Steps and checksums of the batches that were not found to be alike yet, and whose rows they have."""
        self._asked: _Asked | None = None
        self._alike = 0
        self._ahead = False
        self._cost_s, self._most_bytes = 1e6, LEAST_BYTES
        self._compared, self._compared_at = 0, time.perf_counter()

    def uncompared(self) -> tuple[int, dict[Readers, int], int]:
        """Batches so far, the checksums by whose rows they have, and how many were compared."""
        self._arrive()
        return self.taken, dict(self._checksums), self._alike

    def ahead(self, batch: Sequence[Tensor], step: int, readers: Sequence[int] | None = None) -> None:
        """Take a batch before its step does. Raises RankError."""
        self.take(batch, step, readers)
        self._ahead = True

    def take(
        self,
        batch: Sequence[Tensor],
        step: int,
        readers: Sequence[int] | None = None,
        settings: Sequence[float] = (),
        entry: str = "",
    ) -> None:
        """This rank is given a batch for a step of an entry, and has its optimizer set to some numbers; compare where it is time
        to. readers: of every rank the number of the group that takes the same rows, where ranks are given their own (None: all
        are given the global batch). Raises RankError on every rank, naming those that were given another one."""
        if self._ahead:
            self._ahead = False
            return
        began = time.thread_time()
        self._arrive()
        self._answer()
        self.taken, self._step, rows = self.taken + 1, step, None if readers is None else tuple(readers)
        self._given[rows] += 1
        if settings:
            batch = [*batch, torch.tensor(settings, dtype=torch.float64)]
        at_once = self._every or self._given[rows] <= FIRST
        due = at_once or self.taken - self._compared >= self.apart
        most_bytes = 1 << 62 if due else self._most_bytes
        self._arriving = _Read(batch, Arriving([pieces(leaf, most_bytes, self.taken) for leaf in batch]), entry, rows)
        if at_once or not self._arriving.parts.late:
            self._arrive()
        if due:
            first = self._given[rows] <= FIRST
            self._ask(BATCH if rows is None else ROWS, self._unsure[-1][0] if self._unsure else 0, first)
            if at_once or not self._late:
                self._answer()
            self._cost_s = min(self._cost_s, time.thread_time() - began)

    def settle(self, what: str, step: int) -> None:
        """Compare all batches so far. what: this rank does next, as in "saving"; step: that it is at. Raises RankError."""
        self._arrive()
        self._answer()
        with self.waiting(what):
            self._ask(what, step)
            self._answer()

    def _arrive(self) -> None:
        if self._arriving is not None:
            rows = self._arriving.readers
            self._checksums[rows] = self._arriving.folded(self._checksums.get(rows, 0))
            self._read, self._arriving = self.taken, None
            self._unsure.append((self._step, self._checksums[rows], rows))

    def _ask(self, what: str, step: int, first: bool = False) -> None:
        """Begin to compare. first: a rank that is given other rows than this one may send another number of messages, so what all
        say is looked at before there is a second one."""
        now = time.perf_counter()
        batches = self.taken - self._compared
        step_s = (now - self._compared_at) / batches if batches else 0.0
        own = zlib.crc32(what.encode()), self._read, step, self._checksums[None]
        said = (*own, int(1e9 * self._cost_s), int(1e9 * step_s))
        numbers = torch.tensor([*said, *(-one for one in said)]).to(self._comm.device, non_blocking=True)
        self._comm.at(self._step, "comparing batches")
        self._comm.start_maximum(numbers, "the batches of all ranks")()
        asked = _Asked(what, own, Arriving([numbers]))
        if first:
            self._agree(asked)
        shared = [rows for rows in self._checksums if rows is not None and len({*rows}) < len(rows)]
        if shared:
            asked = replace(asked, groups=[self._of_groups(rows) for rows in shared])
        self._asked, self._compared = asked, self.taken
        self._compared_at = now

    def _answer(self) -> None:
        """See what all ranks said. Raises RankError where they do not agree."""
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        cost_ns, step_ns = self._agree(asked)
        if not asked.alike():
            raise self._difference(asked.what, asked.own)
        del self._unsure[: asked.own[1] - self._alike]
        self._alike = asked.own[1]
        if not step_ns:
            return
        self.apart = min(steps_apart(cost_ns / 1e9, step_ns / 1e9), 2 * self.apart)
        self._most_bytes = max(LEAST_BYTES, int(SHARE / 2 * step_ns / 1e9 * READ_BYTES_S))

    def _agree(self, asked: _Asked) -> tuple[int, int]:
        """Nanoseconds that comparing takes, the least of all ranks, and that a step does, the most. Raises RankError where
        ranks do not agree in what all say."""
        (*most, _, step_ns), (*least, cost_ns, _) = asked.answer()
        if most != least:
            raise self._difference(asked.what, asked.own)
        return cost_ns, step_ns

    def _of_groups(self, readers: tuple[int, ...]) -> Arriving:
        """Begin to compare the checksums inside every group of readers."""
        own = readers[self._comm.rank]
        told = [self._checksums[readers] if group == own else NOBODY for group in range(max(readers) + 1)]
        numbers = torch.tensor([*told, *(-one if one != NOBODY else NOBODY for one in told)])
        numbers = numbers.to(self._comm.device, non_blocking=True)
        self._comm.start_maximum(numbers, "the rows of all ranks")()
        return Arriving([numbers])

    def _difference(self, what: str, own: tuple[int, ...]) -> RankError:
        """Who differs from whom, asked of all ranks."""
        told: Any = (what, *own[1:3], [checksum for _, checksum, _ in self._unsure], machine_name())
        everyone = self._comm.share(told, _DOING)
        places = [f"{rank} ({machine})" for rank, (*_, machine) in enumerate(everyone)]
        doing = [(doing, batches, step) for doing, batches, step, _, _ in everyone]
        odd = odd_ranks(doing)
        if odd:
            usual = next(one for rank, one in enumerate(doing) if rank not in odd)
            said = "; ".join(f"rank {places[rank]} is {_in_words(*doing[rank])}" for rank in odd[:8])
            return RankError(
                f"step {max(step for *_, step in doing)}: ranks are not at the same place: {said}, while the others are "
                f"{_in_words(*usual)}. Did the data end earlier on some? Every rank is to be given the same global batches, as "
                "many of them, and to do the same after them",
                odd,
            )
        sums_at = [[sums[place] for *_, sums, _ in everyone] for place in range(len(self._unsure))]
        step, rows, odd = next(
            (step, rows, odd)
            for (step, _, rows), sums in zip(self._unsure, sums_at, strict=True)
            if (odd := odd_readers(sums, rows))
        )
        who = f"rank{'s' if len(odd) > 1 else ''} {', '.join(places[rank] for rank in odd[:8])}"
        return RankError(f"step {step}: {who} {WHY_DATA if rows is None else WHY_ROWS}", odd)


def _in_words(what: str, batches: int, step: int) -> str:
    return f"{what} batch {batches} for step {step}" if what in (BATCH, ROWS) else f"{what} after {batches} batches"


def _extremes(numbers: Arriving) -> tuple[list[int], list[int]]:
    """Largest and least of numbers that arrive with their negatives."""
    said = numbers.wait()[0].tolist()
    return said[: len(said) // 2], [-one for one in said[len(said) // 2 :]]


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _folded(start: int, tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> int:
    total = start
    for tensor, part in zip(tensors, parts, strict=True):
        total = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(part.to("cpu").numpy().data if part.numel() else b"", total)
    return total
