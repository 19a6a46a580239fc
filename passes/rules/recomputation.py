"""A template under a set of recomputed values: what forward keeps, what backward runs again.

Backward reads some of forward's values ("late" values, `autopar.passes.rules.hubs`). One that is in the set R is made again by
its op just before its first use, from operands that are kept or made again in turn:

    kept = late values outside R, and whatever making the others again reads outside R

A kept value is held in one of the forms that forward gives it: `v@save` where the template has it, else `v@use` where
several ops of forward read it, else as its op leaves it. Parameters are never kept: those that the ops run again read
are gathered for backward as they were for forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.program import Template, operand_values, resolve
from autopar.passes.rules.hubs import Flow, phase_is_late
from autopar.passes.rules.once import once
from autopar.passes.rules.structure import view_of


@dataclass(frozen=True)
class Recomputation:
    """kept: the form (hub or value) that every kept value is held in. again: ops that backward runs again.

    params: slots of parameters that these ops read. hubs: conversions of forward that are made again for them.
    """

    kept: dict[str, str]
    again: frozenset[str]
    params: tuple[int, ...]
    hubs: frozenset[str]


def recomputation(template: Template, flow: Flow, recompute: Iterable[str]) -> Recomputation:
    """The recomputation of a template where all but `recompute` is kept. Raises PlanError for names that no op of
    forward makes."""
    chosen = frozenset(recompute)
    for name in sorted(chosen - made_forward(template)):
        raise PlanError(
            f"the plan recomputes {template.name}.{name}, which no op of forward makes; it is for another model or not a "
            "value that can be made again"
        )
    params = {name: slot for slot, name in enumerate(template.params)}
    kept: dict[str, str] = {}
    again: dict[str, None] = {}
    used: set[int] = set()
    pending = [v for v in template.nodes if v in flow.late and v not in params]
    seen = set(pending)
    while pending:
        value = pending.pop()
        if value not in chosen:
            kept[value] = kept_form(flow, template, value)
            continue
        producer = resolve(template.nodes[value])[0]
        again[producer.name] = None
        for operand in operand_values(producer):
            if operand in params:
                used.add(params[operand])
            elif operand not in seen:
                seen.add(operand)
                pending.append(operand)
    ordered = {v: kept[v] for v in template.nodes if v in kept}
    return Recomputation(ordered, frozenset(again), tuple(sorted(used)), _hubs(template, flow, ordered, again))


def held_values(template: Template, recomputed: Recomputation) -> dict[str, str]:
    """The kept values that own memory until backward, with the form that each is held in: views of what is there anyway, kept or
    a parameter, own none."""
    there = {*recomputed.kept, *template.params}
    return {
        v: form for v, form in recomputed.kept.items() if view_of(template, resolve(template.nodes[v])[0]) not in there
    }


def kept_form(flow: Flow, template: Template, value: str) -> str:
    """Name of the decision point in whose spec a value is kept; the value itself: as its op leaves it."""
    if f"{value}@save" in flow.hubs:
        return f"{value}@save"
    if value in flow.late or value in template.inputs or f"{value}@use" not in flow.hubs:
        return value
    return f"{value}@use"


@once
def made_forward(template: Template) -> frozenset[str]:
    """Values that an op of forward makes."""
    values = set()
    for name, node in template.nodes.items():
        producer = resolve(node)[0]
        if node.op == "call_function" and not phase_is_late(producer):
            values.add(name)
    return frozenset(values)


def _hubs(template: Template, flow: Flow, kept: dict[str, str], again: Iterable[str]) -> frozenset[str]:
    """Decision points between what is kept and the ops that run again (parameters apart)."""
    forms = set(kept.values())
    reached: set[str] = set()

    def reach(hub: str) -> None:
        while hub and hub not in forms and hub not in reached and flow.hubs[hub].value not in template.params:
            reached.add(hub)
            hub = flow.hubs[hub].source

    for name in again:
        for i, _ in enumerate(operand_values(template.nodes[name])):
            reach(flow.reads[name, i])
    for value in flow.late - set(kept) - set(template.params):
        reach(f"{value}@save" if f"{value}@save" in flow.hubs else "")
    return frozenset(reached)
