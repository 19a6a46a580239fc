"""One of a template's functions under construction: its lines, and where every value is held in it.

A value is held as its op leaves it and, once somebody has asked for it so, in the spec of each of its decision points
(`autopar.passes.rules.hubs`), under the name of the decision point. A conversion becomes a line at its first reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from torch import fx

from autopar.errors import PlanError, ShardingError
from autopar.ir.call import bind
from autopar.ir.lines import Compute, Function, Line, Ref, Site
from autopar.ir.program import Template, op_name, operand_nodes, resolve, result_types
from autopar.ir.rule import carried_choices
from autopar.ir.spec import Spec
from autopar.ops.registry import Block, find, told
from autopar.passes.lower.convert import Converter, cast
from autopar.passes.lower.names import Names
from autopar.passes.price.link_clock import op_seconds
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.hubs import flow
from autopar.passes.rules.recomputation import recomputation
from autopar.passes.rules.sends import sent_by
from autopar.passes.rules.structure import value_names
from autopar.passes.rules.widening import late_upcasts, wide_gradients
from autopar.plan import GIVEN, TemplatePlan

Result = tuple[str | None, Spec | None]
"""A value that a function returns: its local name and its spec (None: no gradient)."""


class PlannedTemplate:
    """A template under its plan: its decision points, what backward makes again, and which gradients are made wide."""

    def __init__(self, template: Template, plan: TemplatePlan, pricer: Pricer, rules: RuleBook) -> None:
        self.template, self.plan, self.pricer, self.rules = template, plan, pricer, rules
        self.flow = flow(template)
        self.recompute = frozenset(plan.recompute)
        self.recomputation = recomputation(template, self.flow, plan.recompute)
        self.wide = wide_gradients(template)
        self.recast = late_upcasts(template)

    def strategy(self, node: str) -> tuple[str, ...]:
        """The plan's strategy of an op. Raises PlanError where it has none."""
        try:
            return self.plan.strategies[node]
        except KeyError:
            raise PlanError(
                f"the plan has no strategy for {self.template.name}.{node}; it is for another model"
            ) from None

    def spec(self, name: str) -> Spec:
        """The plan's spec of a placeholder or decision point. Raises PlanError where it has none."""
        try:
            return self.plan.specs[name]
        except KeyError:
            raise PlanError(f"the plan has no spec for {self.template.name}.{name}; it is for another model") from None

    @cached_property
    def op_s(self) -> Callable[[Compute], float]:
        """Seconds of an op's own work."""
        return op_seconds(self.plan, self.template, self.pricer, self.rules)

    def value_of(self, key: str) -> str:
        """The value that a decision point, or the value itself, stands for."""
        hub = self.flow.hubs.get(key)
        return key.removesuffix(GIVEN) if hub is None else hub.value

    def cuts(self, named: Iterable[tuple[str, str]]) -> dict[str, int]:
        """The dims along which the plan cuts what local names hold, of those that it cuts. named: each with its value. Raises
        PlanError for a dim that the value does not have."""
        dims, cuts = dict(self.plan.cut), dict[str, int]()
        for local, value in named:
            if value in dims:
                rank = len(self.template.type_of(value).shape)
                if dims[value] >= rank:
                    raise PlanError(
                        f"the plan cuts {self.template.name}.{value}, of {rank} dims, along dim {dims[value]}"
                    )
                cuts[local] = dims[value]
        return cuts


