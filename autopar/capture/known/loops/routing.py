"""The sum that a loop over experts computes, concluded from a run of it on numbers.

    y[t] = sum over j of weights[t, j] · expert[chosen[t, j]](x[t])

The run tells which rows each expert was given. `x` is the tensor among forward's own that has all of these rows, `chosen` the
integers among them that name exactly these experts for these rows, and `weights` those with which the sum is a tensor that
forward goes on with. All are places in the record of the run (`recorded.py`), so that a repetition, which is traced, has them.
A loop that gives no more than `capacity` rows to an expert drops those that come later: token by token, or choice by choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.known.loops.recorded import Entry, Recording, Sought, along, of_routing, tensors_in

Run = Callable[[], tuple[Sequence[nn.Module], Sequence[Tensor], Callable[[Any], Any]]]
"""Gives experts, what forward is given, and what runs it within a context; anew, and the same, each time."""
Place = tuple[int, int]
"""A tensor that forward has: a call of the record and which tensor of its result; call -1: of what forward was given."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Where the weights are: one a choice, or of all experts (`whole`), of which each choice takes its own; None: all are 1."""

    place: Place | None
    whole: bool = False


@dataclass(frozen=True, eq=False)
class Routing:
    """The record of a loop, and where in it rows, choices and weights are. capacity: rows that an expert takes at most (None:
    all), in the order of tokens, or of choices first."""

    entries: tuple[Entry, ...]
    rows: Place
    chosen: Place
    weights: Weights
    capacity: int | None = None
    choices_first: bool = False

    def choices(self, of: Callable[[Place], Tensor], experts: int) -> Tensor:
        """(…, choices): the expert that takes each row, `experts` for none. of: the tensor at a place."""
        rows, chosen = of(self.rows), of(self.chosen).long()
        if chosen.shape[:-1] != rows.shape[:-1]:
            chosen = chosen.reshape(rows.shape[:-1].numel(), -1).reshape(*rows.shape[:-1], -1)
        if self.capacity is None:
            return chosen
        return _kept(chosen.reshape(-1, chosen.shape[-1]), experts, self.capacity, self.choices_first).view_as(chosen)

    def shares(self, of: Callable[[Place], Tensor], chosen: Tensor, experts: int) -> Tensor:
        """(…, choices): the weight of each choice."""
        if self.weights.place is None:
            return torch.ones_like(chosen, dtype=of(self.rows).dtype)
        weights = of(self.weights.place)
        if not self.weights.whole:
            return weights.reshape(chosen.shape)
        return weights.reshape(*chosen.shape[:-1], -1).gather(-1, chosen.clamp(0, experts - 1))


def _kept(chosen: Tensor, experts: int, capacity: int, choices_first: bool) -> Tensor:
    """(rows, choices): choices beyond what an expert takes are `experts`."""
    order = chosen.t() if choices_first else chosen
    flat = order.reshape(-1)
    hot = flat.unsqueeze(-1) == torch.arange(experts, device=flat.device)
    place = (hot.long().cumsum(0) * hot).sum(-1)
    kept = torch.where(place <= capacity, flat, experts).view(order.shape)
    return kept.t() if choices_first else kept


def concluded(run: Run, experts: int) -> Routing | None:
    """The sum that a forward computes with so many experts; None where it is no such sum. Raises whatever forward raises."""
    first, given, _ = _recorded(run, None)
    if not first.calls:
        return None
    last = first.calls[-1][0]
    values = dict(_values(first.entries[:last], given))
    for rows, pairs, results in _sources(first, values):
        for chosen, capacity, choices_first in _choices(values, pairs, experts):
            routing = Routing((), rows, chosen, Weights(None), capacity, choices_first)
            choices = routing.choices(values.__getitem__, experts).reshape(len(pairs[1]), -1)
            guesses = list(_guesses(values, choices, experts))
            sums = [_sum(choices, shares, first.calls, results) for _, shares in guesses]
            second, given, outputs = _recorded(run, Sought(tuple(sums), last))
            if second.found is None or second.holds(outputs):
                continue
            weights = guesses[second.found][0]
            known = [t for place, t in _values(second.entries, given) if place in (chosen, weights.place)]
            if of_routing(second.entries, known):
                return Routing(tuple(second.entries), rows, chosen, weights, capacity, choices_first)
    return None


