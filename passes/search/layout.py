"""Where the parameters of a plan lie, for other programs of the same model that are to compute with them.

A program of another step or shape of batch, or in other microbatches, may have other calls between those of the same modules, and
none of some modules. There a stage starts with its first call that has parameters of its own, which is told by its place in the
model, or where that has other calls by these parameters. A stage without such a call takes of the calls that no stage around it
needs as many as it had, which may be none: its ranks hold its parameters and wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
        ranges = self._starting_with_own(program, given)
        if ranges is None or not self._fits(program, ranges):
            raise CaptureError(
                f"this model's blocks for another bucket or entry cannot be cut into the same {len(self.stages)} stages with the "
                "same parameters each; use Options(pp=1), or compile these shapes as programs of their own"
            )
        return ranges

    def _starting_with_own(self, program: Program, given: Sequence[Place]) -> tuple[tuple[int, int], ...] | None:
        """The calls of every stage, each from the first that is its own. None where a stage could not start there. given: the
        places of the program's calls."""
        stages, points = self._stage_of(given), {0, *cut_points(program)}
        starts = [len(given)]
        for s in range(len(self.stages) - 1, 0, -1):
            end = starts[0]
            first = max((i + 1 for i, other in enumerate(stages) if other is not None and other < s), default=0)
            if s in stages:
                start = max((i for i in points if first <= i <= min(stages.index(s), end)), default=None)
            else:
                wanted = max(first, end - len(self.places[s]))
                start = min((i for i in {*points, end} if wanted <= i <= end), default=None)
            if start is None:
                return None
            starts.insert(0, start)
        return tuple(zip([0, *starts], starts, strict=False))

    def _stage_of(self, given: Sequence[Place]) -> list[int | None]:
        """The stage that each call must be in: that with a call of such a place, or that which alone has one of its parameters.
        None for calls without parameters, or with those of several stages."""
        at_place = {place: s for s, places in reversed([*enumerate(self.places)]) for place in places}
        stages = [{name for place in places for name in place[-1]} for places in self.places]
        users = Counter(name for names in stages for name in names)
        alone = {name: s for s, names in enumerate(stages) for name in names if users[name] == 1}
        return [
            at_place.get(place, next((alone[name] for name in place[-1] if name in alone), None)) if place[-1] else None
            for place in given
        ]

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
