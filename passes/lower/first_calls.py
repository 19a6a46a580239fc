"""The first calls of a template in a stage, where they recompute otherwise than its other calls, as a template of their own.

Where memory is short of what keeping everything takes, a few calls that recompute may be enough, and which of equal calls they
are is no matter. So a plan says how many, and for whoever lowers a stage or prices it these are two templates of the same ops:

    plan      layers: recompute h in 2 calls        calls   layers        layers        layers  layers  layers
    apart     layers_first: recompute h, layers             layers_first  layers_first  layers  layers  layers
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.names import fresh_name
from autopar.ir.program import Program
from autopar.plan import StagePlan


def first_calls_apart(program: Program, stage: StagePlan) -> tuple[Program, StagePlan]:
    """A stage's program and plan with such calls apart. Raises PlanError for more calls than there are."""
    if all(plan.recompute_calls is None for plan in stage.templates.values()):
        return program, stage
    templates, planned, calls = dict(program.templates), dict(stage.templates), list(program.calls)
    for name, template in program.templates.items():
        plan = stage.templates.get(name)
        if plan is None or plan.recompute_calls is None:
            continue
        places = [i for i in sorted(program.backward_calls) if program.calls[i].template == name]
        if plan.recompute_calls > len(places):
            raise PlanError(
                f"the plan recomputes in the first {plan.recompute_calls} calls of {name}, and of calls {stage.calls[0]} to "
                f"{stage.calls[1] - 1} {len(places)} are that and have a backward; give recompute_calls as many at most"
            )
        first = replace(plan, recompute_calls=None, recompute_after=())
        if plan.recompute_calls == len(places):
            planned[name] = first
            continue
        apart = fresh_name(f"{name}_first", {*templates, *stage.templates})
        templates[apart], planned[apart] = template.of_first_calls(apart), first
        planned[name] = replace(first, recompute=plan.recompute_after)
        for i in places[: plan.recompute_calls]:
            calls[i] = replace(calls[i], template=apart)
    return replace(program, templates=templates, calls=tuple(calls)), replace(stage, templates=planned)
