"""Messages of all ranks held against each other: same order, same sizes, both ends, and nobody waits for ever.

A unit is one NCCL kernel: a collective, or a batch of sends and receives that go out as one. Units of one communicator run one
after another on the group's own stream. A unit starts when those before it in that stream have ended, and those of other
groups that its stream waited for (`needs`); it ends when all its partners have started: for a collective the one of the same
number on every member, for the n-th send from a to b the n-th receive of b from a. Where ranks block the host (as NCCL does
when it connects, or under CUDA_LAUNCH_BLOCKING), all units of a rank run one after another.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.gpu.simulation.findings import Finding, Place

Id = tuple[int, int]
"""A unit: its rank and its number there."""


@dataclass(frozen=True, slots=True)
class End:
    """One end of a message between two ranks. peer: the other one, by its number in the job."""

    kind: str
    peer: int
    numel: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} {'to' if self.kind == 'send' else 'from'} rank {self.peer}, {self.numel} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Unit:
    """group: name of the communicator, whose ranks are members; number: of the unit on its rank; kind: of a collective, "p2p"
    for a batch of ends; signature: what members have alike; needs: by group, how many of its units end before this one starts;
    sent, received: of an exchange, elements by member."""

    group: str
    members: tuple[int, ...]
    number: int
    kind: str
    signature: tuple[object, ...]
    place: Place
    ends: tuple[End, ...] = ()
    needs: Mapping[str, int] = field(default_factory=dict)
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.ends:
            return "; ".join(map(str, self.ends))
        return f"{self.kind} {self.signature} over {list(self.members)}"


@dataclass(frozen=True)
class RankLog:
    """The messages of one rank. groups: members of the groups that it made, in order."""

    rank: int
    units: Sequence[Unit]
    groups: Sequence[tuple[int, ...]] = ()


def compared(logs: Sequence[RankLog]) -> list[Finding]:
    """The faults of all ranks' messages together; deadlocks are only looked for where the rest is right."""
    findings = [*_groups(logs), *_collectives(logs), *_pairs(logs)]
    return findings or [*stuck(logs), *stuck(logs, blocking=True)]


def _groups(logs: Sequence[RankLog]) -> Iterator[Finding]:
    for log in logs[1:]:
        for at, (own, first) in enumerate(zip(log.groups, logs[0].groups, strict=False)):
            if own != first:
                yield Finding("order", log.rank, f"group {at} is {list(own)}, that of rank 0 is {list(first)}")
                break
        else:
            if len(log.groups) != len(logs[0].groups):
                yield Finding("order", log.rank, f"{len(log.groups)} groups are made, {len(logs[0].groups)} by rank 0")


