"""The costs of keeping and of recomputing in one template under one plan: the problem that `passes.recompute.choose` solves.

Items are what can be had in backward: every value of forward as its op leaves it, and every decision point of it
(`v@save`, `v@use`), which is a conversion away from its source. An item is kept, made again, or neither:

    kept(i) costs bytes_i on a rank from forward to backward; only one form of a value can be kept
    again(i) costs seconds_i (the op at the plan's strategy, and the conversions of its operands), and needs all of its
             operands to be kept or made again

Backward must have what its own ops read. Views cost nothing to make again and are never kept: the values they show are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from autopar.ir.program import Program, Template, operand_values, resolve
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.ops.registry import find
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.hubs import Flow, flow, phase_is_late
from autopar.passes.rules.recomputation import kept_form
from autopar.passes.rules.structure import value_names
from autopar.plan import ParameterPlan, StagePlan, TemplatePlan


@dataclass(frozen=True)
class Item:
    """One thing that backward can have. value: what is kept or recomputed in a plan's terms ('' : a parameter).

    bytes_kept: inf where it cannot be kept. again_s: inf where it cannot be made again.
    """

    name: str
    value: str
    bytes_kept: float
    again_s: float
    operands: tuple[int, ...]


@dataclass(frozen=True)
class RecomputeProblem:
    """Items, operands before their readers; `needed`: those that backward's own ops read."""

    items: tuple[Item, ...]
    needed: frozenset[int]

    def cost(self, kept: Collection[int], again: Collection[int]) -> tuple[float, float]:
        """(bytes kept, seconds of what is made again)."""
        return sum(self.items[i].bytes_kept for i in kept), sum(self.items[i].again_s for i in again)

    def recompute(self, again: Collection[int]) -> tuple[str, ...]:
        """The plan's terms: values that are made again."""
        return tuple(item.value for i, item in enumerate(self.items) if i in again and item.name == item.value)


def recompute_problem(
    template: Template,
    plan: TemplatePlan,
    stored: dict[str, ParameterPlan],
    pricer: Pricer,
    rules: RuleBook,
    free_inputs: Collection[str] = (),
) -> RecomputeProblem:
    """The graph of a template.

    stored: how the parameter of every placeholder rests. free_inputs: placeholders that stay in memory anyway (buffers).
    """
    return _Builder(template, plan, stored, pricer, rules, free_inputs).run()


def recompute_problems(
    program: Program, stage: StagePlan, pricer: Pricer, rules: RuleBook
) -> dict[str, RecomputeProblem]:
    """The graphs of the templates that have a backward; program: the calls of the stage."""
    problems = {}
    for name in sorted({program.calls[i].template for i in program.backward_calls}):
        template, calls = program.templates[name], [call for call in program.calls if call.template == name]
        stored = {p: stage.parameters[parameter] for p, parameter in zip(template.params, calls[0].params, strict=True)}
        resting = [v for i, v in enumerate(template.inputs) if all(c.inputs[i].kind == "buffer" for c in calls)]
        problems[name] = recompute_problem(template, stage.templates[name], stored, pricer, rules, resting)
    return problems


