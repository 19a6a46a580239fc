"""A factor graph as arrays, so that a sweep of messages takes a few array operations instead of some per variable.

Variables are numbered in the order of a sweep. One that only waits for variables before it can be worked on together with
all others that do, so the order falls into *levels* (as many as the longest chain of neighbours is long, some 20 on
programs with hundreds of variables), and what is done level by level gives the very numbers of one variable at a time:

- variables with fewer states than others repeat their first one, which changes no minimum and no first place of one;
- a variable with fewer neighbours than others gets messages of zeros after its own, which changes no sum.

Two messages belong to every edge: message e goes from `source[e]` to `target[e]`, and e ^ 1 the other way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.passes.shard.reduce import Reduced

FEW = 1 << 15
"""Pair costs of a level up to which all its messages are computed together, however unlike their sizes are."""

_LARGE = 1 << 12
"""Pair costs of a message from which they are looked up by rows, then columns: one look-up of all takes twice as long."""


@dataclass(frozen=True)
class Edges:
    """The edges of a reduced graph. variables: by number. entering[v]: messages to v in the order of its neighbours.

    Pair (s, t) of message e stands at `pairs[start[e] + s * source_step[e] + t * target_step[e]]`; those of the silent
    message, which fills up where a variable has fewer neighbours than others, are 0.
    """

    variables: tuple[int, ...]
    entering: tuple[tuple[int, ...], ...]
    source: np.ndarray
    target: np.ndarray
    pairs: np.ndarray
    start: np.ndarray
    source_step: np.ndarray
    target_step: np.ndarray

    @staticmethod
    def of(r: Reduced, order: Sequence[int]) -> Edges:
        """The edges of a graph whose variables are numbered in this order."""
        number = {v: i for i, v in enumerate(order)}
        ends: list[tuple[int, int]] = []
        matrices: list[np.ndarray] = []
        message: dict[tuple[int, int], int] = {}
        for u, near in r.near.items():
            for v, matrix in near.items():
                if u < v:
                    message[u, v], message[v, u] = len(ends), len(ends) + 1
                    ends += [(number[u], number[v]), (number[v], number[u])]
                    matrices.append(matrix)
        rows, columns = (np.array([m.shape[i] for m in matrices], int) for i in (0, 1))
        starts = np.cumsum(rows * columns) - rows * columns
        ones = np.ones_like(columns)
        return Edges(
            tuple(order),
            tuple(tuple(message[u, v] for u in r.near[v]) for v in order),
            np.array([u for u, _ in ends] + [0], int),
            np.array([v for _, v in ends] + [0], int),
            np.concatenate([*(m.ravel() for m in matrices), [0.0]]),
            np.append(np.repeat(starts, 2), (rows * columns).sum()),
            np.append(np.stack([columns, ones], 1), 0),
            np.append(np.stack([ones, columns], 1), 0),
        )

    @property
    def silent(self) -> int:
        """The number of the message of zeros."""
        return len(self.source) - 1

    def matrices(self, edges: np.ndarray, source_states: np.ndarray, target_states: np.ndarray) -> np.ndarray:
        """Pair costs of these messages, at those states of their ends (message × state each): source × message × target."""
        if source_states.shape[1] * target_states.shape[1] > _LARGE:
            return np.stack([*map(self._matrix, edges.tolist(), source_states, target_states)], 1)
        rows = self.start[edges] + source_states.T * self.source_step[edges]
        columns = target_states * self.target_step[edges][:, None]
        return np.asarray(self.pairs[rows[:, :, None] + columns[None]])

    def _matrix(self, e: int, source_states: np.ndarray, target_states: np.ndarray) -> np.ndarray:
        """The pair costs of one message at those states of its ends: rows of the table, then columns."""
        first, backwards = e & ~1, e & 1
        table = self.pairs[self.start[first] : self.start[first + 2]].reshape(-1, self.source_step[first])
        if backwards:
            return np.asarray(table.take(target_states, 0).take(source_states, 1).T)
        return np.asarray(table.take(source_states, 0).take(target_states, 1))

    @cached_property
    def sweeps(self) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
        """The levels in the order of the variables, and in the opposite one."""
        numbers = range(len(self.variables))
        return self._levels(numbers), self._levels(numbers[::-1])

    def _levels(self, numbers: Sequence[int]) -> tuple[Level, ...]:
        depth = depths((v, [int(self.source[e]) for e in self.entering[v]]) for v in numbers)
        levels: list[list[int]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
        for v, level in depth.items():
            levels[level].append(v)
        forward = numbers[0] < numbers[-1] if numbers else True
        return tuple(Level.of(self, level, forward) for level in levels)


@dataclass(frozen=True)
class Level:
    """Variables that are worked on together. entering: messages to each of them, as often as any has neighbours.

    behind: which of these come from variables of earlier levels. ahead: the messages that they send to later ones; row:
    the place of the sender among the variables. share: of a sender's total, that each of its messages is sent; rest: what none
    of them is sent.
    """

    variables: np.ndarray
    entering: np.ndarray
    behind: np.ndarray
    ahead: np.ndarray
    row: np.ndarray
    share: np.ndarray
    rest: np.ndarray

    @staticmethod
    def of(edges: Edges, variables: list[int], forward: bool) -> Level:
        """`variables` in the order of their numbers, or in the opposite one."""
        behind, ahead, row, share, rest = [], [], [], [], []
        for i, v in enumerate(variables):
            earlier = [(int(edges.source[e]) < v) == forward for e in edges.entering[v]]
            later = [e ^ 1 for e, is_earlier in zip(edges.entering[v], earlier, strict=True) if not is_earlier]
            behind.append(earlier)
            ahead += later
            row += [i] * len(later)
            share.append(1.0 / max(len(later), len(earlier) - len(later), 1))
            rest.append(1.0 - len(later) * share[-1])
        return Level(
            np.array(variables, int),
            slots([edges.entering[v] for v in variables], edges.silent),
            slots(behind, False).astype(bool)[:, :, None],
            np.array(ahead, int),
            np.array(row, int),
            np.array(share)[:, None],
            np.array(rest)[:, None],
        )


def depths(near: Iterable[tuple[int, Collection[int]]]) -> dict[int, int]:
    """Per variable the most others that are worked on one after another before it. near: variables in the order of a sweep, each
    with its neighbours."""
    depth: dict[int, int] = {}
    for v, others in near:
        depth[v] = 1 + max((depth.get(u, -1) for u in others), default=-1)
    return depth


def slots(lists: Sequence[Sequence[int]], filler: int) -> np.ndarray:
    """A row of the first entry of every list, one of the second of every list, and so on; filled up where lists are short."""
    longest = max(map(len, lists), default=0)
    rows = [[*entries, *[filler] * (longest - len(entries))] for entries in lists]
    return np.array(rows, int).reshape(len(rows), longest).T


def padded_states(sizes: Iterable[int]) -> np.ndarray:
    """Per variable its states, and the first one again up to the most that any has."""
    counts = np.array(list(sizes), int)
    states = np.arange(counts.max(initial=0))
    return np.where(states < counts[:, None], states, 0)


def alike(edges: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
    """The places of these messages in groups of similar size; one group where all are small. rows, columns: states of the
    ends of each."""
    if len(edges) * rows.max(initial=0) * columns.max(initial=0) <= FEW:
        return [np.arange(len(edges))] if len(edges) else []
    kinds: dict[tuple[int, int], list[int]] = {}
    for i, (n, m) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        kinds.setdefault(((n - 1).bit_length(), (m - 1).bit_length()), []).append(i)
    return [np.array(places) for places in kinds.values()]