def _collectives(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """Members of a group start the same collectives in the same order."""
    by_group: dict[str, dict[int, list[Unit]]] = defaultdict(dict)
    for log in logs:
        for unit in log.units:
            if unit.kind != "p2p":
                by_group[unit.group].setdefault(log.rank, []).append(unit)
    for own in by_group.values():
        members = next(iter(own.values()))[0].members
        first = own.get(members[0], [])
        for rank in members[1:]:
            yield from _alike(members[0], first, rank, own.get(rank, []))
        yield from _exchanged(members, [own.get(rank, []) for rank in members])


def _exchanged(members: Sequence[int], rows: Sequence[Sequence[Unit]]) -> Iterator[Finding]:
    """Every member sends to every other what that one expects. rows: the collectives of each member."""
    for units in zip(*rows, strict=False):
        if not all(unit.sent for unit in units):
            continue
        for (a, one), (b, other) in itertools.permutations(enumerate(units), 2):
            if one.sent[b] != other.received[a]:
                what = f"rank {members[a]} sends {one.sent[b]} elements to rank {members[b]}, which expects {other.received[a]}"
                yield Finding("shape", members[a], what, (one.place, other.place))
                return


def _alike(first_rank: int, first: Sequence[Unit], rank: int, own: Sequence[Unit]) -> Iterator[Finding]:
    for one, other in zip(first, own, strict=False):
        places = (one.place, other.place)
        if one.kind != other.kind:
            yield Finding("order", rank, f"rank {first_rank} starts {one}, rank {rank} {other}", places)
            return
        if one.signature != other.signature:
            yield Finding("signature", rank, f"rank {first_rank} starts {one}, rank {rank} {other}", places)
            return
    if len(first) != len(own):
        more, ranks = (first, first_rank) if len(first) > len(own) else (own, rank)
        unit = more[min(len(first), len(own))]
        yield Finding("order", ranks, f"{unit} is started by rank {ranks} alone", (unit.place,))


def _pairs(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """Sends meet receives of the same size and dtype, pair by pair in order."""
    sent, received = _by_pair(logs, "send"), _by_pair(logs, "recv")
    for pair in sorted({*sent, *received}):
        out, into = sent.get(pair, []), received.get(pair, [])
        for (unit, end), (other, meets) in zip(out, into, strict=False):
            if (end.numel, end.dtype) != (meets.numel, meets.dtype):
                what = (
                    f"rank {pair[1]} sends {end.numel} {end.dtype}, rank {pair[2]} receives {meets.numel} {meets.dtype}"
                )
                yield Finding("shape", pair[1], what, (unit.place, other.place))
                break
        for unit, end in (out if len(out) > len(into) else into)[min(len(out), len(into)) :][:1]:
            yield Finding("unmatched", pair[1] if end.kind == "send" else pair[2], str(end), (unit.place,))


def _by_pair(logs: Sequence[RankLog], kind: str) -> dict[tuple[str, int, int], list[tuple[Unit, End]]]:
    """The ends of one kind by group, sender and receiver, in order."""
    found: dict[tuple[str, int, int], list[tuple[Unit, End]]] = defaultdict(list)
    for log in logs:
        for unit in log.units:
            for end in unit.ends:
                if end.kind == kind:
                    pair = (log.rank, end.peer) if kind == "send" else (end.peer, log.rank)
                    found[unit.group, *pair].append((unit, end))
    return found


def stuck(logs: Sequence[RankLog], blocking: bool = False) -> list[Finding]:
    """The first unit of every rank that never ends, where there are any. blocking: every unit waits for the one before it."""
    units = {(log.rank, unit.number): unit for log in logs for unit in log.units}
    before = {key: earlier for log in logs for key, earlier in _before(log, blocking).items()}
    partners = _partners(logs)
    started: set[Id] = set()
    ended: set[Id] = set()
    waiting = list(units)
    moved = True
    while moved:
        for key in waiting:
            if key not in started and all(one in ended for one in before[key]):
                started.add(key)
        now = [key for key in waiting if key in started and partners[key] <= started]
        ended.update(now)
        waiting = [key for key in waiting if key not in ended]
        moved = bool(now)
    firsts: dict[int, Id] = {}
    for rank, number in sorted(waiting):
        firsts.setdefault(rank, (rank, number))
    how = "hosts that block" if blocking else "streams"
    return [
        Finding("deadlock", rank, f"with {how}, this never ends: {units[key]}", (units[key].place,))
        for rank, key in firsts.items()
    ]


def _before(log: RankLog, blocking: bool) -> dict[Id, list[Id]]:
    """By unit, those of the same rank that end before it starts."""
    by_group: dict[str, list[int]] = defaultdict(list)
    found: dict[Id, list[Id]] = {}
    last: int | None = None
    for unit in log.units:
        earlier = [by_group[group][count - 1] for group, count in unit.needs.items() if count]
        earlier += by_group[unit.group][-1:]
        if blocking and last is not None:
            earlier.append(last)
        found[log.rank, unit.number] = [(log.rank, number) for number in earlier]
        by_group[unit.group].append(unit.number)
        last = unit.number
    return found


def _partners(logs: Sequence[RankLog]) -> dict[Id, set[Id]]:
    """By unit, those of other ranks that have to start before it can end."""
    found: dict[Id, set[Id]] = {(log.rank, unit.number): set() for log in logs for unit in log.units}
    rows: dict[tuple[str, int], list[Id]] = defaultdict(list)
    for log in logs:
        counts: dict[str, int] = defaultdict(int)
        for unit in log.units:
            if unit.kind != "p2p":
                rows[unit.group, counts[unit.group]].append((log.rank, unit.number))
                counts[unit.group] += 1
    for row in rows.values():
        for key in row:
            found[key].update(row)
    sent, received = _by_pair(logs, "send"), _by_pair(logs, "recv")
    for pair, ends in sent.items():
        for (unit, _), (other, _) in zip(ends, received.get(pair, []), strict=False):
            found[pair[1], unit.number].add((pair[2], other.number))
            found[pair[2], other.number].add((pair[1], unit.number))
    return found
