"""The structure of a program that the sharding problem is built from, read off templates and calls.

Groups of parameters that must be stored alike, the edges between calls, and the values of a node. Nothing here is
priced or decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx

from autopar.ir.program import Program, Template, ValueRef, is_getitem, operand_nodes, resolve
from autopar.ops.discover import target_of
from autopar.ops.registry import find
from autopar.passes.rules.once import once


@dataclass(frozen=True)
class Group:
    """Parameters that are stored alike: `names`, and the (template, slot) places that read them."""

    names: tuple[str, ...]
    slots: tuple[tuple[str, int], ...]


@once
def parameter_groups(program: Program) -> dict[str, Group]:
    """Groups by first name: parameters linked through a shared template slot or a tie."""
    linked = nx.utils.UnionFind()
    for call in program.calls:
        for slot, name in enumerate(call.params):
            linked.union(("name", name), ("slot", call.template, slot))
    names: dict[Any, list[str]] = {}
    slots: dict[Any, list[tuple[str, int]]] = {}
    for item in list(linked.parents):
        if item[0] == "slot":
            slots.setdefault(linked[item], []).append((item[1], item[2]))
    for name in program.parameters:
        names.setdefault(linked["name", name], []).append(name)
    return {members[0]: Group(tuple(members), tuple(slots.get(root, ()))) for root, members in names.items()}


def view_of(template: Template, node: fx.Node) -> str | None:
    """The value that an op shows in another form without making a tensor, if it does."""
    if node.op != "call_function":
        return None
    definition = find(template.op_calls[node.name].op)
    return value_at(node, 0) if definition is not None and definition.free else None


def shown_values(template: Template, value: str | None) -> Iterator[str]:
    """A value, and those that it is a view of: the last is the one whose memory it lies in."""
    while value is not None:
        yield value
        value = view_of(template, resolve(template.nodes[value])[0])


_MAYBE_COPIES = ("aten._to_copy.", "aten.clone.", "aten.lift_fresh_copy.", "aten._unsafe_view.")
"""Ops that say they make a tensor, and need not where programs run them."""


def may_show(template: Template, node: fx.Node) -> str | None:
    """The value whose memory the results of an op may lie in, by what torch says of it, if there is one."""
    if node.op != "call_function":
        return None
    op = template.op_calls[node.name].op
    shows = view_of(template, node) is not None or op.startswith(_MAYBE_COPIES)
    if not shows and op.startswith(("aten.", "prims.")):
        shows = any(result.alias_info is not None for result in target_of(op)._schema.returns)
    return value_at(node, 0) if shows else None


def shown_buffer(program: Program, ref: ValueRef) -> str | None:
    """The buffer in whose memory a value may lie, through any calls, if there is one."""
    if ref.kind != "call":
        return ref.name if ref.kind == "buffer" else None
    return buffer_shown_inside(program, ref.index, program.template_of(program.calls[ref.index]).outputs[ref.output])


def buffer_shown_inside(program: Program, number: int, value: str) -> str | None:
    """The same of a value inside a call."""
    call = program.calls[number]
    template, shown = program.template_of(call), value
    while (below := may_show(template, resolve(template.nodes[shown])[0])) is not None:
        shown = below
    return shown_buffer(program, call.inputs[template.inputs.index(shown)]) if shown in template.inputs else None


Root = tuple[int, str]
"""The storage of a value: (number of the call that made it, its name there); an input from another stage has -1 and its index."""


def root_of(program: Program, ref: ValueRef) -> tuple[Root | None, float]:
    """The storage that a value lies in (None where that is there anyway), and the fewest global bytes that can show it."""
    if ref.kind == "call":
        return value_root(program, ref.index, program.template_of(program.calls[ref.index]).outputs[ref.output])
    arrives = ref.kind == "input" and program.boundary_tensor(ref) is not None
    return (-1, str(ref.index)) if arrives else None, float(program.type_of(ref).nbytes)


def value_root(program: Program, number: int, value: str) -> tuple[Root | None, float]:
    """The same of a value inside a call."""
    call = program.calls[number]
    template = program.template_of(call)
    shown = list(shown_values(template, value))
    nbytes = float(min(template.type_of(v).nbytes for v in shown))
    if shown[-1] in template.inputs:
        root, more = root_of(program, call.inputs[template.inputs.index(shown[-1])])
        return root, min(nbytes, more)
    return (None if shown[-1] in template.params else (number, shown[-1])), nbytes


def value_names(node: Any) -> dict[int, str]:
    """Result index -> value name of an op node (results that nobody reads are left out)."""
    if isinstance(node.meta["type"], tuple):
        return {u.args[1]: u.name for u in node.users if is_getitem(u)}
    return {0: node.name}


def value_at(node: Any, operand: int) -> str:
    """Name of the value that operand number `operand` of a node is."""
    return operand_nodes(node)[operand].name


Target = tuple[str, str]


def _end_of_output(program: Program, number: int, ref: ValueRef) -> str:
    """The kind of edge at which an output leaves. What a training step gives as shards is gathered once the step is over, and
    paid for there."""
    if not program.training:
        return "settled"
    return "whole" if program.gives(number) and program.type_of(ref).shape else "loss"


@once
def call_edges(program: Program) -> Mapping[tuple[Target | None, Target, str], int]:
    """How often every edge between calls occurs: (source value, target value, kind), values named (template, value).

    kind "value": forward or gradient edge; "read": from a replicated tensor (batch, buffer, gradient seed) to a
    placeholder; "arrive", "depart": from and to another stage; "whole": an output that must end replicated ("loss": it,
    a count or a number that the step gives, summed beside the gradients); "settled": an output that must owe nothing.
    """
    edges: list[tuple[Target | None, Target, str]] = []

    def producer(ref: ValueRef) -> Target | None:
        if ref.kind != "call":
            return None
        template = program.template_of(program.calls[ref.index])
        return template.name, template.outputs[ref.output]

    def tangent_of(ref: ValueRef) -> Target | None:
        owner = program.template_of(program.calls[ref.index])
        tangent = owner.tangents[ref.output]
        return (owner.name, tangent) if tangent is not None else None

    for i, call in enumerate(program.calls):
        template = program.template_of(call)
        for slot, ref in enumerate(call.inputs):
            target = (template.name, template.inputs[slot])
            source, tensor = producer(ref), program.boundary_tensor(ref)
            edges.append((source, target, "value" if source else "arrive" if tensor else "read"))
            grad = template.input_grads[slot]
            if grad is None or i not in program.backward_calls:
                continue
            if source is not None:
                back = tangent_of(ref)
                if back is not None:
                    edges.append(((template.name, grad), back, "value"))
            elif tensor is not None and tensor.gradient:
                edges.append((None, (template.name, grad), "depart"))
    for number, ref in zip(program.output_numbers, program.outputs, strict=True):
        source = producer(ref)
        if source is None:
            continue
        is_loss = ref == program.loss
        edges.append((None, source, _end_of_output(program, number, ref)))
        back = tangent_of(ref) if is_loss else None
        if back is not None:
            edges.append((None, back, "read"))
    if program.boundary is not None:
        for tensor, ref in zip(program.boundary.sent, program.boundary.sent_values, strict=True):
            source, back = producer(ref), tangent_of(ref)
            assert source is not None
            edges.append((None, source, "depart"))
            if tensor.gradient and back is not None:
                edges.append((None, back, "arrive"))
    for ref in program.buffer_updates.values():
        source = producer(ref)
        if source is not None:
            edges.append((None, source, "whole"))
    return Counter(edges)