class _Builder:
    def __init__(
        self,
        template: Template,
        plan: TemplatePlan,
        stored: dict[str, ParameterPlan],
        pricer: Pricer,
        rules: RuleBook,
        free_inputs: Collection[str],
    ) -> None:
        self.template, self.plan, self.stored, self.pricer, self.rules = template, plan, stored, pricer, rules
        self.free = frozenset(free_inputs)
        self.flow: Flow = flow(template)
        self.items: list[Item] = []
        self.index: dict[str, int] = {}
        self.specs: dict[str, Spec] = {}

    def run(self) -> RecomputeProblem:
        template = self.template
        params = set(template.params)
        for name in template.inputs:
            self._value(name, math.inf, ())
        for node in template.ops:
            if not phase_is_late(node):
                self._op(node.name)
        needed = {self._form(v) for v in self.flow.late - params}
        return RecomputeProblem(tuple(self.items), frozenset(needed))

    def _form(self, value: str) -> int:
        """The item of the form that a value would be kept in, from which backward's own ops start."""
        return self._at(kept_form(self.flow, self.template, value))

    def _add(self, name: str, value: str, bytes_kept: float, again_s: float, operands: tuple[int, ...]) -> int:
        self.index[name] = len(self.items)
        self.items.append(Item(name, value, bytes_kept, again_s, operands))
        return self.index[name]

    def _value(self, name: str, again_s: float, operands: tuple[int, ...], shown: bool = False) -> None:
        if name not in self.specs:
            self.specs[name] = self.plan.specs[name]
        self._add(name, name, math.inf if shown else self._bytes(name, name), again_s, operands)

    def _bytes(self, value: str, form: str) -> float:
        """Bytes of a value kept in a form; inf where it is kept in another."""
        if kept_form(self.flow, self.template, value) != form:
            return math.inf
        if value in self.free:
            return 0.0
        spec = self.plan.specs.get(form) or self.specs[form]
        return float(spec.local_bytes(self.template.type_of(value), self.pricer.mesh))

    def _at(self, name: str) -> int:
        """The item of a value or decision point; decision points are made when first asked for."""
        if name in self.index:
            return self.index[name]
        hub = self.flow.hubs[name]
        self.specs[name] = wanted = self.plan.specs[name]
        type_ = self.template.type_of(hub.value)
        if hub.value in self.template.params:
            storage = self.stored[hub.value].storage
            late_point = f"{hub.value}@late"
            gathered_anyway = late_point in self.flow.hubs and self.plan.specs[late_point] == wanted
            if gathered_anyway:
                return self._add(name, "", math.inf, 0.0, ())
            seconds = self.pricer.convert_s(type_, storage, wanted)
            stored = TensorType(type_.shape, self.template.nodes[hub.value].meta.get("stored") or type_.dtype)
            seconds += self.pricer.cast_s(stored, type_, storage) if stored != type_ else 0.0
            return self._add(name, "", math.inf, seconds, ())
        source = self._at(hub.source or hub.value)
        seconds = self.pricer.convert_s(type_, self.specs[hub.source or hub.value], wanted)
        shown = seconds == 0 and math.isinf(self.items[source].bytes_kept) and self._shows(hub.value)
        return self._add(name, hub.value, math.inf if shown else self._bytes(hub.value, name), seconds, (source,))

    def _shows(self, value: str) -> bool:
        node = resolve(self.template.nodes[value])[0]
        if node.op != "call_function":
            return False
        definition = find(self.template.op_calls[node.name].op)
        return definition is not None and definition.free

    def _op(self, name: str) -> None:
        node, call = self.template.nodes[name], self.template.op_calls[name]
        rule, strategy, mesh = self.rules.rule(call), self.plan.strategies[name], self.pricer.mesh
        seconds = self.pricer.op_s(call, rule, strategy)
        operands: list[int] = []
        moved = 0.0
        for i, operand in enumerate(operand_values(node)):
            read = self.flow.reads[name, i] or operand
            operands.append(self._at(read))
            wanted = rule.operand_spec(i, strategy, mesh)
            assert wanted is not None
            moved += self.pricer.convert_s(self.template.type_of(operand), self.specs[read], wanted)
        results = value_names(node)
        for i, value in results.items():
            spec = rule.result_spec(i, strategy, mesh)
            assert spec is not None
            self.specs[value] = spec
        definition = find(call.op)
        shown = definition is not None and definition.free and moved == 0
        if len(results) == 1:
            self._value(next(iter(results.values())), seconds + moved, tuple(dict.fromkeys(operands)), shown)
            return
        run = self._add(f"{name}()", "", math.inf, seconds + moved, tuple(dict.fromkeys(operands)))
        for value in results.values():
            self._value(value, 0.0, (run,))
