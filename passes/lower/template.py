"""Lower one template: its ops on blocks, with a conversion wherever producer and consumer disagree.

Decision points (`autopar.passes.rules.hubs`) become conversions at their first reader. What backward reads is returned by
the forward function in the spec the plan holds it in; what the plan recomputes is made again by backward just before its
first use there, under the same strategies (`autopar.passes.rules.recomputation`).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.errors import PlanError, ShardingError
from autopar.ir.call import bind
from autopar.ir.lowered import Function, Line, LoweredTemplate, Ref
from autopar.ir.program import RANDOM_OPS, Template, op_name, operand_nodes, resolve, result_types
from autopar.ir.spec import Spec
from autopar.ops.registry import Block, find
from autopar.passes.lower.convert import Converter, Names
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.hubs import flow, phase_is_late
from autopar.passes.rules.recomputation import recomputation
from autopar.passes.rules.structure import value_names
from autopar.passes.rules.widening import late_upcasts, wide_gradients
from autopar.plan import TemplatePlan


class _Body:
    """Lines of one function under construction, and where every value and hub is held in it."""

    def __init__(self, owner: _TemplateLowering) -> None:
        self.owner = owner
        self.lines: list[Line] = []
        self.names = Names()
        self.held: dict[str, tuple[str, Spec]] = {}
        self.widened: dict[str, str] = {}
        self.converter = Converter(owner.pricer, self.names, self.lines.append)

    def argument(self, key: str, stem: str, spec: Spec) -> str:
        name = self.names.fresh(stem)
        self.held[key] = (name, spec)
        return name

    def hub(self, name: str, phase: str, source: str) -> tuple[str, Spec]:
        """Local name and spec of a hub (or plain value), converted or made again on first use."""
        if name in self.held:
            return self.held[name]
        if name not in self.owner.flow.hubs:
            self.again(name)
            return self.held[name]
        hub = self.owner.flow.hubs[name]
        held, before = self.hub(hub.source or hub.value, phase, source)
        wanted = self.owner.plan.specs[name]
        made = self._converted(held, hub.value, before, wanted, phase, source)
        self.held[name] = (made, wanted)
        return self.held[name]

    def _converted(self, held: str, value: str, before: Spec, wanted: Spec, phase: str, source: str) -> str:
        """Name of a value in the spec wanted; a parameter's gradient is made wide before it is reduced."""
        type_, wide = self.owner.template.type_of(value), self.owner.wide.get(value)
        if wide is not None and set(before.partial) - set(wanted.partial):
            if held not in self.widened:
                self.widened[held] = self.names.fresh(f"{value}_cast")
                cast = {"self": Ref(held), "dtype": wide.dtype}
                self.lines.append(
                    Line((self.widened[held],), "aten._to_copy.default", (), cast, (wide,), (before,), phase, source)
                )
            held, type_ = self.widened[held], wide
        return self.converter.convert(held, value, type_, before, wanted, phase, source)

    def result(self, value: str | None) -> tuple[str | None, Spec | None]:
        """Local name and spec of a gradient that the function returns."""
        if value is None:
            return None, None
        return self.held[value] if value in self.held else self.hub(value, "B", "")

    def successor(self) -> tuple[_Body, tuple[str, ...]]:
        """A body that goes on with what this one holds, as arguments of the same names; and these names."""
        following = _Body(self.owner)
        for key, (name, spec) in self.held.items():
            following.held[key] = (name, spec)
            following.names.take(name)
        return following, tuple(name for name, _ in self.held.values())

    def function(self, name: str, args: list[str], results: Any, saved: Any) -> Function:
        """The finished function; types of its arguments are those of the values they hold."""
        wanted = {*args, *(n for _, n, _ in saved)}
        types = {n: (self.owner.template.type_of(k.split("@")[0]), s) for k, (n, s) in self.held.items() if n in wanted}
        return Function(name, tuple(args), tuple(self.lines), tuple(n for n, _ in results), types)

    def again(self, value: str) -> None:
        """Run the op that makes a value again, and first what it reads; values that are held stay as they are."""
        node = resolve(self.owner.template.nodes[value])[0]
        self.op(node, again=True)

    def op(self, node: fx.Node, again: bool = False) -> None:
        """The op as a line, after the conversions of its operands. again: it runs for the second time, in backward."""
        owner = self.owner
        call = owner.template.op_calls[node.name]
        rule = owner.rules.rule(call)
        strategy = owner.strategy(node.name)
        if not rule.allows(strategy, owner.pricer.mesh):
            raise PlanError(
                f"{owner.template.name}.{node.name}: strategy {strategy} is not valid for the rule `{rule}` on mesh "
                f"{owner.pricer.mesh}; possible per axis: {', '.join(c or '(none)' for c in rule.choices())}"
            )
        phase, source = node.meta["phase"], node.meta["source"]
        if again and node.name not in owner.recast:
            phase, source = "B", f"recomputed: {source or node.name}"
        operands: list[str] = []
        for i, operand in enumerate(operand_nodes(node)):
            held, spec = self.hub(owner.flow.reads[node.name, i] or operand.name, phase, source)
            wanted = rule.operand_spec(i, strategy, owner.pricer.mesh)
            assert wanted is not None
            operands.append(self._converted(held, operand.name, spec, wanted, phase, source))
        block = Block(call, rule, strategy, owner.pricer.mesh)
        definition = find(call.op)
        changes = definition.localize(block) if definition is not None and definition.localize else {}
        args = _arguments(node, operands, changes)
        results = {i: v for i, v in value_names(node).items() if not again or v in owner.recompute or v in owner.recast}
        count = len(call.results)
        outs = tuple(self.names.fresh(results[i]) if i in results else "_" for i in range(count))
        specs = tuple(rule.result_spec(i, strategy, owner.pricer.mesh) for i in range(count))
        for i, value in results.items():
            made = specs[i]
            assert made is not None
            self.held[value] = (outs[i], made)
        self.lines.append(Line(outs, call.op, (), args, result_types(node), specs, phase, source, node.name))