def _recorded(run: Run, sought: Sought | None) -> tuple[Recording, Sequence[Tensor], list[Tensor]]:
    recording, (experts, given, forward) = Recording(sought), run()
    result = forward(along(recording, experts))
    return recording, given, [t for t in tensors_in(result) if isinstance(t, Tensor)]


def _values(entries: Sequence[Entry], given: Sequence[Tensor]) -> Iterator[tuple[Place, Tensor]]:
    """The tensors that the data did not decide the shape of, the first ones first."""
    yield from (((-1, i), t) for i, t in enumerate(given))
    for at, entry in enumerate(entries):
        if entry.does == "run" and entry.expert is None:
            yield from (((at, i), t) for i, t in enumerate(tensors_in(entry.result)) if isinstance(t, Tensor))


def _sources(
    record: Recording, values: dict[Place, Tensor]
) -> Iterator[tuple[Place, tuple[set[tuple[int, int]], range], list[Tensor]]]:
    """Tensors that have all rows that experts were given: (place, the pairs of rows and experts, the numbers of rows by call)."""
    width = record.calls[0][2].shape[-1]
    for place, value in reversed(values.items()):
        if not value.is_floating_point() or value.shape[-1:] != (width,) or value.ndim < 2:
            continue
        number = {row.tobytes(): i for i, row in enumerate(value.detach().reshape(-1, width).cpu().numpy())}
        if len(number) < value.numel() // width:
            continue
        found = [
            [number.get(row.tobytes(), -1) for row in rows.detach().reshape(-1, width).cpu().numpy()]
            for _, _, rows, _ in record.calls
        ]
        if min(map(min, found)) >= 0:
            pairs = {(row, call[1]) for call, rows in zip(record.calls, found, strict=True) for row in rows}
            yield place, (pairs, range(len(number))), [torch.tensor(rows) for rows in found]


def _choices(
    values: dict[Place, Tensor], pairs: tuple[set[tuple[int, int]], range], experts: int
) -> Iterator[tuple[Place, int | None, bool]]:
    """Integers that name these experts for these rows: (place, capacity, whether choices come first)."""
    wanted, tokens = pairs
    often = torch.bincount(torch.tensor([expert for _, expert in wanted]), minlength=experts)
    most = int(often.max())
    for place, value in values.items():
        if value.dtype not in (torch.int64, torch.int32) or not value.numel() or value.numel() % len(tokens):
            continue
        choices = value.numel() // len(tokens)
        if choices > experts or (choices > 1 and value.shape[-1] != choices):
            continue
        chosen = value.long().reshape(-1, choices)
        for capacity, first in ((None, False), (most, False), (most, True)):
            kept = chosen if capacity is None else _kept(chosen, experts, capacity, first)
            named = ((kept >= 0) & (kept < experts)).nonzero()
            if {(int(t), int(kept[t, j])) for t, j in named.tolist()} == wanted:
                yield place, capacity, first
                break


def _guesses(values: dict[Place, Tensor], chosen: Tensor, experts: int) -> Iterator[tuple[Weights, Tensor]]:
    """Tensors that may be the weights (rows, choices), of equal ones the last."""
    valid, seen = (chosen >= 0) & (chosen < experts), list[Tensor]()
    for place, value in reversed(values.items()):
        if not value.is_floating_point():
            continue
        for whole in (False, True):
            of_row = experts if whole else chosen.shape[1]
            if value.numel() != len(chosen) * of_row or (of_row > 1 and value.shape[-1:] not in ((of_row,), (1,))):
                continue
            shares = value.detach().reshape(len(chosen), -1)
            shares = shares.gather(1, chosen.clamp(0, experts - 1)) if whole else shares
            if not any(torch.equal(shares * valid, other) for other in seen):
                seen.append(shares * valid)
                yield Weights(place, whole), shares
    yield Weights(None), torch.ones(chosen.shape, dtype=torch.float64)


def _sum(
    chosen: Tensor, shares: Tensor, calls: Sequence[tuple[int, int, Tensor, Tensor]], rows: Sequence[Tensor]
) -> Tensor:
    """(rows, width): the weighted sum of what experts gave."""
    width = calls[0][3].shape[-1]
    total = torch.zeros(len(chosen), width, dtype=torch.float64)
    for (_, expert, _, result), taken in zip(calls, rows, strict=True):
        share = (shares[taken] * (chosen[taken] == expert)).sum(1, keepdim=True)
        total.index_add_(0, taken, result.detach().reshape(-1, width) * share)
    return total
