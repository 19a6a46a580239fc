"""Find what repeats in a sequence of marked texts: runs of rounds that are alike but for numbers that grow evenly.

Two texts are alike if their shapes are; of the rounds of a run every number makes an arithmetic progression:

    f(0, 'a.0'), g(5), f(1, 'a.1'), g(5), f(2, 'a.2'), g(5)      Run(start=0, period=2, count=3)

From left to right the run is taken that leaves out most; its rounds begin, where they can, at the item of lowest rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub

from autopar.codegen.marks import Shape

_MOST_PERIODS = 32


@dataclass(frozen=True)
class Run:
    """`count` rounds of `period` items each, from `start` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    def rounds(self, place: int) -> range:
        """Where the item at a place of the period stands, round by round."""
        return range(self.start + place, self.end, self.period)


def runs(
    shapes: Sequence[Shape], worth: Callable[[Run], bool], rank: Callable[[int], int] = lambda item: 0
) -> list[Run]:
    """The runs that are worth a loop, in order; they do not overlap."""
    places: dict[str, list[int]] = {}
    for i, (text, _) in enumerate(shapes):
        places.setdefault(text, []).append(i)
    chosen: list[Run] = []
    ends: dict[int, int] = {}
    start = 0
    while start < len(shapes):
        alike = places[shapes[start][0]]
        after = bisect_right(alike, start)
        best, best_end = None, start
        for again in alike[after : after + _MOST_PERIODS]:
            period = again - start
            if best is not None and period % best.period == 0 and again < best_end:
                continue
            end = _repeats_until(shapes, start, period, ends)
            run = Run(start, period, (end - start) // period)
            if run.count > 1 and worth(run) and (best is None or _left_out(run) > _left_out(best) * _times(best, run)):
                best, best_end = run, end
        if best is not None:
            starts = range(start, start + best_end - best.end + 1)
            best = Run(min(starts, key=rank), best.period, best.count)
            chosen.append(best)
        start = start + 1 if best is None else best.end
    return chosen


def _left_out(run: Run) -> int:
    return run.period * (run.count - 1)


def _times(inner: Run, outer: Run) -> int:
    """How often a run would be found, each time anew, if not as part of another."""
    return outer.count if outer.period >= inner.period * inner.count else 1


def _repeats_until(shapes: Sequence[Shape], start: int, period: int, ends: dict[int, int]) -> int:
    """The end of what repeats with a period from `start` on. ends: by period what was found for an earlier start, and is from now
    on: up to there items need not be looked at again."""
    i = max(start + period, ends.get(period, 0))
    while i < len(shapes) and shapes[i][0] == shapes[i - period][0]:
        if i >= start + 2 * period and _growth(shapes, i, period) != _growth(shapes, i - period, period):
            break
        i += 1
    ends[period] = i
    return i


def _growth(shapes: Sequence[Shape], i: int, period: int) -> list[int]:
    return list(map(sub, shapes[i][1], shapes[i - period][1]))


@dataclass(frozen=True)
class Progression:
    """first, first + step, first + 2 step, …"""

    first: int
    step: int

    @staticmethod
    def of(values: Sequence[int]) -> Progression | None:
        """The progression that two or more values make, if they make one."""
        step = values[1] - values[0]
        return Progression(values[0], step) if all(b - a == step for a, b in pairwise(values)) else None

    def range(self, count: int) -> str:
        """The first `count` of them, as a range in Python."""
        last = self.first + self.step * (count - 1)
        if self.step == -1:
            return f"reversed({Progression(last, 1).range(count)})"
        start = f"{self.first}, " if self.first or self.step != 1 else ""
        return f"range({start}{last + self.step}{f', {self.step}' if self.step != 1 else ''})"


@dataclass(frozen=True)
class Variable:
    """The variable of a loop, and what it goes through."""

    name: str
    values: Progression
    count: int

    @staticmethod
    def choose(name: str, count: int, numbers: Iterable[Progression]) -> Variable:
        """The variable goes through what most of the numbers that vary go through, if all others are whole multiples of that."""
        often = Counter(p for p in numbers if p.step)
        for values, _ in often.most_common():
            if all(p.step % values.step == 0 for p in often):
                return Variable(name, values, count)
        return Variable(name, Progression(0, 1), count)

    @property
    def header(self) -> str:
        return f"for {self.name} in {self.values.range(self.count)}"

    def value(self, turn: int) -> int:
        """The variable's value in a round; -1: in the last."""
        return self.values.first + self.values.step * (turn % self.count)

    def expression(self, number: Progression) -> str | None:
        """A number that varies with it (None: one that does not)."""
        if not number.step:
            return None
        factor = number.step // self.values.step
        rest = number.first - factor * self.values.first
        if factor == -1:
            return f"{rest} - {self.name}"
        scaled = self.name if factor == 1 else f"{factor} * {self.name}"
        return f"{scaled} {'+' if rest > 0 else '-'} {abs(rest)}" if rest else scaled

    def expressions(self, first: Shape, second: Shape) -> list[str | None]:
        """The numbers of a text, from its first two rounds."""
        return [self.expression(p) for p in progressions(first, second)]


def progressions(first: Shape, second: Shape) -> list[Progression]:
    """The progressions of the numbers of a text over the rounds, from its first two."""
    return [Progression(a, b - a) for a, b in zip(first[1], second[1], strict=True)]
