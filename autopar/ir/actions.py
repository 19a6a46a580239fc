"""Action tables: what every group of ranks does in one step, in order.

A *stage* is a run of the program's calls on a mesh; a *group* is the ranks that run one stage, or several (interleaved
schedules give every group V of them). An action is F (forward), B (backward: of everything, or of the inputs alone
where the schedule has W) or W (weight gradients) of one microbatch on one stage:

    group 0   F0.0 F1.0 B0.0 F2.0 B1.0 B2.0          kind, microbatch, stage
    group 1   F0.1 B0.1 F1.1 B1.1 F2.1 B2.1

Stages depend on each other as the program's values do: a chain in most models, any DAG with skips or branches. Times
are not part of a table; `autopar.costmodel.simulate` adds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from autopar.runtime.data.fields import Length, Stage


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work: kind F, B or W, of one microbatch, on one stage."""

    kind: str
    microbatch: int
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.stage}"


_NUMBER = re.compile("[0-9]{1,7}")

Table = tuple[tuple[Action, ...], ...]
"""One row of actions per group."""


@dataclass(frozen=True)
class StageGraph:
    """Which stages each group runs, and which stages feed which.

    groups[g]: stages of group g in program order. edges: (u, v) where v reads a value of u; u < v. gradients: the edges
    along which a gradient comes back (None: all of them).
    """

    groups: Annotated[tuple[Annotated[tuple[Stage, ...], Length(1)], ...], Length(1)]
    edges: tuple[tuple[Stage, Stage], ...]
    gradients: tuple[tuple[Stage, Stage], ...] | None = None

    @staticmethod
    def chain(p: int, V: int = 1, shape: str = "loop") -> StageGraph:
        """p groups of V stages in a chain: "loop" gives group g the stages g, g+p, …; "v" (V=2) g and 2p-1-g."""
        groups: tuple[tuple[int, ...], ...]
        if shape == "v":
            groups = tuple((g, 2 * p - 1 - g) for g in range(p))
        else:
            groups = tuple(tuple(range(g, p * V, p)) for g in range(p))
        return StageGraph(groups, tuple((s, s + 1) for s in range(sum(map(len, groups)) - 1)))

    @cached_property
    def stages(self) -> int:
        return sum(len(g) for g in self.groups)

    @cached_property
    def group_of(self) -> dict[int, int]:
        return {s: g for g, stages in enumerate(self.groups) for s in stages}

    @cached_property
    def feeds(self) -> dict[int, tuple[int, ...]]:
        """Stages whose values a stage reads."""
        return {s: tuple(sorted(u for u, v in self.edges if v == s)) for s in range(self.stages)}

    @cached_property
    def returns(self) -> dict[int, tuple[int, ...]]:
        """Stages that send a stage gradients."""
        edges = self.edges if self.gradients is None else self.gradients
        return {s: tuple(sorted(v for u, v in edges if u == s)) for s in range(self.stages)}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Stages that read a stage's values: the inverse of `feeds`."""
        return {s: tuple(sorted(v for u, v in self.edges if u == s)) for s in range(self.stages)}

    @cached_property
    def credits(self) -> dict[int, tuple[int, ...]]:
        """Stages that a stage sends gradients: the inverse of `returns`."""
        edges = self.edges if self.gradients is None else self.gradients
        return {s: tuple(sorted(u for u, v in edges if v == s)) for s in range(self.stages)}

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Per stage the edges on the longest path to an end: p-1 … 0 in a chain."""
        found = [0] * self.stages
        for u, v in sorted(self.edges, key=lambda e: -e[0]):
            found[u] = max(found[u], found[v] + 1)
        return tuple(found)


def splits_backward(rows: Iterable[Iterable[Action]]) -> bool:
    """Whether B and W are apart in any of these rows."""
    return any(action.kind == "W" for row in rows for action in row)


def show_row(row: Iterable[Action]) -> str:
    """`F0.0 F1.0 B0.0 …`."""
    return " ".join(map(str, row))


def parse_row(text: str) -> tuple[Action, ...]:
    """Inverse of `show_row`. Raises ValueError for a word that is no action."""
    row = []
    for word in text.split():
        microbatch, _, stage = word[1:].partition(".")
        if word[0] not in "FBW" or not _NUMBER.fullmatch(microbatch) or not _NUMBER.fullmatch(stage):
            raise ValueError(f"{word!r} is no action; write F, B or W, a microbatch, a dot and a stage, such as F3.1")
        row.append(Action(word[0], int(microbatch), int(stage)))
    return tuple(row)
