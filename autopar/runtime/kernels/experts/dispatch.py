"""Rows on their way to the experts that they chose, and back.

A row is a (token, choice) pair. Rows are computed sorted by expert, where the expert lives: on this rank, or, along an
axis that shards tokens and experts together, on the rank that has the expert's block. How many rows a rank gets only the
data decides; memory is promised for at most

    most = ceil(imbalance · rows that the rank with most experts would get if all experts got as many)

Rows beyond it stop the step on every rank of the axis alike, or are computed in more pieces. Along an axis counts are
gathered first, so that every rank knows what all others send. Every rank's rows stand in the order (expert, source), and
piece k is the places k · most … (k + 1) · most of all of them: no piece is larger, and every rank finds the same pieces
by itself. Where rows go to a node first (two_level_dispatch.py), what is said here is of the rows that a rank of it passes
on inside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ...comm.axis_comm import Along
from ...comm.calls import Handle
from ...errors import ExpertOverflow
from ..grouped import Groups, by_group

Tensor = torch.Tensor


@dataclass(frozen=True)
class Promise:
    """The promise of how many rows memory is kept for. source: the user's line; notes: rows without room are noted
    (../overflow.py), which forward does for backward too."""

    imbalance: float
    on_overflow: str
    source: str = ""
    notes: bool = True

    def most(self, rows: int, ranks: float = 1) -> int:
        """Rows that are computed at once where so many are shared by so many ranks."""
        return math.ceil(self.imbalance * rows / ranks)

    def room(self, rows: int, ranks: float, all_rows: int) -> int:
        """Rows of a message to one of so many ranks that share as many, of all that there are: as many as are promised, or six
        standard deviations of a random choice more than the mean."""
        mean = rows / ranks
        return min(all_rows, max(self.most(rows, ranks), math.ceil(mean + 6 * math.sqrt(mean))))


@dataclass(frozen=True)
class Spread:
    """Where the experts are that tokens chose: on this rank from number `first` on, one of so many `parts` of them, or, with
    `along`, those of all ranks of this axis from this number on. lengths: how many each of these has, where that is not
    the same. pairs: of the rank with most tokens, where ranks have unequally many. mean: rows that a rank would compute if all
    got as many, where they came to this node first."""

    first: int = 0
    parts: float = 1
    along: Along | None = None
    lengths: tuple[int, ...] = ()
    pairs: int = 0
    mean: int | None = None

    def share(self, experts: int) -> Share:
        """Who has which experts along the axis. experts: on this rank."""
        assert self.along is not None
        if not self.lengths:
            return Share((experts,) * self.along.size, self.along.index * experts)
        return Share(self.lengths, self.along.start(sum(self.lengths)))

    def rows(self, chosen: Tensor) -> int:
        """Rows that the rank with most experts would compute if all experts got as many and all ranks sent as many as the one
        with most."""
        if self.mean is not None:
            return self.mean
        pairs = self.pairs or chosen.numel()
        return math.ceil(pairs * len(self.lengths) * max(self.lengths) / sum(self.lengths)) if self.lengths else pairs


@dataclass(frozen=True)
class Share:
    """How many experts each rank along an axis has, and the number of this rank's first among all of them."""

    lengths: tuple[int, ...]
    start: int

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The number after the last expert of every rank."""
        return tuple(itertools.accumulate(self.lengths))

    def by_rank(self, of_experts: Tensor) -> Tensor:
        """Sums over every rank's experts. of_experts: (…, experts of all ranks) -> (…, ranks)."""
        return torch.stack([part.sum(-1) for part in of_experts.split(self.lengths, -1)], -1)