class Body:
    """The lines so far. held: local name and spec of every value and decision point that the function has."""

    def __init__(self, planned: PlannedTemplate) -> None:
        self.planned, self.template = planned, planned.template
        self.lines: list[Line] = []
        self.names = Names()
        self.held: dict[str, tuple[str, Spec]] = {}
        self._widened: dict[str, str] = {}
        self._converter = Converter(planned.pricer, self.names, self.lines.append)

    def argument(self, key: str, stem: str, spec: Spec) -> str:
        """Local name of an argument of the function, which holds a value or decision point."""
        name = self.names.fresh(stem)
        self.held[key] = (name, spec)
        return name

    def given(self, value: str, phase: str) -> str:
        """Local name of a placeholder as it is given; it is held as the plan wants it."""
        wanted = self.planned.spec(value)
        given = self.planned.plan.given(value)
        if given == wanted:
            return self.argument(value, value, wanted)
        name = self.argument(f"{value}{GIVEN}", value, given)
        self.held[value] = (self._converted(name, value, given, wanted, phase, ""), wanted)
        return name

    def hub(self, name: str, phase: str, source: str) -> tuple[str, Spec]:
        """Local name and spec of a decision point (or plain value), converted or made again on first use."""
        if name in self.held:
            return self.held[name]
        if name not in self.planned.flow.hubs:
            self.again(name)
            return self.held[name]
        hub = self.planned.flow.hubs[name]
        local, before = self.hub(hub.source or hub.value, phase, source)
        wanted = self.planned.plan.specs[name]
        self.held[name] = (self._converted(local, hub.value, before, wanted, phase, source), wanted)
        return self.held[name]

    def _converted(self, local: str, value: str, before: Spec, wanted: Spec, phase: str, source: str) -> str:
        """Name of a value in the spec wanted; a parameter's gradient is made wide before it is reduced."""
        type_, wide = self.template.type_of(value), self.planned.wide.get(value)
        if wide is not None and set(before.partial) - set(wanted.partial):
            if local not in self._widened:
                self._widened[local] = self.names.fresh(f"{value}_cast")
                self.lines.append(cast(local, self._widened[local], wide, before, phase, source))
            local, type_ = self._widened[local], wide
        return self._converter.convert(local, value, type_, before, wanted, phase, source)

    def result(self, value: str | None) -> Result:
        """Local name and spec of a gradient that the function returns."""
        if value is None:
            return None, None
        return self.held[value] if value in self.held else self.hub(value, "B", "")

    def successor(self) -> tuple[Body, tuple[str, ...]]:
        """A body that goes on with what this one holds, as arguments of the same names; and these names."""
        following = Body(self.planned)
        for key, (name, spec) in self.held.items():
            following.held[key] = (name, spec)
            following.names.take(name)
        return following, tuple(name for name, _ in self.held.values())

    def function(self, name: str, args: Sequence[str], returns: Iterable[str | None], saved: Iterable[str]) -> Function:
        """The finished function; types are those of the values that its arguments, or the list `saved`, hold."""
        described = {*args, *saved}
        types = {
            local: (self.template.type_of(self.planned.value_of(key)), spec)
            for key, (local, spec) in self.held.items()
            if local in described
        }
        return Function(name, tuple(args), tuple(self.lines), tuple(returns), types)

    def again(self, value: str) -> None:
        """Run the op that makes a value again, and first what it reads; values that are held stay as they are."""
        self.op(resolve(self.template.nodes[value])[0], again=True)

    def op(self, node: fx.Node, again: bool = False) -> None:
        """The op as a line, after the conversions of its operands. again: it runs for the second time, in backward.
        Raises PlanError for a strategy that the op's rule does not have."""
        planned, mesh = self.planned, self.planned.pricer.mesh
        call = self.template.op_calls[node.name]
        rule = planned.rules.rule(call)
        strategy = planned.strategy(node.name)
        if not rule.allows(strategy, mesh):
            raise PlanError(
                f"{self.template.name}.{node.name}: strategy {strategy} is not valid for the rule `{rule}` on mesh "
                f"{mesh}; possible per axis: {', '.join(c or '(none)' for c in rule.choices())}"
            )
        phase, source = node.meta["phase"], node.meta["source"]
        if again and node.name not in planned.recast:
            phase, source = "B", f"recomputed: {source or node.name}"
        operands: list[str] = []
        for i, operand in enumerate(operand_nodes(node)):
            local, spec = self.hub(planned.flow.reads[node.name, i] or operand.name, phase, source)
            wanted = rule.operand_spec(i, strategy, mesh)
            assert wanted is not None
            operands.append(self._converted(local, operand.name, spec, wanted, phase, source))
        try:
            changes = told(Block(call, rule, strategy, mesh))
        except ShardingError as error:
            raise PlanError(f"{self.template.name}.{node.name}: {error}") from error
        arguments = local_arguments(node, operands, changes)
        results = {
            i: value
            for i, value in value_names(node).items()
            if not again or value in planned.recompute or value in planned.recast
        }
        count = len(call.results)
        outs = tuple(self.names.fresh(results[i]) if i in results else "_" for i in range(count))
        specs = tuple(rule.result_spec(i, strategy, mesh) for i in range(count))
        for i, value in results.items():
            result_spec = specs[i]
            assert result_spec is not None
            self.held[value] = (outs[i], result_spec)
        self.lines.append(
            Compute(
                call.op,
                arguments,
                node.name,
                outs=outs,
                types=result_types(node),
                specs=specs,
                phase=phase,
                source=source,
                carried=carried_choices(strategy, mesh),
                sent=sent_by(call, rule, strategy, mesh, planned.pricer.device.runs_as),
            )
        )


def local_arguments(node: fx.Node, operands: list[str], changes: dict[str, Any]) -> dict[str, Any]:
    """Schema arguments with local names for tensors and the block's changes; random sites become keys."""
    order = iter(operands)

    def place(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return Ref(next(order))
        if isinstance(arg, (list, tuple)):
            return [place(a) for a in arg]
        return arg

    args = tuple(place(a) for a in node.args)
    kwargs = {k: place(v) for k, v in node.kwargs.items()}
    bound = bind(node.target, args, kwargs) | changes
    definition = find(op_name(node.target))
    if definition is not None and definition.random:
        site = bound.pop("site")
        if site != -1:
            bound["key"] = Site(site)
    return bound
