"""The bill of a lowered stage (`autopar.costmodel.bill`): what its lines compute, pass over, launch and send.

A template's functions are billed once, however often they are called. Between the calls there are conversions, casts of
parameters, and the gathers of what is stored otherwise than it is used: these start one call ahead, so that they may hide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.costmodel.bill import NOTHING, CallBill, ParameterTraffic, Purpose, StageBill, Work, call_seconds
from autopar.costmodel.software import CAST_BYTES, Software
from autopar.ir.lines import Compute, Convert, Function, GoOn, Join, Line, Start, Wait
from autopar.ir.lowered import LoweredStage, LoweredTemplate, StoredParameter
from autopar.ir.program import Template
from autopar.ir.resting import busiest_rank
from autopar.ir.setting import Setting
from autopar.ops.registry import find
from autopar.passes.price.frameworks import (
    AS_WRITTEN,
    AsRun,
    as_run,
    conversions,
    framework_traffic,
    is_along_sequence,
    made_whole,
)
from autopar.passes.price.fusion import fused_bytes
from autopar.passes.price.lines import (
    GATHER,
    conversion_copied_s,
    dispatches,
    extra_messages,
    gradient_messages,
    line_costs,
    narrow_seconds,
    optimizer_s,
    reduce_seconds,
    regather_messages,
    regather_seconds,
)
from autopar.passes.price.link_clock import LinkClock, joined_s, op_seconds, run_line, strategy_of
from autopar.passes.price.parameter_clock import shown_parameters
from autopar.passes.price.pricer import Pricer
from autopar.passes.price.side_by_side import SideBySide, side_by_side
from autopar.passes.rules.book import RuleBook
from autopar.plan import TemplatePlan


def template_bill(
    lowered: LoweredTemplate, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> CallBill:
    """One call's forward, backward and weights on a block, made once for all stages that share them."""

    def make() -> CallBill:
        forward, backward = lowered.forward, lowered.backward
        beside = side_by_side(forward, {} if forward is None else forward.local_bytes(pricer.mesh), pricer)
        if beside is not None and not pricer.software.recompute_stops:
            backward = made_whole(forward, backward, plan.recompute)
        functions = ((forward, None), (backward, forward), (lowered.weights, None))
        F, B, W = (_function_work(one, before, plan, template, pricer, rules, beside) for one, before in functions)
        return CallBill(F, B, W, _host_s(pricer, F, B, W))

    return pricer.memo.get((template_bill, lowered, pricer), make)


