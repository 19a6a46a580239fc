"""Whether ranks send the same messages in the same order: a running hash per group, kept at all times.

    hash of a group  <-  hash(hash of the group, kind, reduction, shape, dtype and site of the message)

All members of a group must come to the same number; of a message between two ranks, both of them. Where a rank takes another
path through the program, its messages may still fit those of the others, and then nothing hangs and the numbers are wrong. So
ranks say their hashes with their beats, as they were when a turn (a step, or a forward) ended: a *mark*. Marks are at turns that
divide by a power of two, about as far apart as beats, so that two ranks that are asked at different moments have one in common.

Where marks differ, or a run hangs, the last messages say what the first difference is. They are compared by their place in
their turn: a rank that left one out differs there, and not ever after.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_MARKS = 4
_MASK = (1 << 52) - 1
Marks = Mapping[str, Mapping[str, int]]
"""Hash by group, by turn (as text: JSON has no other keys)."""


@dataclass(frozen=True)
class Row:
    """A message that a rank has started: the place-th of its group in a turn. hash: of the message alone."""

    group: str
    turn: int
    place: int
    hash: int
    what: str


@dataclass(frozen=True)
class Difference:
    """The first message that differs. ranks: those that most of the group are not like (of two ranks, both)."""

    ranks: tuple[int, ...]
    group: str
    turn: int
    text: str


def stable_hash(value: Any) -> int:
    """A hash of the text of a value, the same in every process."""
    found = 0xCBF29CE484222325
    for byte in repr(value).encode():
        found = (found ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return found & _MASK


class MessageOrder:
    """The running hashes of one rank. apart_s: between two marks, at least."""

    def __init__(self, apart_s: float = 1.0) -> None:
        self.apart_s = apart_s
        self.turn = 0
        self.hashes: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._every = 1
        self._marked_at = time.monotonic()
        self._marks: deque[tuple[int, dict[str, int]]] = deque(maxlen=KEPT_MARKS)

    def note(self, group: str, own_hash: int) -> int:
        """A message starts in a group; its place in this turn."""
        self.hashes[group] = (self.hashes.get(group, 0) * 1000003 ^ own_hash) & _MASK
        place = self._counts.get(group, -1) + 1
        self._counts[group] = place
        return place

    def end_turn(self) -> None:
        """All messages of a turn have been started."""
        self.turn += 1
        self._counts.clear()
        if self.turn % self._every == 0:
            now = time.monotonic()
            if now - self._marked_at < self.apart_s:
                self._every *= 2
            self._marked_at = now
            self._marks.append((self.turn, dict(self.hashes)))

    def marks(self) -> dict[str, dict[str, int]]:
        """The last marks."""
        return {str(turn): hashes for turn, hashes in list(self._marks)}


def differing_group(own: Marks, other: Marks) -> str:
    """A group whose hashes differ at a mark that both have; empty where there is none."""
    for turn in own.keys() & other.keys():
        for group in own[turn].keys() & other[turn].keys():
            if own[turn][group] != other[turn][group]:
                return group
    return ""


def first_difference(rows: Mapping[int, Sequence[Row]], turns: Mapping[int, int]) -> Difference | None:
    """The first message that members of a group do not have alike. rows: the last messages by rank, in order; turns: which
    turn a rank is in. Where several groups differ in that turn, the ranks that all of them name."""
    by_group: dict[str, dict[int, list[Row]]] = {}
    for rank, own in rows.items():
        for row in own:
            by_group.setdefault(row.group, {}).setdefault(rank, []).append(row)
    found = [one for group in by_group if (one := _in_group(group, by_group, turns)) is not None]
    if not found:
        return None
    turn = min(one.turn for one in found)
    first = [one for one in found if one.turn == turn]
    common = set.intersection(*(set(one.ranks) for one in first))
    shown = min(first, key=lambda one: len(one.ranks))
    return Difference(tuple(sorted(common)) or shown.ranks, shown.group, turn, shown.text)


def marked_difference(marks: Mapping[int, Marks]) -> Difference | None:
    """The first mark at which members of a group differ, where their last messages no longer say in what. marks: by rank."""
    by_mark: dict[tuple[int, str], dict[int, int]] = {}
    for rank, own in marks.items():
        for mark, hashes in own.items():
            for group, one in hashes.items():
                by_mark.setdefault((int(mark), group), {})[rank] = one
    for (turn, group), said in sorted(by_mark.items()):
        odd = odd_ones(said)
        if odd:
            return Difference(
                tuple(odd), group, turn, f"at the end of turn {turn} the hash of group {group} is another"
            )
    return None


def odd_ones(said: Mapping[int, Any]) -> list[int]:
    """The ranks that did not say what most did; all, where none is said by most."""
    counts = Counter(said.values()).most_common(2)
    tied = len(counts) > 1 and counts[0][1] == counts[1][1]
    return sorted(rank for rank, value in said.items() if tied or value != counts[0][0]) if len(counts) > 1 else []


def _in_group(
    group: str, by_group: Mapping[str, Mapping[int, Sequence[Row]]], turns: Mapping[int, int]
) -> Difference | None:
    members = by_group[group]
    if len(members) < 2:
        return None
    by_place = {rank: {(row.turn, row.place): row for row in own} for rank, own in members.items()}
    start = max(min(places) for places in by_place.values())
    for place in sorted(set().union(*by_place.values())):
        if place < start:
            continue
        said: dict[int, Row | None] = {rank: places.get(place) for rank, places in by_place.items()}
        said = {rank: row for rank, row in said.items() if row is not None or turns[rank] > place[0]}
        odd = odd_ones({rank: row and row.hash for rank, row in said.items()})
        if odd:
            elsewhere = _hashes_beside(group, by_group, place)
            odd = [rank for rank in odd if (row := said[rank]) is None or row.hash not in elsewhere] or odd
            others = [rank for rank in said if rank not in odd]
            shown = [*odd[:3], *others[:1]]
            calls = "; ".join(f"rank {rank} calls {row.what if (row := said[rank]) else 'nothing'}" for rank in shown)
            return Difference(tuple(odd), group, place[0], f"message {place[1] + 1} of group {group}: {calls}")
    return None


def _hashes_beside(group: str, by_group: Mapping[str, Mapping[int, Sequence[Row]]], place: tuple[int, int]) -> set[int]:
    """The hashes of the messages that ranks of other groups along the same axes sent at a place of a turn: ranks of one
    stage run the same lines."""
    axes = group.partition(" (")[0]
    beside = [members for name, members in by_group.items() if name != group and name.partition(" (")[0] == axes]
    return {row.hash for members in beside for own in members.values() for row in own if (row.turn, row.place) == place}
