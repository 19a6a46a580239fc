"""Plans whose templates run in pieces of the batch (`autopar.passes.lower.pieces`).

What a template is given is cut along the dim of the batch. What the stage would convert right before the call, with nothing to
run meanwhile, is given as it comes and converted inside, where pieces of it may travel one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from autopar.costmodel.bill import CallBill, call_seconds
from autopar.errors import CoupledError
from autopar.ir.lines import CallBackward, CallForward, Convert, Line
from autopar.ir.lowered import LoweredProgram, LoweredStage, LoweredTemplate
from autopar.ir.program import Program, Template
from autopar.ir.spec import Spec
from autopar.passes.account.program import Account
from autopar.passes.account.stage import Later
from autopar.passes.batch.dims import Dims, batch_dims
from autopar.passes.lower.body import PlannedTemplate
from autopar.passes.lower.context import in_order
from autopar.passes.lower.context import in_pieces as lines_in_pieces
from autopar.passes.lower.template import least_bill
from autopar.passes.price.bills import call_bills, template_bill
from autopar.passes.price.pricer import Pricer, Pricers
from autopar.passes.rules.book import RuleBook
from autopar.plan import GIVEN, Plan, StagePlan

PIECES = (4, 2)
"""The numbers of pieces that are tried."""

Cuts = Mapping[str, tuple[tuple[str, int], ...]]
"""Per template the placeholders that have a dim of the batch, and which."""


def batch_cuts(program: Program, rules: RuleBook) -> Cuts:
    """The cuts of the batch; none where the batch cannot be followed."""
    try:
        dims = batch_dims(program, rules)
    except CoupledError:
        return {}
    return {name: tuple(_led_by_batch(template, dims[name])) for name, template in program.templates.items()}


def _led_by_batch(template: Template, dims: Dims) -> Iterator[tuple[str, int]]:
    for value in _placeholders(template):
        for dim, part in dims.get(value, {}).items():
            if part.inner * part.size == template.type_of(value).shape[dim]:
                yield value, dim
                break


def _placeholders(template: Template) -> tuple[str, ...]:
    """The inputs, and the gradients of outputs."""
    return (*template.inputs, *_tangents(template))


def _tangents(template: Template) -> tuple[str, ...]:
    return tuple(t for t in template.tangents if t is not None)


def in_pieces(plan: Plan, pieces: int, program: Program, lowered: LoweredProgram, rules: RuleBook) -> Plan:
    """The plan with the blocks of every template in so many pieces. lowered: from the plan."""
    cuts = batch_cuts(program, rules)
    stages = zip(plan.stages, lowered.stages, strict=True)
    return replace(plan, stages=tuple(_stage_in_pieces(one, pieces, program, low, cuts) for one, low in stages))


def _stage_in_pieces(plan: StagePlan, pieces: int, program: Program, lowered: LoweredStage, cuts: Cuts) -> StagePlan:
    given, templates = _as_they_come(program, lowered), dict(plan.templates)
    for name in templates.keys() & cuts.keys():
        one, cut = templates[name], cuts[name]
        specs = {f"{value}{GIVEN}": spec for value, _ in cut if (spec := given.get((name, value))) is not None}
        other = {key: spec for key, spec in specs.items() if spec != one.specs[key.removesuffix(GIVEN)]}
        templates[name] = replace(one, specs=one.specs | other if other else one.specs, pieces=pieces, cut=cut)
    return replace(plan, templates=templates)


def least_in_pieces_s(
    counted: Account, lowered: LoweredProgram, plan: Plan, program: Program, pricers: Pricers, rules: RuleBook
) -> float:
    """Seconds that a step in pieces takes at least, whatever is converted between calls. counted, lowered: the account and the
    lines of the same plan whole, with overlap; plan: in pieces."""
    stages = []
    for account, stage, planned in zip(counted.stages, lowered.stages, plan.stages, strict=True):
        pricer, price = pricers[stage.mesh], account.priced()
        given = program, planned, pricer, rules
        least = {name: _least_call(template, *given) for name, template in stage.templates.items()}
        between = price.bill.calls[0][0].silent
        bill = replace(price.bill, calls=((between, 1), *call_bills(stage, least, pricer)))
        stages.append(replace(account, priced=Later(partial(replace, price, bill=bill))))
    return replace(counted, stages=tuple(stages)).step_time_s


def _least_call(
    lowered: LoweredTemplate, program: Program, planned: StagePlan, pricer: Pricer, rules: RuleBook
) -> CallBill:
    """A bill that a call does not go below in the pieces of its stage's plan, or whole."""
    plan, template = planned.templates[lowered.planned_as], program.templates[lowered.planned_as]
    bill = template_bill(lowered, plan, template, pricer, rules)
    if lowered.name != lowered.planned_as or plan.offload:
        return bill.silent
    given, backward = (template, plan, pricer, rules), lowered.backward is not None
    pieces = least_bill(bill, in_order(*given, backward), lines_in_pieces(*given, backward), PlannedTemplate(*given))
    return min(bill, pieces, key=lambda one: call_seconds(one, pricer.software).total_s)


def _as_they_come(program: Program, lowered: LoweredStage) -> dict[tuple[str, str], Spec | None]:
    """Specs of placeholders before the conversion that precedes every call of their template; None where calls
    differ."""
    specs: dict[tuple[str, str], Spec | None] = {}
    for function in lowered.functions:
        made: dict[str, Line] = {out: line for line in function.lines for out in line.outs}
        known = {name: spec for name, (_, spec) in function.arg_types.items()}
        known |= {out: spec for line in function.lines for out, _, spec in line.made() if spec is not None}
        for line in function.lines:
            if not isinstance(line, (CallForward, CallBackward)):
                continue
            name = lowered.templates[line.template].planned_as
            template = program.templates[name]
            names = line.inputs if isinstance(line, CallForward) else line.tangents
            values = template.inputs if isinstance(line, CallForward) else _tangents(template)
            for value, source in zip(values, names, strict=True):
                while isinstance(before := made.get(source), Convert):
                    source = before.value
                key = name, value
                spec = known.get(source)
                specs[key] = spec if specs.get(key, spec) == spec else None
    return specs
