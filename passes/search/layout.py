"""Where the parameters of a plan lie, for other programs of the same model that are to compute with them.

A program of another shape of batch, or in other microbatches, may have other calls between those of the same modules. There
a stage starts with its first call that has parameters of its own, which is told by its place in the model, or where that has
other calls by the first of these parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.errors import CaptureError
from autopar.ir.names import fresh_name
from autopar.ir.program import Call, Program
from autopar.passes.lower.cut import cut, cut_points
from autopar.plan import ParameterPlan, Plan, StagePlan

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
        reads = {name: i for i, place in reversed([*enumerate(given)]) for name in place[-1]}
        starts = [0]
        for places in self.places[1:]:
            calls = (found.get(place, reads.get(place[-1][0])) for place in places if place[-1])
            starts.append(next((call for call in calls if call is not None), len(given)))
        ends = [*starts[1:], len(given)]
        ranges = tuple(zip(starts, ends, strict=True))
        allowed = {0, *cut_points(program)}
        if any(a >= b or a not in allowed for a, b in ranges) or not self._fits(program, ranges):
            raise CaptureError(
                f"this model's blocks for another bucket or entry cannot be cut into the same {len(self.stages)} stages with the "
                "same parameters each; use Options(pp=1), or compile these shapes as programs of their own"
            )
        return ranges

    def _fits(self, program: Program, ranges: tuple[tuple[int, int], ...]) -> bool:
        parts = cut(program, ranges) if len(ranges) > 1 else (program,)
        return all({*part.parameters} == {*stage.parameters} for part, stage in zip(parts, self.stages, strict=True))


def _places(program: Program) -> Iterator[Place]:
    return ((call.path.split("@")[0], call.start, call.params) for call in program.calls)


def apart(program: Program, stored: Mapping[str, ParameterPlan]) -> Program:
    """The program in which calls that read parameters that lie otherwise have templates of their own.

    Calls of a template read parameters that are stored alike, so a plan for parameters that rest already must not have one
    template for calls that another program of the model told apart. stored: how every parameter rests.
    """
    rests = {name: p.unassigned for name, p in stored.items()}
    names: dict[tuple[str, tuple[ParameterPlan | None, ...]], str] = {}
    templates, calls = dict(program.templates), list[Call]()
    for call in program.calls:
        key = call.template, tuple(rests.get(name) for name in call.params)
        if key not in names:
            known = any(template == call.template for template, _ in names)
            names[key] = fresh_name(call.template, templates) if known else call.template
            templates[names[key]] = replace(program.templates[call.template], name=names[key])
        calls.append(replace(call, template=names[key]))
    if len(templates) == len(program.templates):
        return program
    return replace(program, templates=templates, calls=tuple(calls))
