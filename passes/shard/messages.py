"""Bounds by message passing: prune states that no optimum can take, until what is left can be solved exactly.

Tree-reweighted message passing (TRW-S, Kolmogorov 2006) solves the dual of the same LP relaxation approximately, in
numpy, at a cost linear in the number of pair states, many variables at once (`autopar.passes.shard.padded`). A sweep
climbs from whatever messages it meets, so each round starts beyond those of the round before, as far again as k / (k + 3)
of its move: Nesterov's momentum, begun anew where a bound would fall (O'Donoghue and Candès 2015). From the messages follow

- a lower bound: what a sweep takes off totals and messages on its way, whatever messages it meets; it never falls;
- for every state the least that choosing it adds to a second bound: each variable's cost is spread evenly over its edges, and the
  edges' minima are added up. Where that exceeds upper - lower, the state goes;
- an assignment (upper bound): fix variables in order, each at its cheapest given the fixed ones and the messages; every now
  and then the best one so far is polished (`autopar.passes.shard.polish`) among the states that add least.

Nothing is lost: what is pruned is proven not to be optimal. On meshes of three axes this leaves a problem some
hundred times smaller.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.passes.shard.eliminate import elimination_order
from autopar.passes.shard.padded import Edges, Level, alike, depths, padded_states, slots
from autopar.passes.shard.polish import polished
from autopar.passes.shard.reduce import Reduced, assigned, copy_of, keep_states

_SLOW = 3
"""Momentum after k rounds is k / (k + _SLOW) of the last round's move."""
_ROUNDS_BETWEEN = 5
"""Rounds of messages between two looks at the bounds."""
_FIRST_POLISH, _BETWEEN_POLISHES = 10, 10
"""Rounds of messages before the best assignment is polished, and until the next time; twice as many after each in vain."""
_WORTH_PRUNING = 0.05
"""States go when they are such a part of all: fewer cost more to take out than to keep for a while."""
_POLISHES, _WIDEST, _MOST = 2, 16, 10_000_000
"""Rounds of a polish, and how large their tables get (`polish.py`): about as long as as many rounds of messages."""
_LIKELY = (2, 4)
"""States of a variable, on average, that one polish and the next choose from."""


@dataclass
class Bounds:
    """lower: proven bound. upper: cost of `chosen` (position per remaining variable). extra: least cost a state adds."""

    lower: float
    upper: float
    chosen: dict[int, int]
    extra: dict[int, np.ndarray]


def bound(
    r: Reduced,
    rounds: int,
    deadline: float,
    close: float = 1e-7,
    known: Mapping[int, int] | None = None,
    ceiling: float = -math.inf,
) -> Bounds:
    """Message passing on what is left; prunes states of `r` in place as the bounds close.

    close: relative distance of the bounds that will do. known: an assignment (position per variable) to improve on. ceiling:
    states stay that are in assignments of that cost or less, though these be no optima.
    """
    passing = Passing(r, known, ceiling)
    for k in range(rounds):
        passing.round()
        if k % _ROUNDS_BETWEEN == _ROUNDS_BETWEEN - 1 or k == rounds - 1:
            improved = passing.update(k + 1)
            closed = passing.upper - passing.lower <= close * abs(passing.upper)
            if closed or passing.small or time.monotonic() > deadline or (k > 15 and not improved):
                break
    return passing.finish()


def levels(r: Reduced) -> int:
    """Steps that a sweep of messages takes one after another."""
    return 1 + max(depths((v, r.near[v]) for v in _order(r)).values(), default=-1)


def _order(r: Reduced) -> list[int]:
    """Breadth first from a variable at the rim, so that messages travel far in one sweep."""
    seen: dict[int, None] = {}
    for root in sorted(r.cost, key=lambda v: len(r.near[v])):
        queue = [root]
        while queue:
            v = queue.pop(0)
            if v not in seen:
                seen[v] = None
                queue.extend(u for u in sorted(r.near[v]) if u not in seen)
    return list(seen)


@dataclass(frozen=True)
class _Sent:
    """Messages of one level that are computed together: places of their senders, their numbers, those of the messages the
    other way, and their pair costs.

    scratch: room for as many numbers, which all share, as one is sent at a time.
    """

    row: np.ndarray
    edges: np.ndarray
    back: np.ndarray
    pairs: np.ndarray
    scratch: np.ndarray


