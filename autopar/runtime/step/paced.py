"""Predicted seconds of a plan on ranks that are slower than they were taken to be.

pipeline.py of a program whose rows move says what its actions take on ranks as they were described. On ranks that take s times as
long a group of stages takes as long as the slowest of its ranks, its rows shared by their speeds, and the table is played again:

    group's factor  =  max n_i · s_i  /  the longest planned n      n_i: units of rows, apportioned
    step            =  the table, actions taking factor times as long  +  what a step takes beside its actions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.mesh import Shares, mesh_index, mesh_size, sizes_of
from ..program.actions import Action, action_reads, parse_row, replay, splits_backward
from .apportion import apportioned

BETTER = 1.05
"""How many times as long as another plan's a step takes at least, for the other one to be worth going on under."""
Mesh = Mapping[str, int]


@dataclass(frozen=True)
class PacedPlan:
    """A plan and its predicted seconds. meshes: of the stages, with their first ranks; step_s: of a step; actions_s: of F, B and
    W of every stage; sends_s: from a stage to another; most_units: of rows that a rank of every group has room for."""

    rows: tuple[tuple[Action, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    meshes: tuple[tuple[Mesh, int], ...]
    transfers: tuple[tuple[str, int, int], ...]
    step_s: float
    actions_s: tuple[tuple[float, float, float], ...]
    sends_s: Mapping[tuple[int, int], float]
    most_units: tuple[int, ...]

    @classmethod
    def of(cls, pipeline: Any) -> PacedPlan | None:
        """The plan of a module of pipeline.py; None where it does not say what its actions take, as its rows do not move."""
        if not hasattr(pipeline, "STEP_S"):
            return None
        return cls(
            tuple(map(parse_row, pipeline.TABLE)),
            tuple(map(tuple, pipeline.GROUPS)),
            tuple((sizes_of(row["mesh"]), int(row["first_rank"])) for row in pipeline.STAGES),
            tuple((row["kind"], row["source"], row["target"]) for row in pipeline.TRANSFERS),
            pipeline.STEP_S,
            tuple(pipeline.ACTIONS_S),
            pipeline.SENDS_S,
            tuple(pipeline.MOST_UNITS),
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(mesh_size(self.meshes[stages[0]][0]) for stages in self.groups)

    def seconds(self, slowness: Sequence[float]) -> float:
        """Seconds of a step. slowness: by rank, how many times as long it takes as was predicted."""
        beside_s = self.step_s - self._span_s([1.0] * len(self.groups))
        return self._span_s([self._factor(group, slowness) for group in range(len(self.groups))]) + max(beside_s, 0.0)

    def _factor(self, group: int, slowness: Sequence[float]) -> float:
        """How many times as long as predicted a group takes, its rows shared by the speeds of its ranks."""
        mesh, first = self.meshes[self.groups[group][0]]
        own = slowness[first : first + mesh_size(mesh)]
        moving = ((axis, size.units[0]) for axis, size in mesh.items() if isinstance(size, Shares))
        axis, units = next(moving, ("", ()))
        if not axis:
            return max(own)
        slowest = [0.0] * len(units)
        for number, slow in enumerate(own):
            place = mesh_index(mesh, number)[axis]
            slowest[place] = max(slowest[place], slow)
        shared = apportioned(sum(units), slowest, max(self.most_units[group], *units))
        return max(n * slow for n, slow in zip(shared, slowest, strict=True)) / max(units)

    def _span_s(self, factors: Sequence[float]) -> float:
        """Seconds of the table. factors: by group, that its actions take so many times as long."""
        of_stage = {stage: factor for factor, stages in zip(factors, self.groups, strict=True) for stage in stages}
        feeds, returns = (
            {
                stage: [s for kind, s, target in self.transfers if (kind, target) == (wanted, stage)]
                for stage in of_stage
            }
            for wanted in ("value", "gradient")
        )
        reads, links = action_reads(self.groups, feeds, returns)
        together = not splits_backward(self.rows)
        seconds = {}
        for stage, (forward_s, backward_s, weights_s) in enumerate(self.actions_s):
            backward_s += weights_s if together else 0.0
            for kind, action_s in zip("FBW", (forward_s, backward_s, weights_s), strict=True):
                seconds[kind, stage] = action_s * of_stage[stage]
        played = replay(self.rows, reads)
        sent_s = [self.sends_s.get(link, self.sends_s.get(link[::-1], 0.0)) for link in links]
        return max(played.ends_s((seconds[kind, stage] for kind, _, stage in played.item), sent_s), default=0.0)


def seconds_at(
    plans: Sequence[PacedPlan], placements: Sequence[Sequence[int]], slowness: Sequence[float]
) -> list[float]:
    """Predicted seconds of a step of every plan. placements: the rank of every place under each; slowness: by place, how many
    times as long as predicted the rank there takes, of which what all have in common is left out."""
    fastest, found = min(slowness), []
    for plan, placement in zip(plans, placements, strict=True):
        by_rank = [0.0] * len(slowness)
        for rank, slow in zip(placement, slowness, strict=True):
            by_rank[rank] = slow / fastest
        found.append(plan.seconds(by_rank))
    return found