def _arguments(node: fx.Node, operands: list[str], changes: dict[str, Any]) -> dict[str, Any]:
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
    if op_name(node.target) in RANDOM_OPS:
        site = bound.pop("site")
        if site != -1:
            bound["key"] = Site(site)
    return bound


class Site:
    """Place of a random op inside its template; emitted as a key of the current step, microbatch and call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Site({self.number})"


class _TemplateLowering:
    def __init__(self, template: Template, plan: TemplatePlan, pricer: Pricer, rules: RuleBook) -> None:
        self.template, self.plan, self.pricer, self.rules = template, plan, pricer, rules
        self.flow = flow(template)
        self.recompute = frozenset(plan.recompute)
        self.recomputation = recomputation(template, self.flow, plan.recompute)
        self.wide = wide_gradients(template)
        self.recast = late_upcasts(template)

    def strategy(self, node: str) -> tuple[str, ...]:
        try:
            return self.plan.strategies[node]
        except KeyError:
            raise PlanError(
                f"the plan has no strategy for {self.template.name}.{node}; it is for another model"
            ) from None

    def spec(self, name: str) -> Spec:
        try:
            return self.plan.specs[name]
        except KeyError:
            raise PlanError(f"the plan has no spec for {self.template.name}.{name}; it is for another model") from None


def lower_template(
    template: Template, plan: TemplatePlan, pricer: Pricer, rules: RuleBook, backward: bool, split: bool = False
) -> LoweredTemplate:
    """Forward and backward functions of a template under its plan. split: B and W apart. Raises PlanError."""
    owner = _TemplateLowering(template, plan, pricer, rules)
    try:
        return _lower(owner, backward, split)
    except ShardingError as error:
        raise PlanError(f"template {template.name}: {error}") from error


def _lower(owner: _TemplateLowering, backward: bool, split: bool) -> LoweredTemplate:
    template, fl = owner.template, owner.flow
    forward = _Body(owner)
    args: list[str] = []
    for param in template.params:
        if f"{param}@use" in fl.hubs:
            args.append(forward.argument(f"{param}@use", param, owner.spec(f"{param}@use")))
    for value in template.inputs:
        args.append(forward.argument(value, value, owner.spec(value)))
    for node in template.ops:
        if not phase_is_late(node):
            forward.op(node)
    outputs = [forward.held[o] for o in template.outputs]
    saved: list[tuple[str, str, Spec]] = []
    if backward:
        for key in owner.recomputation.kept.values():
            name, spec = forward.hub(key, "F", "")
            saved.append((key, name, spec))
    types = {a: (template.type_of(k.split("@")[0]), s) for k, (a, s) in forward.held.items() if a in args}
    front = Function(f"{template.name}_forward", tuple(args), tuple(forward.lines), tuple(n for n, _ in outputs), types)
    late_params = tuple(i for i, p in enumerate(template.params) if f"{p}@late" in fl.hubs)
    random = template.random
    out_specs = tuple(s for _, s in outputs)
    if not backward:
        return LoweredTemplate(template.name, front, None, (), random, out_specs, (), (), late_params)
    body = _Body(owner)
    for key, name, spec in saved:
        body.argument(key, name, spec)
    back_args = [
        body.argument(f"{template.params[i]}@late", template.params[i], owner.spec(f"{template.params[i]}@late"))
        for i in late_params
    ]
    again_params = tuple(i for i in owner.recomputation.params if not _gathered_alike(owner, template.params[i]))
    for i in owner.recomputation.params:
        use = f"{template.params[i]}@use"
        if i in again_params:
            back_args.append(body.argument(use, template.params[i], owner.spec(use)))
        else:
            body.held[use] = body.held[f"{template.params[i]}@late"]
    for tangent in template.tangents:
        if tangent is not None:
            back_args.append(body.argument(tangent, tangent, owner.spec(tangent)))
    for node in template.ops:
        if phase_is_late(node) and not (split and node.meta["phase"] == "W"):
            body.op(node)
    input_grads = [body.result(g) for g in template.input_grads]
    later: tuple[str, ...] = ()
    if not split:
        param_grads = [body.result(g) for g in template.param_grads]
        back = body.function(f"{template.name}_backward", back_args, (*input_grads, *param_grads), saved)
        after = None
    else:
        _ahead(owner, body)
        last, known = body.successor()
        for value in owner.recast:  # the narrow value is kept for W, and cast again there
            last.held.pop(value, None)
            last.held.pop(f"{value}@use", None)
        for node in template.ops:
            if node.meta["phase"] == "W":
                last.op(node)
        param_grads = [last.result(g) for g in template.param_grads]
        read = {n for line in last.lines for n in line.reads()} | {n for n, _ in param_grads}
        later = tuple(dict.fromkeys(n for n in known if n in read))
        after = last.function(f"{template.name}_weights", list(later), param_grads, ())
        back = body.function(f"{template.name}_backward", back_args, input_grads, saved)
    return LoweredTemplate(
        template.name,
        front,
        back,
        tuple(name for _, name, _ in saved),
        random,
        out_specs,
        tuple(s for _, s in input_grads),
        tuple(s for _, s in param_grads),
        late_params,
        after,
        later,
        again_params,
        frozenset(owner.recomputation.kept),
        _parked(owner, [key for key, _, _ in saved]),
        plan_tier(owner.plan),
    )


def plan_tier(plan: TemplatePlan) -> str:
    """The tier that saved values go to, if any do."""
    return plan.offload_tier if plan.offload else ""


def _parked(owner: _TemplateLowering, forms: list[str]) -> tuple[int, ...]:
    """Places among the saved values of those that the plan parks. Names that are not kept have nothing to park."""
    unknown = [v for v in owner.plan.offload if v not in owner.template.nodes or v in owner.template.params]
    if unknown:
        raise PlanError(
            f"the plan offloads {owner.template.name}.{unknown[0]}, which is no value of this template; it is for another model"
        )
    chosen = {owner.recomputation.kept[v] for v in owner.plan.offload if v in owner.recomputation.kept}
    return tuple(place for place, form in enumerate(forms) if form in chosen)


def _gathered_alike(owner: _TemplateLowering, param: str) -> bool:
    """Whether backward's own ops want a parameter as forward's do."""
    late = f"{param}@late"
    return late in owner.flow.hubs and owner.spec(late) == owner.spec(f"{param}@use")


def _ahead(owner: _TemplateLowering, body: _Body) -> None:
    """Make again in B what W alone reads but needs a parameter: gathered parameters do not wait for W."""
    template, params = owner.template, set(owner.template.params)

    def needs_param(value: str, seen: set[str]) -> bool:
        if value in params:
            return True
        if value in seen or value not in owner.recompute or value in body.held:
            return False
        seen.add(value)
        return any(needs_param(n.name, seen) for n in operand_nodes(resolve(template.nodes[value])[0]))

    for node in template.ops:
        if node.meta["phase"] == "W":
            for operand in operand_nodes(node):
                value = operand.name
                if value in owner.recompute and value not in body.held and needs_param(value, set()):
                    body.again(value)
