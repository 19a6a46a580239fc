"""A pipeline as the timed schedulers see it, worked out once for many tables, and a table with its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costmodel.simulate import bubble_spans, link_seconds
from autopar.ir.actions import Action, StageGraph, Table
from autopar.passes.schedule.costs import ActionCosts, MemoryRoom
from autopar.passes.schedule.held import peak_bytes

Step = tuple[str, int, int]
"""(kind, microbatch, stage): an Action before it is one, of which a search makes many and keeps few."""


MAKESPAN_WEIGHT = 1e-3


@dataclass(frozen=True)
class TimedTable:
    """Rows of a table and their time: spans_s[g] from the first start to the last end of a group, makespan_s of all."""

    rows: Sequence[Sequence[Step]]
    spans_s: tuple[float, ...]
    makespan_s: float

    @property
    def score(self) -> float:
        """The zero-bubble paper's cost, the longest span; of tables alike, the one that ends first."""
        return max(self.spans_s) + MAKESPAN_WEIGHT * self.makespan_s

    @property
    def table(self) -> Table:
        """The rows as actions."""
        return tuple(tuple(Action(*step) for step in row) for row in self.rows)


class TimedPipeline:
    """Seconds by stage (f, b, w) and, per stage, what its F and its B wait for: (stage, seconds on the way)."""

    def __init__(self, graph: StageGraph, microbatches: int, costs: ActionCosts, room: MemoryRoom) -> None:
        self.graph, self.m, self.costs, self.room = graph, microbatches, costs, room
        owner = graph.group_of
        self.f, self.b, self.w = ([costs.seconds[s, k] for s in range(graph.stages)] for k in "FBW")

        def priced(sources: dict[int, tuple[int, ...]]) -> list[list[tuple[int, float]]]:
            return [
                [(u, link_seconds([(u, s)], costs.comm_s)[0] if owner[u] != owner[s] else 0.0) for u in sources[s]]
                for s in range(graph.stages)
            ]

        self.feeds, self.returns = priced(graph.feeds), priced(graph.returns)

    def timed(self, table: Table) -> TimedTable | None:
        """A table as it is; None when it does not fit into the memory."""
        peaks = peak_bytes(table, self.graph, self.room.after_F, self.room.later)
        if any(peak > bound * (1 + 1e-9) for peak, bound in zip(peaks, self.room.bound, strict=True)):
            return None
        return TimedTable(table, *bubble_spans(table, self.graph, self.costs.seconds, self.costs.comm_s))
