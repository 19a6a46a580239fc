"""How the local names of a function are written when some of its lines become loops.

Names that stand at one place of a loop's body, round after round, are written alike. Where no two of them are alive at
once they are one variable; else they are entries of a dict, by the number in which they differ:

    x_1 = f(x_0)            x = f(x)                    y_1, s_1 = f(x)         y, s[i] = f(x)
    x_2 = f(x_1)            (for both i)                y_2, s_2 = f(y_1)       (s_1 and s_2 are returned)

So every value is held from where it was made to where it was deleted, neither shorter nor longer. Where names can be
written in neither way the loop begins a round later, or is none.
"""

from __future__ import annotations

import keyword
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.codegen.repeats import Progression, Run
from autopar.ir.lines import Function

Written = str | tuple[str, Progression]
"""How a place of a loop's body is written: as one name, or as the entries of a dict."""

_NUMBER = re.compile(r"([0-9]+)")
_MOST_PEELED = 2


@dataclass(frozen=True)
class Lives:
    """Where each name is made (-1: an argument) and used last (after all lines: it is returned). names: of every line, what
    it reads and what it makes."""

    names: tuple[tuple[str, ...], ...]
    first: Mapping[str, int]
    last: Mapping[str, int]

    @staticmethod
    def of(function: Function, returned: Collection[str]) -> Lives:
        names = tuple(tuple(n for n in (*line.reads(), *line.outs) if n != "_") for line in function.lines)
        first = {n: i for i, line in reversed(list(enumerate(function.lines))) for n in line.outs}
        last = dict.fromkeys(function.args, -1) | {n: i for i, of_line in enumerate(names) for n in of_line}
        last |= dict.fromkeys(returned, len(names))
        return Lives(names, first, last)

    def made(self, name: str) -> int:
        return self.first.get(name, -1)

    def apart(self, names: Iterable[str]) -> bool:
        """Whether no two of them are alive at once. The line that makes one may be the last that reads another."""
        ordered = sorted(names, key=self.made)
        return all(self.made(a) < self.made(b) and self.last[a] <= self.made(b) for a, b in pairwise(ordered))


@dataclass(frozen=True)
class Storage:
    """plain: what names are written as; entries: of those in dicts, which one and the key."""

    plain: Mapping[str, str]
    entries: Mapping[str, tuple[str, int]]

    @property
    def bases(self) -> list[str]:
        """The dicts."""
        return list(dict.fromkeys(base for base, _ in self.entries.values()))

    def written(self, name: str) -> str:
        if name in self.entries:
            base, key = self.entries[name]
            return f"{base}[{key}]"
        return self.plain.get(name, name)

    def together(self, names: Sequence[str]) -> Written | None:
        """How names at one place, round after round, are written, if there is one way."""
        entries = [self.entries[n] for n in names if n in self.entries]
        if not entries:
            written = set(map(self.written, names))
            return written.pop() if len(written) == 1 else None
        bases = {base for base, _ in entries}
        keys = Progression.of([key for _, key in entries]) if len(entries) > 1 else None
        return (bases.pop(), keys) if keys and len(bases) == 1 and len(entries) == len(names) else None


def store(lives: Lives, runs: Sequence[Run], reserved: Collection[str]) -> tuple[list[Run], Storage]:
    """The runs whose names can be written, begun later where that helps, and how. reserved: names that stand
    for something else."""
    peeled = dict.fromkeys(runs, 0)
    while True:
        storage = _storage(lives, list(peeled), reserved)
        kept = {}
        for run, times in peeled.items():
            if _writable(run, lives, storage):
                kept[run] = times
            elif run.count > 2 and times < _MOST_PEELED:
                kept[replace(run, start=run.start + run.period, count=run.count - 1)] = times + 1
        if kept == peeled:
            return list(kept), storage
        peeled = kept


