"""The bill of a lowered stage (`autopar.costmodel.bill`): what its lines compute, pass over, launch and send.

A template's functions are billed once, however often they are called. Between the calls there are conversions, casts of
parameters, and the gathers of what is stored otherwise than it is used: these start one call ahead, so that they may hide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.costmodel.bill import NOTHING, CallBill, ParameterTraffic, Purpose, StageBill, Work, call_seconds
from autopar.ir.lines import Compute, Convert, Function, GoOn, Join, Line, Prefetch, Start, TemplateCall, Wait
from autopar.ir.lowered import LoweredStage, LoweredTemplate
from autopar.ir.program import Template
from autopar.ir.setting import Setting
from autopar.ops.registry import find
from autopar.passes.price.fusion import fused_bytes
from autopar.passes.price.lines import (
    Dispatch,
    Message,
    cast_seconds,
    conversion_copied_s,
    dispatches,
    gather_alone_s,
    gradient_messages,
    line_copied_s,
    line_messages,
    optimizer_s,
    reduce_seconds,
    regather_messages,
    regather_seconds,
)
from autopar.passes.price.link_clock import LinkClock, joined_s, op_seconds, run_line, strategy_of
from autopar.passes.price.parameter_clock import shown_parameters
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.plan import TemplatePlan


def template_bill(
    lowered: LoweredTemplate, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> CallBill:
    """One call's forward, backward and weights on a block, made once for all stages that share them."""

    def make() -> CallBill:
        functions = (lowered.forward, lowered.backward, lowered.weights)
        F, B, W = (_function_work(function, plan, template, pricer, rules) for function in functions)
        return CallBill(F, B, W, _host_s(pricer, F, B, W))

    return pricer.memo.get((template_bill, lowered, pricer), make)


