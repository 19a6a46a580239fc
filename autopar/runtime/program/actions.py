"""Action tables: what every group of ranks does in one step, in order, and how rows that wait for each other are played.

A *stage* is a run of the program's calls on a mesh; a *group* is the ranks that run one stage, or several (interleaved
schedules give every group V of them). An action is F (forward), B (backward: of everything, or of the inputs alone
where the schedule has W) or W (weight gradients) of one microbatch on one stage:

    group 0   F0.0 F1.0 B0.0 F2.0 B1.0 B2.0          kind, microbatch, stage
    group 1   F0.1 B0.1 F1.1 B1.1 F2.1 B2.1

    F of a stage reads F of every stage that feeds it,
    B                  B of every stage that returns it a gradient, and its own F,
    W                  its own B
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ..errors import RuntimeProgramError


class Action(NamedTuple):
    """One piece of work: kind F, B or W, of one microbatch, on one stage."""

    kind: str
    microbatch: int
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.stage}"


class UnreadableRow(RuntimeProgramError, ValueError):
    """A row of a table has a word that is no action."""


_NUMBER = re.compile("[0-9]{1,7}")


def parse_row(text: str) -> tuple[Action, ...]:
    """`F0.0 F1.0 B0.0 …` as actions. Raises UnreadableRow."""
    row = []
    for word in text.split():
        microbatch, _, stage = word[1:].partition(".")
        if word[0] not in "FBW" or not _NUMBER.fullmatch(microbatch) or not _NUMBER.fullmatch(stage):
            raise UnreadableRow(
                f"{word!r} is no action; write F, B or W, a microbatch, a dot and a stage, such as F3.1"
            )
        row.append(Action(word[0], int(microbatch), int(stage)))
    return tuple(row)


def splits_backward(rows: Iterable[Iterable[Action]]) -> bool:
    """Whether B and W are apart in any of these rows."""
    return any(action.kind == "W" for row in rows for action in row)


Item = tuple[Hashable, int, int]
"""(kind, microbatch, stage): an action, or what else stands in a row."""
Reads = Mapping[tuple[Hashable, int], Sequence[tuple[Hashable, int, int]]]
"""By (kind, stage) of an item the (kind, stage) of all that it reads, of the same microbatch, and the number of the link that it
comes over (-1: of none, as its own group has it)."""
Played = TypeVar("Played", bound=Item)


def action_reads(
    groups: Sequence[Sequence[int]], feeds: Mapping[int, Sequence[int]], returns: Mapping[int, Sequence[int]]
) -> tuple[Reads, tuple[tuple[int, int], ...]]:
    """The reads of actions, and the links between stages of different groups: (sending stage, receiving stage).

    groups[g]: its stages. feeds, returns: by stage those whose values it reads, and those that send it gradients.
    """
    owner = {stage: group for group, stages in enumerate(groups) for stage in stages}
    links: dict[tuple[int, int], int] = {}
    reads: dict[tuple[Hashable, int], list[tuple[Hashable, int, int]]] = {}
    for s in sorted(owner):
        for kind, sources in (("F", feeds[s]), ("B", returns[s])):
            reads[kind, s] = [
                (kind, u, links.setdefault((u, s), len(links)) if owner[u] != owner[s] else -1) for u in sources
            ]
        reads["B", s].append(("F", s, -1))
        reads["W", s] = [("B", s, -1)]
    return reads, tuple(links)


class Stuck(NamedTuple):
    """A row that never ends: it waits at a place for an item."""

    row: int
    place: int
    missing: Item


@dataclass(frozen=True)
class Replay(Generic[Played]):
    """The items of rows, every one after all that it reads.

    row[n]: that item[n] is of; previous[n]: the item before it there (-1: none); arrivals[n]: (item, link) of all that it reads
    over a link. stuck: the rows that do not end.
    """

    item: Sequence[Played]
    row: Sequence[int]
    previous: Sequence[int]
    arrivals: Sequence[Sequence[tuple[int, int]]]
    stuck: Sequence[Stuck]

    def ends_s(self, seconds: Iterable[float], link_s: Sequence[float]) -> list[float]:
        """When every item ends, if each starts as soon as its row and its arrivals let it. seconds: of every item."""
        ends: list[float] = []
        append = ends.append
        for own_s, previous, arrivals in zip(seconds, self.previous, self.arrivals, strict=True):
            start = ends[previous] if previous >= 0 else 0.0
            for source, link in arrivals:
                arrived = ends[source] + link_s[link]
                if arrived > start:
                    start = arrived
            append(start + own_s)
        return ends


def replay(rows: Sequence[Sequence[Played]], reads: Reads) -> Replay[Played]:
    """Walk every row as far as all that its items read is there, until all have ended or nothing moves. An item is there once."""
    items: list[Played] = []
    row_of: list[int] = []
    previous: list[int] = []
    arrivals: list[tuple[tuple[int, int], ...]] = []
    done: dict[Item, int] = {}
    waiting: dict[Item, list[int]] = {}
    stuck: dict[int, Stuck] = {}
    place, last, ready = [0] * len(rows), [-1] * len(rows), list(range(len(rows)))
    while ready:
        number = ready.pop()
        row, before, missing = rows[number], last[number], None
        for at in range(place[number], len(row)):
            item = row[at]
            kind, microbatch, stage = item
            arrived = []
            for read_kind, read_stage, link in reads[kind, stage]:
                read = read_kind, microbatch, read_stage
                source = done.get(read)
                if source is None:
                    missing = read
                    break
                if link >= 0:
                    arrived.append((source, link))
            if missing is not None:
                waiting.setdefault(missing, []).append(number)
                place[number], last[number] = at, before
                stuck[number] = Stuck(number, at, missing)
                break
            previous.append(before)
            done[item] = before = len(items)
            items.append(item)
            row_of.append(number)
            arrivals.append(tuple(arrived))
            if item in waiting:
                ready.extend(waiting.pop(item))
        else:
            stuck.pop(number, None)
    return Replay(items, row_of, previous, arrivals, [stuck[number] for number in sorted(stuck)])