def template_seconds(
    lowered: LoweredTemplate, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> dict[str, float]:
    """Seconds of one call's forward, backward and weights (F, B, W) on a block."""
    return call_seconds(template_bill(lowered, plan, template, pricer, rules), pricer.software).by_action


def launches(function: Function, template: Template, run: AsRun = AS_WRITTEN) -> int:
    """Kernels that the ops of a template's function launch. run: the way in which a framework runs its lines."""
    begun = (line.line if isinstance(line, Start) else line for line in function.lines)
    ops = (line for line in begun if isinstance(line, Compute) and line.node in template.op_calls)
    return sum(is_kernel(line.op) and not run.is_inside(line) for line in ops)


def _host_s(pricer: Pricer, *works: Work) -> float:
    return sum(pricer.software.launch_host_s * work.launches + work.host_s for work in works)


def _function_work(
    function: Function | None,
    forward: Function | None,
    plan: TemplatePlan,
    template: Template,
    pricer: Pricer,
    rules: RuleBook,
    beside: SideBySide | None,
) -> Work:
    """The ops of a template's function on their blocks, and its conversions. forward: of a backward, what it is of. beside:
    products that are parts of wider ones, where a framework runs it."""
    if function is None:
        return NOTHING
    held = function.local_bytes(pricer.mesh)
    launch_s, run = pricer.device.launch_overhead_s, as_run(function, beside)
    between_s = launch_s if pricer.software.kernels == "apart" else 0.0  # else passes are fitted with it
    computed_s = apart_s = host_s = 0.0
    cast = set[str]()
    op_s, clock = op_seconds(plan, template, pricer, rules), LinkClock(pricer.least_exposed)
    for line in function.lines:
        begun = line.line if isinstance(line, Start) else line
        kernel, grouped = None if run.is_inside(begun) else passes_over_memory(begun), None
        match begun:
            case Convert():
                if beside is not None and line is begun:
                    continue  # its message is one of `conversions`, and rows lie as they travel
                computed_s += conversion_copied_s(begun, held, pricer)
            case Join():
                apart_s += joined_s(begun, held, pricer)
            case Compute(node=node) if node in template.op_calls:
                call, rule = template.op_calls[node], rules.rule(template.op_calls[node])
                strategy, prices = strategy_of(begun, plan, pricer)
                grouped = prices.grouped(call, rule, strategy)
                host_s += pricer.software.mixture_host_s(grouped.groups) / 2 if grouped is not None else 0.0
                if kernel is not None:
                    computed_s += 0.0 if kernel else (op_s(begun) - launch_s) * wider(beside, begun, held)
                    apart_s += between_s + (op_s(begun) - launch_s if kernel else 0.0)
                computed_s += pricer.copy_s * cast_bytes(begun, held, cast, pricer.software)
                if beside is not None and line is begun and is_along_sequence(begun):
                    clock.compute(op_s(begun))
                    continue  # what it sends is one of `conversions`
                if grouped is not None and line is begun and pricer.software.keeps_rows:
                    clock.compute(op_s(begun))
                    for message in dispatches(call, rule, strategy, grouped, prices.mesh):
                        clock.send(message.purpose, message.seconds(pricer))
                    continue
        run_line(clock, line, held, pricer, op_s)
    for purpose, seconds in conversions(function, forward, pricer) if beside is not None else ():
        clock.send(purpose, seconds)
    fused_s = pricer.copy_s * fused_bytes(function, held, lambda line: _joins_passes(line, run, beside), run.lines)
    return Work(computed_s, fused_s, apart_s, launches(function, template, run), clock.exposed, clock.hidden_s, host_s)


def wider(beside: SideBySide | None, line: Compute, held: Mapping[str, float]) -> float:
    """The share of a product's seconds that is left where it is a part of a wider one."""
    return 1.0 if beside is None else beside.share(line, held)


def cast_bytes(line: Compute, held: Mapping[str, float], cast: set[str], software: Software) -> float:
    """Bytes by which a software in 8 or 4 bits casts what a product of weights reads, which is in 16. cast: values that were cast
    before in the function; what the line reads is added."""
    definition = find(line.op)
    if not software.low_dtype or definition is None or definition.of_weights != "rows":
        return 0.0
    rows = next(iter(line.reads()))
    if rows in cast:
        return 0.0
    cast.add(rows)
    return CAST_BYTES * software.cast_passes * held.get(rows, 0.0) / 2


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
    return definition is None or (definition.work is None and not definition.alone)


def _joins_passes(line: Line, run: AsRun, beside: SideBySide | None) -> bool | None:
    """Whether a line is one of passes that neighbours make together, as of `passes_over_memory`. A conversion without a message
    ends none: a framework has what it is of (tables of positions) as it wants it."""
    if run.is_inside(line) or (beside is not None and isinstance(line, Convert) and not line.step.facts.sends):
        return None
    return passes_over_memory(line)


def is_kernel(op: str) -> bool:
    """Whether an op runs a kernel, rather than show a value in another form."""
    definition = find(op)
    return definition is None or not definition.free


# --- a stage


def stage_bill(stage: LoweredStage, calls: Mapping[str, CallBill], pricer: Pricer, setting: Setting) -> StageBill:
    """The bill of a stage on one rank, memory tiers left out. calls: the bills of its templates."""
    between = {action: _between(function, stage, pricer) for action, function in stage.by_action}
    (F, forward_s), (B, backward_s), (W, weights_s) = (between.get(action, (NOTHING, 0.0)) for action in "FBW")
    trained = [p for p in stage.parameters.values() if p.contributions]
    once, each = ([p for p in trained if p.by_microbatch == by_microbatch] for by_microbatch in (False, True))
    gathered_along = (m.axis for p in trained for m in regather_messages(p, pricer.mesh))
    reduce_s, each_reduce_s = _reductions_s(once, pricer), _reductions_s(each, pricer)
    gather_s = sum(regather_seconds(p, pricer) for p in trained) + pricer.rendezvous_s(gathered_along)
    prologue_s = 0.0
    for function in stage.prepare:
        work, gathers_s = _between(function, stage, pricer)
        prologue_s += gathers_s + call_seconds(CallBill(work), pricer.software).F
    prepared = Counter((c.template, c.action) for function in stage.prepare for c in function.calls)
    prologue_s += sum(
        times * call_seconds(calls[name], pricer.software).by_action[action]
        for (name, action), times in prepared.items()
    )
    busiest = busiest_rank(trained, stage.mesh)
    shown = shown_parameters(stage, calls, pricer) if pricer.is_measured and stage.training else None
    traffic = ParameterTraffic(forward_s, backward_s + weights_s, reduce_s, gather_s, shown, each_reduce_s)
    return StageBill(
        ((CallBill(F, B, W), 1), *call_bills(stage, calls, pricer)),
        traffic if pricer.software.is_emitted else framework_traffic(stage, pricer),
        sum(optimizer_s(p, stage, pricer, setting, busiest) for p in trained),
        stage.microbatches * prologue_s
        + sum(narrow_seconds(p, pricer) for p in stage.parameters.values())
        + sum(times * message.seconds(pricer) for message, times in extra_messages(stage)),
    )


def _reductions_s(trained: Sequence[StoredParameter], pricer: Pricer) -> float:
    """Seconds to reduce the gradients of parameters once."""
    along = (message.axis for p in trained for message in gradient_messages(p, pricer.mesh))
    return sum(reduce_seconds(p, pricer) for p in trained) + pricer.rendezvous_s(along)


def call_bills(stage: LoweredStage, calls: Mapping[str, CallBill], pricer: Pricer) -> list[tuple[CallBill, int]]:
    """The calls of a microbatch; some have no backward."""
    actions: dict[tuple[str, int], str] = {}
    for action, function in stage.by_action:
        for call in function.calls:
            actions[call.template, call.number] = actions.get((call.template, call.number), "") + action
    alike = Counter((name, made) for (name, _), made in actions.items())
    return [(_only(calls[name], made, pricer), times) for (name, made), times in alike.items()]


def _only(call: CallBill, actions: str, pricer: Pricer) -> CallBill:
    """A call that makes only some of its actions."""
    F, B, W = (work if action in actions else NOTHING for action, work in zip("FBW", call.works, strict=True))
    return CallBill(F, B, W, _host_s(pricer, F, B, W))


def _between(function: Function | None, stage: LoweredStage, pricer: Pricer) -> tuple[Work, float]:
    """Costs between the calls of a function: its work, and seconds of the gathers of parameters alone."""
    messages: dict[Purpose, float] = {}
    copies_s = gathers_s = 0.0
    for cost in line_costs(function, stage, pricer):
        for part in cost.parts:
            copies_s += part.own_s
            if part.purpose == GATHER:
                gathers_s += part.sent_s
            elif part.purpose is not None:
                messages[part.purpose] = messages.get(part.purpose, 0.0) + part.sent_s
        gathers_s += cost.met_s
    return Work(copies_s, messages=messages), gathers_s
