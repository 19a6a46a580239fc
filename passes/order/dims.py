"""Where the sequence of causal attention is: followed from its rows and keys through the whole program."""

from __future__ import annotations

from autopar.errors import CoupledError
from autopar.ir.call import OpCall, Operand
from autopar.ir.program import Program, Template, operand_values
from autopar.ops.registry import find
from autopar.passes.batch.dims import Dims, Part, followed
from autopar.passes.order.refused import NotOrdered
from autopar.passes.rules.book import RuleBook


def sequence_dims(program: Program, rules: RuleBook) -> dict[str, Dims]:
    """Per template the dims that hold the sequence. Raises NotOrdered where there is none, or it is in one dim in two ways."""
    starts: dict[str, Dims] = {name: {} for name in program.templates}
    for name, template in program.templates.items():
        for op, call in causal_attention(template).items():
            read = operand_values(template.nodes[op])
            for argument in ("q", "k", "v"):
                operand = call[argument]
                assert isinstance(operand, Operand)
                starts[name].setdefault(read[operand.index], {})[2] = Part(1, call.operand(argument).shape[2])
    if not any(starts.values()):
        raise NotOrdered("no attention of it has is_causal=True")
    try:
        return followed(program, rules, starts=starts, joined=joined)
    except CoupledError as error:
        raise NotOrdered(str(error).replace("the batch", "the sequence")) from error


def causal_attention(template: Template) -> dict[str, OpCall]:
    """The forward ops of it that a template has."""
    calls = template.op_calls.items()
    return {op: call for op, call in calls if call.op == "autopar.attention" and call["causal"]}


def joined(call: OpCall) -> tuple[tuple[str, ...], ...]:
    """Groups of factors of an op of which all are in order if one is."""
    definition = find(call.op)
    return definition.joined(call) if definition is not None and definition.joined is not None else ()
