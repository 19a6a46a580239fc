"""The cost of keeping less for backward: a curve per stage, from bytes kept to seconds of making values again.

Per template the corners of its curve are exact (`passes.recompute.choose.hull`); one price per byte cuts the curves of all
templates of a stage, so the stage's curve takes their corners in order of price. Named policies are points that need
not lie on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Annotated

from autopar.ir.memory_levers import RECOMPUTE_POLICIES
from autopar.ir.program import Program
from autopar.passes.lower.cut import cut
from autopar.passes.lower.first_calls import first_calls_apart
from autopar.passes.price.pricer import Pricers
from autopar.passes.recompute.choose import Choice, hull, of_values
from autopar.passes.recompute.problem import RecomputeProblem, recompute_problems
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.policies import policy_set
from autopar.plan import Plan, StagePlan
from autopar.runtime.data.fields import Bytes, Length, Seconds

Place = tuple[Bytes, Seconds]
"""(bytes that one microbatch keeps on a rank, seconds that backward spends making values again in a step)"""


@dataclass(frozen=True)
class Curve:
    """corners: from most bytes to fewest. policies: the place of each named policy. chosen: the place of the plan itself."""

    corners: Annotated[tuple[Place, ...], Length(1)]
    policies: dict[str, Place]
    chosen: Place


def curves(program: Program, plan: Plan, pricers: Pricers, rules: RuleBook) -> list[Curve]:
    """One per stage of a plan for training."""
    hulls: dict[RecomputeProblem, list[Choice]] = {}
    stage_curves: list[Curve] = []
    parts = cut(program, [s.calls for s in plan.stages])
    for part, stage in starmap(first_calls_apart, zip(parts, plan.stages, strict=True)):
        problems = recompute_problems(part, stage, pricers[stage.mesh], rules)
        for problem in problems.values():
            if problem not in hulls:
                hulls[problem] = hull(problem)
        corners = {name: hulls[problem] for name, problem in problems.items()}
        stage_curves.append(_stage_curve(part, stage, problems, corners, plan.microbatches))
    return stage_curves


def _stage_curve(
    part: Program,
    stage: StagePlan,
    problems: Mapping[str, RecomputeProblem],
    corners: Mapping[str, list[Choice]],
    microbatches: int,
) -> Curve:
    """The curve of one stage. part: its calls. problems, corners: what its templates may recompute, and their hulls."""
    times = {name: sum(part.calls[i].template == name for i in part.backward_calls) for name in part.templates}

    def place(choices: dict[str, Choice]) -> Place:
        kept = sum(times[name] * choice.bytes_kept for name, choice in choices.items())
        return kept, microbatches * sum(times[name] * choice.again_s for name, choice in choices.items())

    def place_of(recompute: Mapping[str, Collection[str]]) -> Place:
        return place({name: of_values(problem, recompute[name]) for name, problem in problems.items()})

    moves = sorted(
        ((b.again_s - a.again_s) / (a.bytes_kept - b.bytes_kept), k, name)
        for name, template_corners in corners.items()
        for k, (a, b) in enumerate(pairwise(template_corners), 1)
    )
    choices = {name: template_corners[0] for name, template_corners in corners.items()}
    places = [place(choices)]
    for _, k, name in moves:
        choices = {**choices, name: corners[name][k]}
        places.append(place(choices))
    policies = {
        policy: place_of({name: policy_set(part.templates[name], policy) for name in problems})
        for policy in RECOMPUTE_POLICIES
    }
    return Curve(tuple(places), policies, place_of({name: stage.templates[name].recompute for name in problems}))
