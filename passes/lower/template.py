"""Lower one template: its ops on blocks, with a conversion wherever producer and consumer disagree.

What backward reads is returned by the forward function in the spec the plan holds it in; what the plan recomputes is
made again by backward just before its first use there, under the same strategies (`autopar.passes.rules.recomputation`). Where
B and W are apart, what W reads of B's values is returned by the backward function.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.bill import CallBill, Purpose, call_seconds
from autopar.errors import PlanError, ShardingError
from autopar.ir.fusion import without_widening
from autopar.ir.lines import Compute, Convert, Function
from autopar.ir.lowered import LoweredTemplate
from autopar.ir.program import Template, operand_nodes, resolve
from autopar.ir.spec import Spec
from autopar.passes.lower.body import Body, PlannedTemplate, Result
from autopar.passes.lower.overlap import overlapped, sends_beside
from autopar.passes.lower.pieces import in_pieces
from autopar.passes.price.bills import launches, template_bill, template_seconds
from autopar.passes.price.link_clock import LinkClock, op_seconds, run_line
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.hubs import phase_is_late
from autopar.plan import TemplatePlan
from autopar.runtime.kernels.kernels import has_widening_kernels

_WHOLE = Purpose("whole")
"""The purpose of messages that are not in pieces, in a bound."""


@dataclass(frozen=True)
class _Front:
    """The forward function, the specs of its outputs, and what it saves: (decision point or value, local name, spec)."""

    function: Function
    outputs: tuple[Spec, ...]
    saved: tuple[tuple[str, str, Spec], ...] = ()


@dataclass(frozen=True)
class _Back:
    """The backward function, and the one of the weights with what it reads of backward's values (`later`)."""

    function: Function
    input_grads: tuple[Spec | None, ...]
    param_grads: tuple[Spec | None, ...]
    again_params: tuple[int, ...]
    weights: Function | None = None
    later: tuple[str, ...] = ()


def lower_in_order(
    template: Template, plan: TemplatePlan, pricer: Pricer, rules: RuleBook, backward: bool, split: bool = False
) -> LoweredTemplate:
    """Forward and backward functions of a template under its plan, whole and in the order of its ops, whatever overlap and pieces
    the plan asks for. split: B and W apart. Raises PlanError."""
    return _lowered(PlannedTemplate(template, replace(plan, pieces=1, overlap=""), pricer, rules), backward, split)


def lower_template(
    in_order: LoweredTemplate, template: Template, plan: TemplatePlan, pricer: Pricer, rules: RuleBook
) -> LoweredTemplate:
    """The functions with the overlap that the plan asks for, whole. in_order: as of `lower_in_order`."""
    if not any(sends_beside(line, pricer.mesh.sizes) for function in in_order.functions for line in function.lines):
        return in_order  # nothing travels that lines could run beside
    return _with_overlap(in_order, template, plan, pricer, rules)


def lower_in_pieces(
    in_order: LoweredTemplate, whole: LoweredTemplate, pieces: LoweredTemplate, planned: PlannedTemplate
) -> LoweredTemplate:
    """The functions with the overlap and in the pieces that the plan asks for; whole where pieces are no faster, unless the plan
    insists. in_order, whole: as of `lower_in_order` and `lower_template`; pieces: as of `lines_in_pieces`."""
    template, plan, pricer, rules = planned.template, planned.plan, planned.pricer, planned.rules
    if plan.insists:
        return _with_overlap(pieces, template, plan, pricer, rules)
    bill = template_bill(whole, plan, template, pricer, rules)
    to_beat_s = call_seconds(bill, pricer.software).total_s
    if call_seconds(least_bill(bill, in_order, pieces, planned), pricer.software).total_s >= to_beat_s:
        return whole
    moved = _with_overlap(pieces, template, plan, pricer, rules)
    faster = sum(template_seconds(moved, plan, template, pricer, rules).values()) < to_beat_s
    return moved if faster else whole


def least_bill(
    bill: CallBill, in_order: LoweredTemplate, pieces: LoweredTemplate, planned: PlannedTemplate
) -> CallBill:
    """A bill that a call in pieces does not go below, in whichever order its lines are. bill: of the whole one with overlap;
    in_order, pieces: its lines as of `lower_in_order` and `lines_in_pieces`.

    Pieces of an op take as long as all of it at least, and each is launched; and of what the whole one waits for they hide no
    more than the messages that travel in pieces."""
    software = planned.pricer.software
    sides = (
        (in_order.forward, pieces.forward),
        (in_order.backward, pieces.backward),
        (in_order.weights, pieces.weights),
    )
    works = []
    for work, (function, cut) in zip(bill.works, sides, strict=True):
        if function is None or cut is None:
            works.append(work)
            continue
        exposed_s = work.non_overlapped_s(software) - _cut_s(function, cut, planned)
        kernels = max(work.launches, launches(cut, planned.template))
        works.append(replace(work, launches=kernels, messages={_WHOLE: exposed_s} if exposed_s > 0 else {}))
    host_s = sum(software.launch_host_s * work.launches + work.host_s for work in works)
    F, B, W = works
    return CallBill(F, B, W, host_s)


