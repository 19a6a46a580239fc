"""Messages whose sizes the plan says, for devices that the host runs ahead of: it never asks how many rows there are.

Every rank sends every other as many rows, of which the first are what it has for it, and the rest is padding:

    room = max(imbalance · mean, mean + 6 · sqrt(mean)), at most all

rows for each, where the mean is that of equal choices, to the rank with most experts: the promise of memory (dispatch.py), or
where that is more, what no random choice exceeds. Counts are gathered as a tensor, from which a rank sorts what arrives by
expert, padding last. Tokens that go to nodes need none: padding chose no expert. More rows than have room end the step on all
ranks (../overflow.py).

    rank 0 sends its 3 rows of experts 2 2 3 to rank 1, room 4      2 2 3 ·     counts (0, 0, 2, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ...comm.axis_comm import Along
from ...comm.calls import Handle
from ...comm.devices import runs_ahead
from ..grouped import by_group
from ..overflow import note
from . import dispatch, two_level_dispatch
from .dispatch import Piece, Promise, Spread
from .two_level_dispatch import Leg, visited_nodes

Tensor = torch.Tensor


def pieces(chosen: Tensor, experts: int, promise: Promise, spread: Spread) -> Iterator[Piece]:
    """The pieces of dispatch.py, or the one that is padded. Raises ExpertOverflow."""
    if not _is_padded(chosen, promise) or (spread.along is None and spread.parts == 1):
        yield from dispatch.pieces(chosen, experts, promise, spread)
    elif spread.along is None:
        yield _own_rows(chosen, experts, promise, spread)
    elif spread.along.inner is None:
        yield _sent_rows(chosen, experts, promise, spread, spread.along)


def legs(chosen: Tensor, experts: int, promise: Promise, spread: Spread) -> Iterator[Leg]:
    """The legs of two_level_dispatch.py, or the one that is padded. Raises ExpertOverflow."""
    if not _is_padded(chosen, promise):
        yield from two_level_dispatch.legs(chosen, experts, promise, spread)
    elif spread.along is not None and spread.along.inner is not None:
        yield _to_nodes(chosen, experts, promise, spread.along, spread.along.inner)


def _is_padded(chosen: Tensor, promise: Promise) -> bool:
    return promise.on_overflow != "chunk" and runs_ahead(chosen.device)


def _own_rows(chosen: Tensor, experts: int, promise: Promise, spread: Spread) -> Piece:
    """The rows of this rank's experts, of all that every rank of `parts` has."""
    order, ends = by_group(chosen, spread.first, experts)
    room = promise.room(chosen.numel(), spread.parts, chosen.numel())
    _note(
        ends[-1:], room, promise, chosen.numel() / spread.parts, "this rank's experts are to compute {} rows, and have"
    )
    return Piece(
        order[:room], dispatch.placed(order, len(order)).view_as(chosen), Handle(None, (None, ends.clamp(max=room)))
    )


def _sent_rows(chosen: Tensor, experts: int, promise: Promise, spread: Spread, along: Along) -> Piece:
    """The rows that this rank sends, as many to every rank."""
    share, rows, ranks = spread.share(experts), spread.rows(chosen), along.size
    order, ends = by_group(chosen, spread.first, share.ends[-1])
    room = promise.room(rows, ranks, spread.pairs or len(order))
    of_ranks = torch.stack([ends[end - 1] for end in share.ends])
    starts = torch.cat([ends.new_zeros(1), of_ranks[:-1]])
    loads = of_ranks - starts
    _note(
        loads,
        room,
        promise,
        rows / ranks,
        f"rank {{}} along {along.axis} is to get {{}} rows of one rank, messages have",
    )
    counting = along.start_all_gather(ends.unsqueeze(0), 0)
    slots = torch.arange(ranks * room, device=order.device)
    within = slots[:room]
    pairs = order[(starts.unsqueeze(1) + within).clamp(max=len(order) - 1)]
    real = pairs.masked_fill(within >= loads.unsqueeze(1), len(order))
    place = order.new_full((len(order) + 1,), -1).scatter_(0, real.flatten(), slots)[:-1]
    return Piece(
        pairs.flatten(),
        place.view_as(chosen),
        counting.then(lambda gathered: _arrived(gathered, share.start, experts, within)),
        along,
        (room,) * ranks,
        (room,) * ranks,
        padded=True,
    )


def _arrived(ends: Tensor, first: int, experts: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The order that sorts the rows of all sources by expert, and where those of each end. ends: of every expert's rows in each
    source, (source, expert of all ranks); first: of this rank's experts; slots: the places of a message."""
    own = ends[:, first : first + experts]
    if first:
        own = own - ends[:, first - 1 : first]
    own = own.clamp(max=len(slots))
    expert = torch.searchsorted(own, slots.expand(len(own), -1).contiguous(), right=True)
    return expert.flatten().sort(stable=True)[1], own.sum(0)


def _to_nodes(chosen: Tensor, experts: int, promise: Promise, along: Along, inner: Along) -> Leg:
    """Tokens to the nodes that they visit, as many to every node."""
    tokens, choices = chosen.shape
    nodes, of_node, visits = along.size, experts * inner.size, tokens * min(choices, along.size)
    visited = visited_nodes(chosen, nodes, of_node).t()
    room, loads = promise.room(visits, nodes, tokens), visited.sum(1)
    _note(
        loads,
        room,
        promise,
        visits / nodes,
        f"rank {{}} along {along.axis} is to get {{}} tokens of one rank, messages have",
    )
    first = (~visited).to(torch.uint8).sort(dim=1, stable=True)[1][:, :room]
    real = torch.arange(room, device=chosen.device) < loads.unsqueeze(1)
    inside = Spread(along.index * of_node, 1, inner, mean=chosen.numel())
    return Leg(along, first.flatten(), (room,) * nodes, (room,) * nodes, inside, real.flatten())


def _note(loads: Tensor, room: int, promise: Promise, mean: float, what: str) -> None:
    """what: the words for a rank and its rows, or for the rows alone."""
    if not promise.notes:
        return

    def say(loads: list[int], which: str) -> str:
        rank, most = max(enumerate(loads), key=lambda load: load[1])
        words = what.format(rank, most) if what.count("{}") > 1 else what.format(most)
        needed = math.ceil(most / max(mean, 1) * 100) / 100
        return (
            f"{promise.source or 'experts'}{which}: {words} room for {room} ({promise.imbalance:g} times the mean of {mean:g}, "
            f"or what random choices take): {most - room} rows are too many. No update was made with this step, and no token is "
            f"dropped: compile with Options(expert_imbalance={needed:g}) or more, or with "
            'Options(on_overflow="chunk"), where the host waits for the counts of every layer'
        )

    note(loads, room, promise.source, say)