def _writable(run: Run, lives: Lives, storage: Storage) -> bool:
    """Whether each place is written and deleted in one way, and the same places of a line have the same name in all rounds."""
    for place in range(run.period):
        if len({_equalities(lives.names[i]) for i in run.rounds(place)}) > 1:
            return False
        for names in places(run, lives, place):
            if storage.together(names) is None or death_rounds(run, lives, place, names) is None:
                return False
    return True


def _equalities(names: Sequence[str]) -> tuple[int, ...]:
    return tuple(map(names.index, names))


def places(run: Run, lives: Lives, place: int) -> list[tuple[str, ...]]:
    """The names that stand, round by round, for every name at a line of a run's body."""
    return list(zip(*(lives.names[i] for i in run.rounds(place)), strict=True))


def death_rounds(run: Run, lives: Lives, place: int, names: Sequence[str]) -> str | None:
    """In which rounds the names at one place are used last: "", "all", or all but or only the first or last (None: in others)."""
    dead = [lives.last[name] == i for name, i in zip(names, run.rounds(place), strict=True)]
    if all(dead) or not any(dead):
        return "all" if dead[0] else ""
    for what, turn in (("last", -1), ("first", 0)):
        others = dead[:-1] if turn else dead[1:]
        if dead[turn] and not any(others):
            return f"== {what}"
        if not dead[turn] and all(others):
            return f"!= {what}"
    return None


def _storage(lives: Lives, runs: Sequence[Run], reserved: Collection[str]) -> Storage:
    taken = {*reserved, *lives.last}

    def fresh(stem: str) -> str:
        while stem in taken or keyword.iskeyword(stem):
            stem += "_"
        taken.add(stem)
        return stem

    plain = {name: fresh(name) for name in lives.last if name in reserved}
    entries: dict[str, tuple[str, int]] = {}
    bases: dict[tuple[str, ...], str] = {}
    for names in _kinds(lives, runs):
        if lives.apart(names):
            stem = _stem(sorted(names, key=lives.made)[-2:])
            plain |= dict.fromkeys(names, stem if stem in names else fresh(stem))
        elif (pattern := _pattern(names)) is not None:
            bases[pattern] = ""
    beginnings = tuple(pattern[0] for pattern in bases)
    for name in (name for name in lives.last if name.startswith(beginnings)):
        for place, parts in _numbers(name):
            pattern = (*parts[:place], "", *parts[place + 1 :])
            if pattern in bases and name not in plain and name not in entries:
                bases[pattern] = bases[pattern] or fresh(_tidy(pattern))
                entries[name] = (bases[pattern], int(parts[place]))
    return Storage(plain, entries)


def _kinds(lives: Lives, runs: Sequence[Run]) -> list[list[str]]:
    """The names that are to be written alike, two or more in a list."""
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while (parent := above.setdefault(name, name)) != name:
            above[name] = above[parent]
            name = parent
        return name

    for run in runs:
        for place in range(run.period):
            for names in places(run, lives, place):
                first = top(names[0])
                for other in set(names[1:]):
                    above[top(other)] = first
                    first = top(first)
    kinds = defaultdict(list)
    for name in above:
        kinds[top(name)].append(name)
    return [names for names in kinds.values() if len(names) > 1]


def _numbers(name: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The places of a name's numbers, each with all parts of the name."""
    parts = tuple(_NUMBER.split(name))
    return ((place, parts) for place in range(1, len(parts), 2) if parts[place] == str(int(parts[place])))


def _pattern(names: Sequence[str]) -> tuple[str, ...] | None:
    """The parts of the names without the one number in which they differ, if that is how they differ."""
    common = set.intersection(
        *({(*parts[:place], "", *parts[place + 1 :]) for place, parts in _numbers(name)} for name in names)
    )
    return common.pop() if len(common) == 1 else None


def _stem(names: Sequence[str]) -> str:
    """The part that two names have in common, or else the last of them."""
    pattern = _pattern(names)
    return names[-1] if pattern is None else _tidy(pattern)


def _tidy(pattern: Sequence[str]) -> str:
    return re.sub("__+", "_", "".join(pattern)).strip("_") or "values"