class Passing:
    """Messages on their way, and the bounds so far.

    Arrays of states have a row per variable (or message), padded. alive: the state of the graph as it came that every
    state is; sizes: how many there are. before: the messages one round ago; moves: rounds since momentum began.
    swept: the bound of the last round; alone: cost of variables without neighbours.
    best: the states of `upper`'s assignment, as they came; extra: as in `Bounds`.
    """

    def __init__(self, r: Reduced, known: Mapping[int, int] | None = None, ceiling: float = -math.inf) -> None:
        self.r, self.edges, self.ceiling = r, Edges.of(r, _order(r)), ceiling
        variables = self.edges.variables
        self.numbers = {v: i for i, v in enumerate(variables)}
        self.lower, self.upper, self.swept = -np.inf, np.inf, -np.inf
        self.alone = sum(float(c.min()) for v, c in r.cost.items() if not r.near[v])
        self.next_polish, self.polish_wait = _FIRST_POLISH, _BETWEEN_POLISHES
        self.best = np.zeros(len(variables), int)
        if known is not None:
            self.upper, self.best = assigned(r, known), np.array([known[v] for v in variables], int)
        self.sizes = np.array([len(r.cost[v]) for v in variables], int)
        self.all_costs = np.zeros((len(variables), self.sizes.max(initial=0)))
        for i, v in enumerate(variables):
            self.all_costs[i, : self.sizes[i]] = r.cost[v]
        self.alive = padded_states(self.sizes)
        self.extra = np.zeros(self.alive.shape)
        self.messages = np.zeros((self.edges.silent + 1, self.alive.shape[1]))
        self.before, self.moves = self.messages, 0
        incident: list[list[int]] = [[] for _ in variables]
        for e, u in enumerate(self.edges.source[:-1].tolist()):
            incident[u].append(e)
        self.incident = slots(incident, self.edges.silent)
        self.degrees = np.array([len(entering) for entering in self.edges.entering])
        self.scratch = np.empty(0)
        self._prepare()

    def _prepare(self) -> None:
        """Costs of the states that are alive, as sweeps and bounds need them."""
        self._small: bool | None = None
        self.costs = np.take_along_axis(self.all_costs, self.alive, 1)
        self.sent = tuple([[*self._together(level.ahead, level.row)] for level in sweep] for sweep in self.edges.sweeps)
        self.columns = [
            self.alive[level.variables] * self.edges.target_step[level.entering][:, :, None]
            for level in self.edges.sweeps[0]
        ]

    def _together(self, edges: np.ndarray, row: np.ndarray) -> Iterable[_Sent]:
        """Messages over `edges` in groups, with their pair costs."""
        source, target = self.edges.source[edges], self.edges.target[edges]
        for places in alike(edges, self.sizes[source], self.sizes[target]):
            rows, columns = self.sizes[source[places]].max(), self.sizes[target[places]].max()
            u, v = self.alive[source[places], :rows], self.alive[target[places], :columns]
            pairs = self.edges.matrices(edges[places], u, v)
            if pairs.size > len(self.scratch):
                self.scratch = np.empty(pairs.size)
            scratch = self.scratch[: pairs.size].reshape(pairs.shape)
            yield _Sent(row[places], edges[places], edges[places] ^ 1, pairs, scratch)

    @property
    def small(self) -> bool:
        """Whether what is left can be solved by elimination: looked at once for the states that are alive."""
        if self._small is None:
            sizes = dict(zip(self.edges.variables, self.sizes.tolist(), strict=True))
            self._small = elimination_order(sizes, self.r.near) is not None
        return self._small

    # --- messages

    def round(self) -> None:
        """All messages once in either direction, from beyond those of the round before. A round that momentum made
        worse is taken back, and the next one goes without."""
        momentum, start = self.moves / (self.moves + _SLOW), self.messages
        self.messages = start + momentum * (start - self.before)
        swept = 0.0
        for levels, sent in zip(self.edges.sweeps, self.sent, strict=True):
            swept = sum(self._send(level, groups) for level, groups in zip(levels, sent, strict=True))
        self.before = start
        if swept < self.swept and momentum > 0.0:
            self.messages, self.moves = start, 0
        else:
            self.swept, self.moves = swept, self.moves + 1

    def _send(self, level: Level, groups: list[_Sent]) -> float:
        """Messages of the variables of a level to those ahead of them; what is taken off them and stays of the totals.
        Most levels are small, so what numpy does around the numbers counts: `minimum.reduce` is what `min` calls, without
        its wrapper, and `take` is an index without its rules."""
        total, width = self._totals(level), self.messages.shape[1]
        least = np.minimum.reduce(total, 1, keepdims=True)
        bound = float((least * level.rest).sum())
        total *= level.share
        for group in groups:
            outgoing = total.take(group.row, 0)
            outgoing -= self.messages.take(group.back, 0)
            rows, _, columns = group.pairs.shape
            np.add(group.pairs, outgoing[:, :rows].T[:, :, None], out=group.scratch)
            message = np.minimum.reduce(group.scratch, 0)
            low = np.minimum.reduce(message, 1, keepdims=True)
            bound += float(low.sum())
            message -= low
            if columns < width:
                padded = outgoing
                padded[:] = message[:, :1]
                padded[:, :columns] = message
                message = padded
            self.messages[group.edges] = message
        return bound

    def _totals(self, level: Level) -> np.ndarray:
        """Every variable's cost with the messages that it got."""
        return _added_up(self.costs.take(level.variables, 0), self.messages.take(level.entering, 0))

    # --- bounds

    def update(self, rounds: int) -> bool:
        """New bounds from the messages of so many rounds, then pruning. True while something still improves."""
        lower, extra = self._lower()
        chosen = self._decode()
        upper = self._value(chosen)
        improved = max(lower, self.swept) > self.lower + 1e-6 * abs(lower)
        self.lower = max(self.lower, lower, self.swept)
        if upper < self.upper:
            self.upper, self.best = upper, self._states(chosen)
        self.extra = extra + (lower - self.lower)
        if rounds >= self.next_polish:
            self._polish(rounds)
        self._keep(extra <= max(self.upper, self.ceiling) - lower + 1e-9 * abs(self.upper))
        return improved

    def _lower(self) -> tuple[float, np.ndarray]:
        """The bound that the messages mean, and the least that every state adds to it.

        Messages are taken out of the pair costs, and every variable's total is spread over its edges.
        """
        messages, edges, n = self.messages, self.edges, len(self.sizes)
        total = np.empty_like(self.costs)
        for level in edges.sweeps[0]:
            total[level.variables] = self._totals(level)
        spread = total / np.maximum(self.degrees, 1)[:, None]
        least = np.zeros(edges.silent // 2)
        added = np.zeros(messages.shape)
        for group in itertools.chain.from_iterable(self.sent[0]):
            e, (rows, _, columns) = group.edges, group.pairs.shape
            of_source = (spread[edges.source[e]] - messages[e ^ 1])[:, :rows]
            of_target = (spread[edges.target[e]] - messages[e])[:, :columns]
            costs = np.add(group.pairs, of_source.T[:, :, None], out=group.scratch)
            costs += of_target[None]
            by_source, by_target = np.minimum.reduce(costs, 2).T, np.minimum.reduce(costs, 0)
            least[e // 2] = low = np.minimum.reduce(by_target, 1)
            added[e, :rows] = by_source - low[:, None]
            added[e ^ 1, :columns] = by_target - low[:, None]
        extra = _added_up(np.zeros((n, messages.shape[1])), added[self.incident])
        return self.alone + sum(least.tolist()), extra

    def _decode(self) -> np.ndarray:
        """An assignment: variables in order, each at its cheapest given those before it and the messages of those after it;
        then each at its cheapest given all others, until nothing changes. As places among the states that are alive."""
        levels, n = self.edges.sweeps[0], len(self.sizes)
        chosen, states = np.zeros(n, int), np.zeros(n, int)
        for level, columns in zip(levels, self.columns, strict=True):
            entering = np.where(level.behind, self._given(level, columns, states), self.messages[level.entering])
            best = _added_up(self.costs[level.variables], entering).argmin(1)
            chosen[level.variables], states[level.variables] = best, self.alive[level.variables, best]
        look = np.ones(n, bool)  # variables with a neighbour that changed since they were looked at
        while look.any():
            for level, columns in zip(levels, self.columns, strict=True):
                if not look[level.variables].any():
                    continue
                look[level.variables] = False
                total = _added_up(self.costs[level.variables], self._given(level, columns, states))
                best, here = total.argmin(1), np.arange(len(total))
                better = total[here, best] < total[here, chosen[level.variables]] - 1e-15
                if better.any():
                    changed, places = level.variables[better], best[better]
                    chosen[changed], states[changed] = places, self.alive[changed, places]
                    look[self.edges.source[level.entering[:, better]]] = True
        return chosen

    def _polish(self, rounds: int) -> None:
        """Improve the best assignment by choosing most variables anew together, among the states that add least to the
        bound over the whole graph: messages alone may leave it far above the bound for long, and then few states go."""
        before = self.upper
        extra = self.extra + self._beyond()
        inside = np.sort(extra[np.isfinite(extra)])
        for likely in _LIKELY:
            left, kept, chosen = copy_of(self.r), [], {}
            most = inside[min(int(likely * len(extra)), len(inside) - 1)]
            for i, v in enumerate(self.edges.variables):
                states = np.union1d(self.alive[i, extra[i] <= most], self.best[i])
                kept.append(states)
                chosen[v] = int(np.searchsorted(states, self.best[i]))
                keep_states(left, v, states)
            turns = range(rounds, rounds + _POLISHES)
            chosen, upper = polished(left, chosen, self.lower, turns, _WIDEST, _MOST)
            if upper < self.upper:
                self.upper = upper
                self.best = np.array([states[chosen[v]] for states, v in zip(kept, self.edges.variables, strict=True)])
        if self.upper == before:
            self.polish_wait *= 2
        self.next_polish = rounds + self.polish_wait

    def _given(self, level: Level, columns: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Per edge of every variable of a level the pair costs of its states with the state at the other end."""
        edges, e = self.edges, level.entering
        rows = edges.start[e] + states[edges.source[e]] * edges.source_step[e]
        return np.asarray(edges.pairs[rows[:, :, None] + columns])

    def _value(self, chosen: np.ndarray) -> float:
        """The cost of an assignment."""
        states, edges = self._states(chosen), self.edges
        costs = [float(self.all_costs[i, states[i]]) for i in map(self.numbers.__getitem__, self.r.cost)]
        e = np.arange(0, edges.silent, 2)
        u, v = states[edges.source[e]], states[edges.target[e]]
        pairs = edges.pairs[edges.start[e] + u * edges.source_step[e] + v * edges.target_step[e]]
        return sum(costs) + sum(pairs.tolist())

    def _states(self, chosen: np.ndarray) -> np.ndarray:
        """States as they came, from places among those that are alive."""
        return self.alive[np.arange(len(chosen)), chosen]

    def _beyond(self) -> np.ndarray:
        """Infinity where a row is padded, 0 elsewhere."""
        return np.where(np.arange(self.alive.shape[1]) < self.sizes[:, None], 0.0, np.inf)

    # --- pruning

    def _keep(self, near_optimal: np.ndarray) -> None:
        """Drop the states that cannot be in an optimum, except those of the best assignment, once they are many."""
        real = np.arange(near_optimal.shape[1]) < self.sizes[:, None]
        kept = (near_optimal | (self.alive == self.best[:, None]) | (self.degrees == 0)[:, None]) & real
        sizes = kept.sum(1)
        if self.sizes.sum() - sizes.sum() <= _WORTH_PRUNING * self.sizes.sum():
            return
        places = np.argsort(~kept, axis=1, kind="stable")[:, : sizes.max()]
        places = np.where(np.arange(places.shape[1]) < sizes[:, None], places, places[:, :1])
        self.sizes, self.alive = sizes, np.take_along_axis(self.alive, places, 1)
        self.extra = np.take_along_axis(self.extra, places, 1)
        self.messages, self.before = (
            np.take_along_axis(messages, places[self.edges.target], 1) for messages in (self.messages, self.before)
        )
        self._prepare()

    def finish(self) -> Bounds:
        """The bounds; the graph keeps the states that are left."""
        chosen = self._restrict(self.r)
        extra = {v: self.extra[i, : self.sizes[i]] for i, v in enumerate(self.edges.variables)}
        return Bounds(self.lower, self.upper, chosen, extra)

    def _restrict(self, r: Reduced) -> dict[int, int]:
        """Keep of a graph, which is as this one came, the states that are alive; the places of the best assignment there."""
        chosen: dict[int, int] = {}
        for i, v in enumerate(self.edges.variables):
            kept = self.alive[i, : self.sizes[i]]
            chosen[v] = int(np.searchsorted(kept, self.best[i]))
            if len(kept) < len(r.cost[v]):
                keep_states(r, v, kept)
        return chosen


def _added_up(total: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Terms added one after the other, to `total` in its place."""
    for term in terms:
        total += term
    return total
