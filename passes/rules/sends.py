"""The messages that an op sends itself on one rank, under a strategy whose choices come with messages."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy, carried_choices
from autopar.ir.sent import Sent
from autopar.ops.registry import Sending, find
from autopar.runtime.comm.devices import CPU, Device


def sent_by(call: OpCall, rule: Rule, strategy: Strategy, mesh: Mesh, device: Device = CPU) -> tuple[Sent, ...]:
    """The messages of all carried choices on a device; those of one that several axes take are listed once."""
    return tuple(_sent(call, rule, strategy, mesh, device))


def _sent(call: OpCall, rule: Rule, strategy: Strategy, mesh: Mesh, device: Device) -> Iterator[Sent]:
    definition = find(call.op)
    carried = carried_choices(strategy, mesh)
    if definition is None or definition.sends is None or not carried:
        return
    operands = tuple(
        0.0 if (spec := rule.operand_spec(i, strategy, mesh)) is None else float(spec.local_bytes(type_, mesh))
        for i, type_ in enumerate(call.operands)
    )
    results = tuple(
        0.0
        if type_ is None or (spec := rule.result_spec(i, strategy, mesh)) is None
        else float(spec.local_bytes(type_, mesh))
        for i, type_ in enumerate(call.results)
    )
    for choice in dict.fromkeys(choice for _, choice in carried):
        (axis, ranks), *inner = ((axis, mesh.sizes[axis]) for axis, taken in carried if taken == choice)
        factor = rule.carries[choice].factors[-1]
        axes = rule.taken(strategy, mesh)[factor]
        most = float(mesh.product(axes) / mesh.parts(rule.factors[factor].size, axes))
        yield from definition.sends(Sending(call, choice, axis, ranks, operands, results, tuple(inner), device, most))
