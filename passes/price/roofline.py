"""The bounds of the ops of a template: arithmetic, the memory's bandwidth, or the launch of kernels.

Every op lies on one side of its device's roofline (`costmodel/compute.py`): its seconds are those of its FLOPs at the rate that
it reaches, or those in which its bytes are read and written, whichever are more, after its launch. The seconds are the prices
that plans are chosen by; here they are only told apart.
"""

from __future__ import annotations

from autopar.ir.lines import Compute, Function, Start
from autopar.ir.lowered import LoweredStage, LoweredTemplate
from autopar.ir.program import Template
from autopar.passes.price.bills import is_kernel
from autopar.passes.price.link_clock import op_seconds, strategy_of
from autopar.passes.price.op_seconds import NOTHING_BOUND, Roofline
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.book import RuleBook
from autopar.plan import StagePlan, TemplatePlan


def calls_roofline(
    stage: LoweredStage, plan: StagePlan, templates: dict[str, Template], pricer: Pricer, rules: RuleBook
) -> Roofline:
    """The ops of all calls of one microbatch on a rank of a stage. Copies of conversions and joins are none of them."""
    by_action = {
        name: dict(
            zip("FBW", _actions(t, plan.templates[t.planned_as], templates[t.planned_as], pricer, rules), strict=True)
        )
        for name, t in stage.templates.items()
    }
    whole = NOTHING_BOUND
    for action, function in stage.by_action:
        for call in function.calls:
            whole += by_action[call.template][action]
    return whole


def _actions(
    lowered: LoweredTemplate, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> list[Roofline]:
    """Forward, backward and weights of one call."""
    functions = (lowered.forward, lowered.backward, lowered.weights)
    return [function_roofline(function, plan, template, pricer, rules) for function in functions]


def function_roofline(
    function: Function | None, plan: TemplatePlan, template: Template, pricer: Pricer, rules: RuleBook
) -> Roofline:
    """The ops of one function of a template, which take as long as its bill says."""
    whole, op_s = NOTHING_BOUND, op_seconds(plan, template, pricer, rules)
    for line in function.lines if function is not None else ():
        op = line.line if isinstance(line, Start) else line
        if not isinstance(op, Compute) or not is_kernel(op.op) or op.node not in template.op_calls:
            continue
        call = template.op_calls[op.node]
        strategy, prices = strategy_of(op, plan, pricer)
        limits = prices.op_limits(call, rules.rule(call), strategy)
        if limits.seconds > 0:
            whole += limits * (op_s(op) / limits.seconds)
    return whole