def template_seconds(
    lowered: LoweredTemplate, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> dict[str, float]:
    """Seconds of one call's forward, backward and weights (F, B, W) on a block."""
    return seconds_by_action(template_bill(lowered, plan, template, pricer, rules), pricer)


def seconds_by_action(call: CallBill, pricer: Pricer) -> dict[str, float]:
    """Seconds of a call's F, B and W."""
    return dict(zip("FBW", call_seconds(call, pricer.software)[:3], strict=True))


def _host_s(pricer: Pricer, *works: Work) -> float:
    return sum(pricer.software.launch_host_s * work.launches + work.host_s for work in works)


def _function_work(
    function: Function | None, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> Work:
    """The ops of a template's function on their blocks, and its conversions."""
    if function is None:
        return NOTHING
    held = function.local_bytes(pricer.mesh)
    launch_s = pricer.device.launch_overhead_s
    computed_s = apart_s = host_s = 0.0
    launches = 0
    op_s, clock = op_seconds(plan, template, pricer, rules), LinkClock(pricer.least_exposed)
    for line in function.lines:
        begun = line.line if isinstance(line, Start) else line
        kernel, grouped = passes_over_memory(begun), None
        match begun:
            case Convert():
                computed_s += conversion_copied_s(begun, held, pricer)
            case Join():
                apart_s += joined_s(begun, held, pricer)
            case Compute(node=node) if node in template.op_calls:
                call, rule = template.op_calls[node], rules.rule(template.op_calls[node])
                strategy, prices = strategy_of(begun, plan, pricer)
                grouped = prices.grouped(call, rule, strategy)
                host_s += pricer.software.mixture_host_s(grouped.groups) / 2 if grouped is not None else 0.0
                if kernel is not None:
                    launches += 1
                    computed_s += 0.0 if kernel else op_s(begun) - launch_s
                    apart_s += op_s(begun) if kernel else launch_s
                if grouped is not None and line is begun and pricer.software.keeps_rows:
                    clock.compute(op_s(begun))
                    for message in dispatches(call, rule, strategy, grouped, prices.mesh):
                        clock.send(message.purpose, message.seconds(pricer))
                    continue
        run_line(clock, line, held, pricer, op_s)
    fused_s = fused_bytes(function, held, passes_over_memory) * pricer.copy_s
    return Work(computed_s, fused_s, apart_s, launches, clock.exposed, clock.hidden_s, host_s)


def passes_over_memory(line: Line) -> bool | None:
    """Whether a line is a pass over memory; None where it moves nothing."""
    if isinstance(line, (Convert, Start, GoOn, Wait)):
        return False
    if isinstance(line, Join):
        return True
    if not isinstance(line, Compute):
        return None
    if not is_kernel(line.op):
        return None
    definition = find(line.op)
    return definition is None or definition.work is None


def is_kernel(op: str) -> bool:
    """Whether an op runs a kernel, rather than show a value in another form."""
    definition = find(op)
    return definition is None or not definition.free


def _add(messages: dict[Purpose, float], sent: Iterable[Message | Dispatch], pricer: Pricer) -> None:
    for message in sent:
        messages[message.purpose] = messages.get(message.purpose, 0.0) + message.seconds(pricer)


# --- a stage


def stage_bill(stage: LoweredStage, calls: Mapping[str, CallBill], pricer: Pricer, setting: Setting) -> StageBill:
    """The bill of a stage on one rank, memory tiers left out. calls: the bills of its templates."""
    between = {action: _between(function, stage, pricer) for action, function in _actions(stage)}
    F, B, W = (between[action].work for action in "FBW")
    each_forward_s, each_backward_s = between["F"].gathers_s, between["B"].gathers_s + between["W"].gathers_s
    trained = [p for p in stage.parameters.values() if p.contributions]
    reduced_along = (m.axis for p in trained for m in gradient_messages(p, pricer.mesh))
    gathered_along = (m.axis for p in trained for m in regather_messages(p, pricer.mesh))
    reduce_s = sum(reduce_seconds(p, pricer) for p in trained) + pricer.rendezvous_s(reduced_along)
    gather_s = sum(regather_seconds(p, pricer) for p in trained) + pricer.rendezvous_s(gathered_along)
    early = _between(stage.prepare, stage, pricer)
    early_s = early.gathers_s + call_seconds(CallBill(early.work), pricer.software).F
    early_s += sum(
        times * seconds_by_action(calls[name], pricer)[action]
        for (name, action), times in _calls_of(stage.prepare).items()
    )
    shown = shown_parameters(stage, calls, pricer) if pricer.is_measured and stage.training else None
    return StageBill(
        ((CallBill(F, B, W), 1), *_call_bills(stage, calls, pricer)),
        ParameterTraffic(each_forward_s, each_backward_s, reduce_s, gather_s, shown),
        sum(optimizer_s(p, stage, pricer, setting) for p in trained),
        stage.microbatches * early_s,
    )


def _actions(stage: LoweredStage) -> tuple[tuple[str, Function | None], ...]:
    return (("F", stage.forward), ("B", stage.backward), ("W", stage.weights))


def _call_bills(stage: LoweredStage, calls: Mapping[str, CallBill], pricer: Pricer) -> list[tuple[CallBill, int]]:
    """The calls of a microbatch; some have no backward."""
    actions: dict[tuple[str, int], str] = {}
    for action, function in _actions(stage):
        for line in function.lines if function is not None else ():
            if isinstance(line, TemplateCall):
                actions[line.template, line.number] = actions.get((line.template, line.number), "") + action
    alike = Counter((name, made) for (name, _), made in actions.items())
    return [(_only(calls[name], made, pricer), times) for (name, made), times in alike.items()]


def _only(call: CallBill, actions: str, pricer: Pricer) -> CallBill:
    """A call that makes only some of its actions."""
    F, B, W = (work if action in actions else NOTHING for action, work in zip("FBW", call.works, strict=True))
    return CallBill(F, B, W, _host_s(pricer, F, B, W))


def _calls_of(function: Function | None) -> Counter[tuple[str, str]]:
    lines = function.lines if function is not None else ()
    return Counter((line.template, line.action) for line in lines if isinstance(line, TemplateCall))


@dataclass(frozen=True)
class _Between:
    """Costs between the calls of a function: its work, and seconds of the gathers of parameters alone."""

    work: Work = NOTHING
    gathers_s: float = 0.0


def _between(function: Function | None, stage: LoweredStage, pricer: Pricer) -> _Between:
    if function is None:
        return _Between()
    held = function.local_bytes(stage.mesh)
    messages: dict[Purpose, float] = {}
    copies_s = gathers_s = 0.0
    for line in function.lines:
        if isinstance(line, Prefetch):
            for gather in line.gathers:
                p = stage.parameters[gather.name]
                copies_s += cast_seconds(gather, p, pricer)
                gathers_s += gather_alone_s(gather, p, pricer)
            gathers_s += pricer.rendezvous_s(m.axis for m in line_messages(line, held, stage))
        elif not isinstance(line, TemplateCall):
            _add(messages, line_messages(line, held, stage), pricer)
            copies_s += line_copied_s(line, held, stage, pricer)
    return _Between(Work(copies_s, messages=messages), gathers_s)
