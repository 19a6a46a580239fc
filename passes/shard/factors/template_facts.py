"""The part of a sharding problem that a template contributes whatever the mesh and the prices: who makes and who reads
its values."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.call import OpCall
from autopar.ir.program import Template, operand_values, resolve
from autopar.ir.types import TensorType
from autopar.passes.rules.hubs import Flow, flow
from autopar.passes.rules.once import once
from autopar.passes.rules.structure import value_names
from autopar.passes.rules.widening import wide_gradients


@dataclass(frozen=True)
class Read:
    """An operand of an op. place: the hub that it is read from, or the value itself. type: in which it is converted."""

    value: str
    place: str
    type: TensorType


@dataclass(frozen=True)
class Operation:
    """An op: the names of the results that are read, by index; its operands."""

    name: str
    call: OpCall
    results: dict[int, str]
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Place:
    """A placeholder or a hub, where a value has one spec. source: the hub or value that it is converted from, None where it
    begins or is stored. converted: the type in which. partial: whether it may owe sums. maker: the op whose result it holds.
    """

    name: str
    value: str
    type: TensorType
    partial: bool
    source: str | None = None
    converted: TensorType | None = None
    maker: str | None = None


@dataclass(frozen=True)
class TemplateFacts:
    """operations in order, then the places: inputs, tangents and hubs."""

    flow: Flow
    operations: dict[str, Operation]
    places: tuple[Place, ...]


@once
def template_facts(template: Template) -> TemplateFacts:
    """All of it, found once per template."""
    flow_, wide = flow(template), wide_gradients(template)

    def converted(value: str) -> TensorType:
        return wide.get(value) or template.type_of(value)

    operations = {}
    for node in template.ops:
        call, values = template.op_calls[node.name], operand_values(node)
        reads = tuple(Read(v, flow_.reads[node.name, i] or v, converted(v)) for i, v in enumerate(values))
        operations[node.name] = Operation(node.name, call, value_names(node), reads)
    tangents = [t for t in template.tangents if t is not None]
    places = []
    for name in (*template.inputs, *tangents):
        type_ = template.type_of(name)
        places.append(Place(name, name, type_, type_.is_float or name in tangents))
    for hub in flow_.hubs.values():
        producer, stored = resolve(template.nodes[hub.value])[0], hub.value in template.params
        places.append(
            Place(
                hub.name,
                hub.value,
                template.type_of(hub.value),
                partial=not stored,
                source=None if stored else hub.source or hub.value,
                converted=converted(hub.value),
                maker=producer.name if producer.op == "call_function" else None,
            )
        )
    return TemplateFacts(flow_, operations, tuple(places))
