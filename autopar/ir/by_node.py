"""Collectives that go by node: inside the machines first, and then between them (`autopar/runtime/comm/hierarchical.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from autopar.ir.text import size_text
from autopar.runtime.data.fields import Stage
from autopar.runtime.data.schema import MOST_RANKS, integer

Ranks = Annotated[int, integer(1, MOST_RANKS)]


@dataclass(frozen=True)
class AxisByNode:
    """Collectives along an axis of a stage's mesh, and of all stages on the same ranks. nodes, places: that each of its groups
    has, and ranks on each; least: by kind, bytes of the full array from which on they go by node."""

    stage: Stage
    axis: str
    nodes: Ranks
    places: Ranks
    least: Mapping[str, int]

    def show(self) -> str:
        """`over dp of stage 0, on 2 nodes of 4 ranks: all_reduce from 262 kB on, all_gather from 65.5 kB on`."""
        kinds = ", ".join(f"{kind} from {size_text(nbytes)} on" for kind, nbytes in self.least.items())
        return f"over {self.axis} of stage {self.stage}, on {self.nodes} nodes of {self.places} ranks: {kinds}"


@dataclass(frozen=True)
class ByNode:
    """The collectives of a program that go by node. nodes: the ranks of each machine; both empty where every collective goes
    flat."""

    nodes: tuple[tuple[int, ...], ...] = ()
    axes: tuple[AxisByNode, ...] = ()


ALL_FLAT = ByNode()