def _cut_s(in_order: Function, pieces: Function, planned: PlannedTemplate) -> float:
    """Seconds of the messages of a function that are in pieces, as if they were whole and alone."""
    uncut, clock = {id(line) for line in pieces.lines}, LinkClock(0.0)
    op_s = op_seconds(planned.plan, planned.template, planned.pricer, planned.rules)
    held = in_order.local_bytes(planned.pricer.mesh)
    for line in in_order.lines:
        if id(line) not in uncut and (isinstance(line, Convert) or (isinstance(line, Compute) and line.sent)):
            run_line(clock, line, held, planned.pricer, op_s)
    return sum(clock.exposed.values()) + clock.hidden_s


def _with_overlap(
    in_order: LoweredTemplate, template: Template, plan: TemplatePlan, pricer: Pricer, rules: RuleBook
) -> LoweredTemplate:
    op_s = op_seconds(plan, template, pricer, rules)
    moved = (
        None if function is None else overlapped(function, plan, pricer, op_s)
        for function in (in_order.backward, in_order.weights)
    )
    backward, weights = moved
    return replace(
        in_order, forward=overlapped(in_order.forward, plan, pricer, op_s), backward=backward, weights=weights
    )


def lines_in_pieces(in_order: LoweredTemplate, planned: PlannedTemplate) -> LoweredTemplate:
    """The functions in pieces of the batch, as many as the plan says, before lines change places. in_order: as of
    `lower_in_order`. Raises PlanError."""
    template, back = planned.template, in_order.backward
    read = [*(p for p in template.params if f"{p}@use" in planned.flow.hubs), *template.inputs]
    starts = planned.cuts(zip(in_order.forward.args, read, strict=True))
    taken = () if back is None else (*back.arg_types, *(out for line in back.lines for out in line.outs))
    forward, parts = in_pieces(in_order.forward, planned, starts, {}, frozenset(in_order.saved), taken)
    if back is None:
        return replace(in_order, forward=forward)
    params = (template.params[i] for i in (*in_order.late_params, *in_order.again_params))
    args = zip(back.args, (*params, *(t for t in template.tangents if t is not None)), strict=True)
    held = zip(in_order.saved, map(planned.value_of, planned.recomputation.kept.values()), strict=True)
    backward, _ = in_pieces(back, planned, planned.cuts((*held, *args)), parts)
    saved = tuple(one for name in in_order.saved for one in (parts[name].names if name in parts else (name,)))
    return replace(in_order, forward=forward, backward=backward, saved=saved)


def _lowered(planned: PlannedTemplate, backward: bool, split: bool) -> LoweredTemplate:
    """The functions, whole and in order."""
    template, plan = planned.template, planned.plan
    late_params = tuple(i for i, p in enumerate(template.params) if f"{p}@late" in planned.flow.hubs)
    try:
        front = _forward(planned, backward)
        if not backward:
            return LoweredTemplate(
                template.name,
                template.planned_as,
                front.function,
                None,
                (),
                template.random,
                front.outputs,
                (),
                (),
                late_params,
            )
        back = _backward(planned, front, late_params, split)
    except ShardingError as error:
        raise PlanError(f"template {template.name}: {error}") from error
    return LoweredTemplate(
        template.name,
        template.planned_as,
        front.function,
        back.function,
        tuple(name for _, name, _ in front.saved),
        template.random,
        front.outputs,
        back.input_grads,
        back.param_grads,
        late_params,
        back.weights,
        back.later,
        back.again_params,
        frozenset(planned.recomputation.kept),
        _parked(planned, front),
        plan.offload_tier if plan.offload else "",
    )


def _forward(planned: PlannedTemplate, keeps: bool) -> _Front:
    """keeps: what backward reads is saved."""
    template, body = planned.template, Body(planned)
    args: list[str] = []
    for param in template.params:
        if f"{param}@use" in planned.flow.hubs:
            args.append(body.argument(f"{param}@use", param, planned.spec(f"{param}@use")))
    for value in template.inputs:
        args.append(body.given(value, "F"))
    for node in template.ops:
        if not phase_is_late(node):
            body.op(node)
    outputs = [body.held[o] for o in template.outputs]
    saved = tuple((key, *body.hub(key, "F", "")) for key in planned.recomputation.kept.values()) if keeps else ()
    function = body.function(f"{template.name}_forward", args, (name for name, _ in outputs), ())
    function = _narrowed(function, planned, [name for _, name, _ in saved])
    return _Front(function, tuple(spec for _, spec in outputs), saved)


def _narrowed(function: Function, planned: PlannedTemplate, keeps: Collection[str] = ()) -> Function:
    """The function without casts that its readers make themselves. keeps: values that outlive it."""
    return without_widening(function, keeps) if has_widening_kernels(planned.pricer.device.runs_as) else function


