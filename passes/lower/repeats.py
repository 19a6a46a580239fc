"""A program whose equal layers follow each other, with fewer of them.

What lowering writes for a call depends on its template, on how its parameters and inputs rest, and on who else reads these.
In a run of periods (a layer, or several) that are alike in all of that, only those near the run's ends differ: where the
periods read values from up to r periods before, the first r + 1 and the last r + 1. So these are kept with one between
them, which stands for all that are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir.program import Program, ValueRef

_LONGEST = 8
"""Calls of a period, at most."""


@dataclass(frozen=True)
class Shortened:
    """stands_for: per call of the whole program the call of this one that is lowered like it. alike: parameters that are left
    out, each with the one that stands for it."""

    program: Program
    stands_for: tuple[int, ...]
    alike: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _Run:
    """Calls from `first` on that repeat every `period` calls, `times` times; kept: periods at either end."""

    first: int
    period: int
    times: int
    kept: int

    @property
    def end(self) -> int:
        return self.first + self.times * self.period

    @property
    def tail(self) -> int:
        """The first call of the periods that are kept at the end."""
        return self.end - self.kept * self.period

    @property
    def left_out(self) -> range:
        return range(self.first + (self.kept + 1) * self.period, self.tail)


def whole(program: Program) -> Shortened:
    """The program as it is."""
    return Shortened(program, tuple(range(len(program.calls))))


def shortened(program: Program, kind: Callable[[str], Hashable]) -> Shortened:
    """A whole program with runs of equal layers cut short. kind: of a parameter; those of another kind are not alike."""
    runs = _Repeats(program, kind).runs()
    if not runs:
        return whole(program)
    shift = {i: len(run.left_out) for run in runs for i in run.left_out}
    middle = {i: run.first + run.kept * run.period + (i - run.first) % run.period for run in runs for i in run.left_out}
    kept = [i for i in range(len(program.calls)) if i not in shift]
    place = {i: k for k, i in enumerate(kept)}

    def moved(ref: ValueRef) -> ValueRef:
        return replace(ref, index=place[ref.index - shift.get(ref.index, 0)]) if ref.kind == "call" else ref

    calls = tuple(replace(call, inputs=tuple(map(moved, call.inputs))) for call in (program.calls[i] for i in kept))
    stays = {name for call in calls for name in call.params}
    alike = {
        name: other
        for i, k in middle.items()
        for name, other in zip(program.calls[i].params, program.calls[k].params, strict=True)
        if name not in stays
    }
    short = replace(
        program,
        calls=calls,
        parameters={name: p for name, p in program.parameters.items() if name not in alike},
        outputs=tuple(map(moved, program.outputs)),
        buffer_updates={name: moved(ref) for name, ref in program.buffer_updates.items()},
    )
    stands_for = tuple(place[middle.get(i, i)] for i in range(len(program.calls)))
    return Shortened(short, stands_for, tuple(alike.items()))


class _Repeats:
    """Which calls of a whole program are alike."""

    def __init__(self, program: Program, kind: Callable[[str], Hashable]) -> None:
        self.program, self.calls = program, program.calls
        self.kinds = {name: kind(name) for name in program.parameters}

    def runs(self) -> list[_Run]:
        """Runs in which something is left out, from the first call to the last."""
        runs: list[_Run] = []
        start = 0
        while start < len(self.calls):
            candidates = (self._run(start, period) for period in range(1, _LONGEST + 1))
            run = next((run for run in candidates if run is not None), None)
            runs += [run] if run is not None else []
            start = run.end if run is not None else start + 1
        return runs

    def _run(self, first: int, period: int) -> _Run | None:
        """The run that starts here, where it is long enough to leave something out."""
        end = first + period
        while end < len(self.calls) and self._alike(end - period, end, first):
            end += 1
        times = (end - first) // period
        back = [
            i - ref.index
            for i in range(first + period, first + times * period)
            for ref, before in zip(self.calls[i].inputs, self.calls[i - period].inputs, strict=True)
            if ref != before
        ]
        run = _Run(first, period, times, 1 + max((-(-distance // period) for distance in back), default=0))
        if not run.left_out or any(self._last_read[i] >= run.end for i in range(first, run.tail)):
            return None
        return run

    def _alike(self, i: int, j: int, first: int) -> bool:
        """Whether call j is to what is around it as call i is; both lie in a run that starts at `first`."""
        a, b = self.calls[i], self.calls[j]
        if a.template != b.template or a.prologue != b.prologue or (i in self._late) != (j in self._late):
            return False
        return all(
            p == q or self._used(p, i) == self._used(q, j) for p, q in zip(a.params, b.params, strict=True)
        ) and all(_same(p, q, first) or _as_far(p, i, q, j) for p, q in zip(a.inputs, b.inputs, strict=True))

    def _used(self, name: str, i: int) -> tuple[object, ...]:
        """A parameter's kind, and which calls use it, as seen from call i."""
        return self.kinds[name], *((call - i, slot) for call, slot in self._uses[name])

    @cached_property
    def _late(self) -> frozenset[int]:
        return self.program.backward_calls

    @cached_property
    def _uses(self) -> dict[str, list[tuple[int, int]]]:
        """(call, slot) of all uses of a parameter."""
        uses: dict[str, list[tuple[int, int]]] = {}
        for i, call in enumerate(self.calls):
            for slot, name in enumerate(call.params):
                uses.setdefault(name, []).append((i, slot))
        return uses

    @cached_property
    def _last_read(self) -> list[int]:
        """Per call the last one that reads a value of it; what leaves the program is read after all."""
        last = [-1] * len(self.calls)
        for i, call in enumerate(self.calls):
            for ref in call.inputs:
                if ref.kind == "call":
                    last[ref.index] = i
        for ref in (*self.program.outputs, *self.program.buffer_updates.values()):
            if ref.kind == "call":
                last[ref.index] = len(self.calls)
        return last


def _same(a: ValueRef, b: ValueRef, first: int) -> bool:
    """Whether two calls of a run that starts at `first` read one value that was there before it."""
    return a == b and (a.kind != "call" or a.index < first)


def _as_far(a: ValueRef, i: int, b: ValueRef, j: int) -> bool:
    """Whether call j reads a value that was made as far back as that which call i reads."""
    return a.kind == b.kind == "call" and a.output == b.output and i - a.index == j - b.index
