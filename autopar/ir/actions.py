"""Stages of a pipeline: which groups run them, and which feed which. What groups do with them, in order, is a table of actions
(`autopar.runtime.program.actions`).

Stages depend on each other as the program's values do: a chain in most models, any DAG with skips or branches. Times
are not part of a table; `autopar.costmodel.simulate` adds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from autopar.runtime.data.fields import Length, Stage
from autopar.runtime.program.actions import Action, Reads, action_reads, parse_row, splits_backward

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
    def reads(self) -> tuple[Reads, tuple[tuple[int, int], ...]]:
        """The reads of actions, and the links between stages of different groups."""
        return action_reads(self.groups, self.feeds, self.returns)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Per stage the edges on the longest path to an end: p-1 … 0 in a chain."""
        found = [0] * self.stages
        for u, v in sorted(self.edges, key=lambda e: -e[0]):
            found[u] = max(found[u], found[v] + 1)
        return tuple(found)


def show_row(row: Iterable[Action]) -> str:
    """`F0.0 F1.0 B0.0 …`."""
    return " ".join(map(str, row))


__all__ = ["Action", "StageGraph", "Table", "parse_row", "show_row", "splits_backward"]