def _backward(planned: PlannedTemplate, front: _Front, late_params: tuple[int, ...], split: bool) -> _Back:
    template, body = planned.template, Body(planned)
    for key, name, spec in front.saved:
        body.argument(key, name, spec)
    again_params = tuple(i for i in planned.recomputation.params if not _gathered_alike(planned, template.params[i]))
    args = _backward_arguments(planned, body, late_params, again_params)
    for node in template.ops:
        if phase_is_late(node) and not (split and node.meta["phase"] == "W"):
            body.op(node)
    input_grads = [body.result(g) for g in template.input_grads]
    weights: Function | None = None
    later: tuple[str, ...] = ()
    if split:
        returned = input_grads
        weights, later, param_grads = _weights(planned, body)
    else:
        param_grads = [body.result(g) for g in template.param_grads]
        returned = [*input_grads, *param_grads]
    saved = [name for _, name, _ in front.saved]
    function = body.function(f"{template.name}_backward", args, (name for name, _ in returned), saved)
    return _Back(
        _narrowed(function, planned, later),
        tuple(spec for _, spec in input_grads),
        tuple(spec for _, spec in param_grads),
        again_params,
        weights,
        later,
    )


def _backward_arguments(
    planned: PlannedTemplate, body: Body, late_params: tuple[int, ...], again_params: tuple[int, ...]
) -> list[str]:
    """Arguments of backward beside what is saved: parameters as its own ops want them, those that ops which run again want
    otherwise, and the gradients of the outputs."""
    template, args = planned.template, []
    for i in late_params:
        late = f"{template.params[i]}@late"
        args.append(body.argument(late, template.params[i], planned.spec(late)))
    for i in planned.recomputation.params:
        use = f"{template.params[i]}@use"
        if i in again_params:
            args.append(body.argument(use, template.params[i], planned.spec(use)))
        else:
            body.held[use] = body.held[f"{template.params[i]}@late"]
    for tangent in template.tangents:
        if tangent is not None:
            args.append(body.given(tangent, "B"))
    return args


def _gathered_alike(planned: PlannedTemplate, param: str) -> bool:
    """Whether backward's own ops want a parameter as forward's do."""
    late = f"{param}@late"
    return late in planned.flow.hubs and planned.spec(late) == planned.spec(f"{param}@use")


def _weights(planned: PlannedTemplate, body: Body) -> tuple[Function, tuple[str, ...], list[Result]]:
    """The function of the parameters' gradients, the names that it reads of backward's values, and what it returns."""
    template = planned.template
    _make_again_ahead(planned, body)
    following, names = body.successor()
    for value in planned.recast:  # the narrow value is kept for W, and cast again there
        following.held.pop(value, None)
        following.held.pop(f"{value}@use", None)
    for node in template.ops:
        if node.meta["phase"] == "W":
            following.op(node)
    param_grads = [following.result(g) for g in template.param_grads]
    read = {name for line in following.lines for name in line.reads()} | {name for name, _ in param_grads}
    later = tuple(dict.fromkeys(name for name in names if name in read))
    if not later and any(name is not None for name, _ in param_grads):
        later = _smallest(names, body)  # a call has its turn in W by what B leaves it, gradients that are constants too
    function = following.function(f"{template.name}_weights", later, (name for name, _ in param_grads), ())
    return _narrowed(function, planned), later, param_grads


def _smallest(names: Sequence[str], body: Body) -> tuple[str, ...]:
    """The name of the value of the fewest bytes that backward holds, if it holds any."""
    types = {name: body.template.type_of(body.planned.value_of(key)) for key, (name, _) in body.held.items()}
    sized = {name: type_.nbytes for name in names if (type_ := types[name]) is not None}
    return (min(sized, key=lambda name: sized[name]),) if sized else ()


def _make_again_ahead(planned: PlannedTemplate, body: Body) -> None:
    """Make again in B what W alone reads but needs a parameter: gathered parameters do not wait for W."""
    template, params = planned.template, set(planned.template.params)

    def needs_param(value: str, seen: set[str]) -> bool:
        if value in params:
            return True
        if value in seen or value not in planned.recompute or value in body.held:
            return False
        seen.add(value)
        return any(needs_param(n.name, seen) for n in operand_nodes(resolve(template.nodes[value])[0]))

    for node in template.ops:
        if node.meta["phase"] == "W":
            for operand in operand_nodes(node):
                value = operand.name
                if value in planned.recompute and value not in body.held and needs_param(value, set()):
                    body.again(value)


def _parked(planned: PlannedTemplate, front: _Front) -> tuple[int, ...]:
    """Places among the saved values of those that the plan parks. Names that are not kept have nothing to park. Raises
    PlanError for a name that is no value of the template."""
    template, parked = planned.template, planned.plan.offload
    unknown = [v for v in parked if v not in template.nodes or v in template.params]
    if unknown:
        raise PlanError(
            f"the plan offloads {template.name}.{unknown[0]}, which is no value of this template; it is for another model"
        )
    forms = {planned.recomputation.kept[v] for v in parked if v in planned.recomputation.kept}
    return tuple(place for place, (form, _, _) in enumerate(front.saved) if form in forms)
