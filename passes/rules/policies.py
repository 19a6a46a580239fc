"""Recompute by name: what people write by hand, as sets of values.

none: everything that backward reads is kept. full: a block keeps its inputs alone and runs forward again. selective:
products (linear, convolution, einsum, recurrent layers), sums of two streams (their collectives would be run again) and
what is not known are kept; attention and everything else pointwise is made again (Korthikanti et al. 2022).
"""

from __future__ import annotations

from autopar.ir.memory_levers import RECOMPUTE_POLICIES
from autopar.ir.program import Template, resolve
from autopar.ops.registry import find
from autopar.passes.rules.recomputation import made_forward


def policy_set(template: Template, policy: str) -> tuple[str, ...]:
    """Values of a template that a policy (a row of `autopar.ir.memory_levers`) makes again."""
    again = RECOMPUTE_POLICIES[policy].again
    if not again or not template.differentiable:
        return ()
    forward = made_forward(template)
    ops = {v: resolve(template.nodes[v])[0].name for v in template.nodes if v in forward}
    return tuple(v for v, op in ops.items() if op_class(template, op) in again and not _is_kept(template, op))


def _is_kept(template: Template, op: str) -> bool:
    definition = find(template.op_calls[op].op)
    return definition is not None and definition.kept


def op_class(template: Template, op: str) -> str:
    """One of `autopar.ir.memory_levers.OP_CLASSES`."""
    if not is_light(template, op):
        return "dear"
    return "attention" if template.op_calls[op].op.startswith("autopar.attention") else "light"


def is_light(template: Template, op: str) -> bool:
    """Whether an op is attention, pointwise or a reduction: little arithmetic for what it holds."""
    call = template.op_calls[op]
    definition = find(call.op)
    if definition is None or definition.rule is None or definition.recompute_is_dear:
        return False
    shapes = [t.shape for t in call.operands]
    return not (call.op == "aten.add.Tensor" and shapes == [call.out_shapes[0]] * 2)
