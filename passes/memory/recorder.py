"""A machine that notes all that happens to its storages: made, freed, and what a line needs beside them for a moment."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.lines import Line
from autopar.passes.memory.tape import Machine


@dataclass(frozen=True)
class Made:
    """A storage of the device was made by a line (None: it came from another stage)."""

    storage: int
    nbytes: int
    line: Line | None


@dataclass(frozen=True)
class Freed:
    """Nobody holds a storage of the device any more."""

    storage: int


@dataclass(frozen=True)
class Needed:
    """Bytes that a line needs for a moment beside what is alive."""

    nbytes: int
    line: Line | None


@dataclass(frozen=True)
class Handed:
    """A gradient went to the store; gradient: its place among those of the action."""

    gradient: int


Recorded = Made | Freed | Needed | Handed


class Recorder(Machine):
    """happened: since it was emptied last, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[Recorded] = []

    def new(self, nbytes: int) -> int:
        block = super().new(nbytes)
        self.happened.append(Made(block, nbytes, self.line))
        return block

    def drop(self, block: int) -> None:
        super().drop(block)
        if block >= 0 and self.refs[block] == 0 and block not in self.tier:
            self.happened.append(Freed(block))

    def peak(self, nbytes: int) -> None:
        super().peak(nbytes)
        if nbytes > 0:
            self.happened.append(Needed(nbytes, self.line))


def results_first(happened: list[Recorded]) -> list[Recorded]:
    """The same where a line's results, which are among the bytes that it needs, are made before the rest of these."""
    ordered: list[Recorded] = []
    waiting: Needed | None = None
    left = 0
    for one in happened:
        if waiting is not None and isinstance(one, Made) and one.nbytes <= left:
            left -= one.nbytes
            ordered.append(one)
            continue
        if waiting is not None and left:
            ordered.append(Needed(left, waiting.line))
        waiting, left = (one, one.nbytes) if isinstance(one, Needed) else (None, 0)
        if waiting is None:
            ordered.append(one)
    return ordered + ([Needed(left, waiting.line)] if waiting is not None and left else [])
