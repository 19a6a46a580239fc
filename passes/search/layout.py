"""Where the parameters of a plan lie, for other programs of the same model that are to compute with them.

A program of another shape of batch, or in other microbatches, may have other calls between those of the same modules. There
a stage starts with its first call that has parameters of its own, which is told by its place in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import CaptureError
from autopar.ir.program import Program
from autopar.passes.lower.cut import cut, cut_points
from autopar.plan import Plan, StagePlan

Place = tuple[str, str, tuple[str, ...]]
"""Module path of a call, where in it the call starts, and its parameters."""


@dataclass(frozen=True)
class Layout:
    """Stages whose meshes and parameters a plan must have. places: of the calls of every stage."""

    stages: tuple[StagePlan, ...]
    places: tuple[tuple[Place, ...], ...]

    @staticmethod
    def of(plan: Plan, program: Program) -> Layout:
        """The layout of a plan of this program."""
        places = [*_places(program)]
        return Layout(plan.stages, tuple(tuple(places[slice(*stage.calls)]) for stage in plan.stages))

    def ranges(self, program: Program) -> tuple[tuple[int, int], ...]:
        """The calls of every stage in another program of the model. Raises CaptureError where it cannot be cut so that every
        stage has its parameters."""
        given = [*_places(program)]
        if tuple(given) == sum(self.places, ()):
            return tuple(stage.calls for stage in self.stages)
        found = {place: i for i, place in reversed([*enumerate(given)])}
        starts = [0]
        for places in self.places[1:]:
            starts.append(next((found[place] for place in places if place[-1] and place in found), len(given)))
        ends = [*starts[1:], len(given)]
        ranges = tuple(zip(starts, ends, strict=True))
        allowed = {0, *cut_points(program)}
        if any(a >= b or a not in allowed for a, b in ranges) or not self._fits(program, ranges):
            raise CaptureError(
                f"this model's blocks for another bucket cannot be cut into the same {len(self.stages)} stages with the same "
                "parameters each; use Options(pp=1), or compile these shapes as programs of their own"
            )
        return ranges

    def _fits(self, program: Program, ranges: tuple[tuple[int, int], ...]) -> bool:
        parts = cut(program, ranges) if len(ranges) > 1 else (program,)
        return all({*part.parameters} == {*stage.parameters} for part, stage in zip(parts, self.stages, strict=True))


def _places(program: Program) -> Iterator[Place]:
    return ((call.path.split("@")[0], call.start, call.params) for call in program.calls)