@dataclass(frozen=True)
class Piece:
    """Rows that are computed at once.

    pairs: (n,) numbers of the (token, choice) pairs that this rank sends, sorted by expert. place: (tokens, choices), where
    each pair is among these; out of range for pairs of other pieces. arrival: which of the arriving rows stand where, once
    sorted by expert (None: as they are), and where the rows of every expert end then. few: most choices of the tokens are not
    among the pairs; padded: some pairs are only there to fill a message.
    """

    pairs: Tensor
    place: Tensor
    arrival: Handle[tuple[Tensor | None, Tensor]]
    along: Along | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    few: bool = False
    padded: bool = False

    @cached_property
    def groups(self) -> Groups:
        """The rows of every expert among those that arrive."""
        return Groups(self.arrival.wait()[1], len(self.pairs) if self.along is None else sum(self.received))

    def of_tokens(self, x: Tensor) -> Tensor:
        """The row of x, (tokens, …), that every pair has."""
        return x[self.pairs // self.place.shape[1]]

    def to_experts(self, rows: Tensor) -> Handle[Tensor]:
        """One row per pair, to where it is computed, sorted by expert there."""
        if self.along is None:
            return Handle(None, rows)
        return self.along.start_exchange(rows, self.sent, self.received).then(self._arranged)

    def _arranged(self, arrived: Tensor) -> Tensor:
        arrange = self.arrival.wait()[0]
        return arrived if arrange is None else arrived[arrange]

    def back(self, rows: Tensor) -> Handle[Tensor]:
        """One row per pair, from where it was computed, in the order of `pairs`."""
        if self.along is None:
            return Handle(None, rows)
        arrange = self.arrival.wait()[0]
        if arrange is not None:
            as_arrived = torch.empty_like(rows)
            as_arrived[arrange] = rows
            rows = as_arrived
        return self.along.start_exchange(rows, self.received, self.sent)

    def add_to(self, y: Tensor, rows: Tensor, weights: Tensor | None = None) -> None:
        """y[token] += weights[token, choice] · rows[its place], choice after choice. rows: in the order of `pairs`."""
        if not len(rows):
            return
        if self.few:
            self._add_few(y, rows, weights)
            return
        here = (self.place >= 0) & (self.place < len(rows))
        share = (here if weights is None else weights * here).to(y.dtype).unsqueeze(-1)
        place = self.place.clamp(0, len(rows) - 1)
        for choice in range(place.shape[1]):
            y.addcmul_(rows[place[:, choice]].to(y.dtype), share[:, choice])

    def put(self, into: Tensor, values: Tensor) -> None:
        """into[token, choice] = the value of its pair. values: (n, 1), in the order of `pairs`."""
        if self.padded:
            found = values[self.place.clamp(min=0).flatten(), 0].view_as(into)
            into.copy_(found.masked_fill_(self.place < 0, 0))
        else:
            into.view(-1)[self.pairs] = values.squeeze(1)

    def _add_few(self, y: Tensor, rows: Tensor, weights: Tensor | None) -> None:
        """The same without a look at the pairs that are elsewhere; of one choice a token has one row."""
        choices = self.place.shape[1]
        choice = self.pairs % choices
        most = min(len(rows), len(y))
        counts = [most] if rows.is_meta else choice.bincount(minlength=choices).tolist()
        for places in choice.argsort(stable=True)[: sum(counts)].split(counts):
            added = rows[places].to(y.dtype)
            if weights is not None:
                added.mul_(weights.reshape(-1)[self.pairs[places]].unsqueeze(-1))
            y.index_add_(0, self.pairs[places] // choices, added)


def pieces(chosen: Tensor, experts: int, promise: Promise, spread: Spread) -> Iterator[Piece]:
    """None where they go to a node first. chosen: (tokens, choices). experts: on this rank. Raises ExpertOverflow."""
    if spread.along is not None and spread.along.inner is not None:
        return
    if spread.along is not None:
        yield from _sent_pieces(chosen, experts, promise, spread, spread.along)
        return
    order, ends = by_group(chosen, spread.first, experts)
    place = placed(order, len(order)).view_as(chosen)
    if spread.parts == 1:
        yield Piece(order, place, Handle(None, (None, ends)))
        return
    most = promise.most(chosen.numel(), spread.parts)
    rows = min(most, chosen.numel()) if chosen.is_meta else int(ends[-1])
    for start in range(0, rows, most):
        count = min(most, rows - start)
        sorted_ends = (ends - start).clamp(0, count)
        yield Piece(order[start : start + count], place - start, Handle(None, (None, sorted_ends)))


def _sent_pieces(chosen: Tensor, experts: int, promise: Promise, spread: Spread, along: Along) -> Iterator[Piece]:
    share, mean, few = spread.share(experts), spread.rows(chosen), spread.mean is not None
    order, ends = by_group(chosen, spread.first, share.ends[-1])
    counting = along.start_all_gather(torch.diff(ends, prepend=ends.new_zeros(1)).unsqueeze(0), 0)
    place, most = placed(order, len(order)), promise.most(mean)
    if chosen.is_meta:
        yield _promised_piece(order, place.view_as(chosen), experts, most, along, few)
        return
    counts = counting.wait().cpu()
    loads = share.by_rank(counts.sum(0))
    if promise.on_overflow != "chunk" and int(loads.max()) > most:
        raise ExpertOverflow(overflow(loads, counts.sum(0), promise, most, mean, along.axis))
    mine, own = slice(share.start, share.start + experts), counts[along.index]
    starts = own.cumsum(0) - own
    fits = int(counts.sum(1).max()) <= most
    for piece in _pieces_of(counts, share, most if fits else max(most // along.size, 1)):
        sent, arriving = piece[along.index], piece[:, mine]
        pairs = _ranges(starts, sent).to(order.device)
        starts = starts + sent
        arrange = None if experts == 1 else _by_expert(arriving).to(order.device)
        yield Piece(
            order[pairs],
            placed(pairs, len(order))[place].view_as(chosen),
            Handle(None, (arrange, arriving.sum(0).cumsum(0).to(ends.device))),
            along,
            tuple(share.by_rank(sent).tolist()),
            tuple(arriving.sum(1).tolist()),
            few,
        )


def _pieces_of(counts: Tensor, share: Share, most: int) -> Iterator[Tensor]:
    """The counts of every piece. counts: (source, expert of all ranks)."""
    by_expert, loads = counts.t(), share.by_rank(counts.sum(0))
    before_rank = (loads.cumsum(0) - loads).repeat_interleave(torch.tensor(share.lengths))
    ends = by_expert.flatten().cumsum(0).view_as(by_expert) - before_rank.unsqueeze(1)
    for start in range(0, int(loads.max()), most):
        before, after = ((ends - by_expert).clamp(start, start + most), ends.clamp(start, start + most))
        yield (after - before).t()


def _by_expert(arriving: Tensor) -> Tensor:
    """Which of the rows that arrive, by source and then by expert, stand where, once sorted by expert. arriving: counts,
    (source, expert)."""
    flat = arriving.flatten()
    starts = (flat.cumsum(0) - flat).view_as(arriving)
    return _ranges(starts.t().flatten(), arriving.t().flatten())


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, … of every range, one range after the other."""
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return shift + torch.arange(len(shift))


def placed(order: Tensor, size: int) -> Tensor:
    """(size,): where in `order` each number stands, -1 for those that it lacks."""
    place = order.new_full((size,), -1)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def _promised_piece(order: Tensor, place: Tensor, experts: int, most: int, along: Along, few: bool) -> Piece:
    """A piece on tensors without data: as many rows as are promised, and what tells of them."""
    arrange, leaving = None if experts == 1 else order.new_empty(most), min(len(order), max(most, along.size))
    sent, received = in_equal_parts(leaving, along.size), in_equal_parts(most, along.size)
    pairs = order.new_empty(leaving)
    arrival = Handle(None, (arrange, order.new_empty(experts)))
    return Piece(pairs, place.clone(), arrival, along, sent, received, few)


def in_equal_parts(rows: int, parts: int) -> tuple[int, ...]:
    """How many of these rows each part has, as even as can be."""
    return tuple(rows // parts + (part < rows % parts) for part in range(parts))


def overflow(
    loads: Tensor, of_experts: Tensor, promise: Promise, most: int, mean: int, axes: str, what: str = "compute"
) -> str:
    """The message where a rank is to compute, or pass on, more rows than are promised. loads: rows by rank."""
    rank, expert = int(loads.argmax()), int(of_experts.argmax())
    needed = math.ceil(int(loads[rank]) / max(mean, 1) * 100) / 100
    return (
        f"{promise.source or 'experts'}: rank {rank} along {axes} is to {what} {int(loads[rank])} rows for its experts, memory "
        f"is promised for {most} ({promise.imbalance:g} times the mean of {mean}); rows by rank: {loads.tolist()}, most of "
        f"one expert: {int(of_experts[expert])} of expert {expert}. No token is dropped: compile with "
        f'Options(expert_imbalance={needed:g}) or more, or with Options(on_overflow="chunk"), which computes such a step '
        "in more pieces"
    )
