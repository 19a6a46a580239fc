"""Early calls: values of the whole batch that the first forward needs, computed before it by a call of their own.

`sum(losses) / sum(counted)`: each microbatch has its own terms of both sums, but the quotient needs the second one whole.
It depends on the batch's inputs alone, so a small *prologue* call computes its terms for every microbatch before the step
proper, they are added up, and each forward divides by the sum. Sums that are made of such sums, as of class weights that are
made of counts, come in a next round, by a call of their own that reads what the one before it left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.ir.names import fresh_name
from autopar.ir.program import Call, Program, Template, ValueRef, operand_values, resolve

Place = tuple[int, str]
"""A value of a call."""


def with_prologue(program: Program, rounds: Sequence[Sequence[Place]]) -> Program:
    """The program with these values, each of a call with a template of its own, moved into prologue calls, one for every
    round."""
    if not rounds:
        return program
    first, *later = rounds
    at = min(c for c, _ in first)  # a prologue call is put there, and what is known later is of calls behind it
    return with_prologue(_with_round(program, first), [[(c + (c >= at), v) for c, v in places] for places in later])


def _with_round(program: Program, places: Sequence[Place]) -> Program:
    """The program with values moved into one prologue call. places: their calls, before it is there."""
    prologue, refs = _prologue(program, places)
    at = min(c for c, _ in places)
    sums = {place: ValueRef("call", at, k) for k, place in enumerate(places)}

    def moved(ref: ValueRef) -> ValueRef:
        """Where a value of the program is afterwards: of the prologue call, or of a call after it."""
        if ref.kind != "call":
            return ref
        value = program.template_of(program.calls[ref.index]).outputs[ref.output]
        return sums.get((ref.index, value)) or (replace(ref, index=ref.index + 1) if ref.index >= at else ref)

    templates = program.templates | {prologue.name: prologue}
    calls: list[Call] = []
    for i, call in enumerate(program.calls):
        if i == at:
            calls.append(Call(prologue.name, (), tuple(refs), call.path, prologue=True))
        mine = [value for c, value in places if c == i]
        if mine:
            templates[call.template] = _given(program.templates[call.template], mine)
        calls.append(replace(call, inputs=(*map(moved, call.inputs), *(sums[i, value] for value in mine))))
    return replace(
        program,
        templates=templates,
        calls=tuple(calls),
        outputs=tuple(map(moved, program.outputs)),
        buffer_updates={n: moved(r) for n, r in program.buffer_updates.items()},
    )


def _sources(program: Program, place: Place) -> list[Place]:
    call, value = place
    template = program.template_of(program.calls[call])
    if value in template.inputs:
        ref = program.calls[call].inputs[template.inputs.index(value)]
        if _is_given(program, ref):
            return []
        return [(ref.index, program.template_of(program.calls[ref.index]).outputs[ref.output])]
    return [(call, v) for v in operand_values(resolve(template.nodes[value])[0])]


def _is_given(program: Program, ref: ValueRef) -> bool:
    """Whether a prologue call reads a value as it is: an input, or what an earlier round left."""
    return ref.kind != "call" or program.calls[ref.index].prologue


def _prologue(program: Program, places: Sequence[Place]) -> tuple[Template, list[ValueRef]]:
    """A template of everything the sums depend on, across calls, and the program values it reads."""
    graph = fx.Graph()
    inputs: dict[ValueRef, fx.Node] = {}
    made: dict[tuple[int, fx.Node], fx.Node] = {}

    def place_input(ref: ValueRef) -> fx.Node:
        if ref not in inputs:
            node = graph.placeholder(f"input_{ref.index}" if ref.kind == "input" else f"given_{len(inputs)}")
            node.meta = {"type": program.type_of(ref), "phase": "F", "source": ""}
            inputs[ref] = node
        return inputs[ref]

    def copy(call: int, node: fx.Node) -> fx.Node:
        template = program.template_of(program.calls[call])
        if node.op == "placeholder":
            ref = program.calls[call].inputs[template.inputs.index(node.name)]
            if _is_given(program, ref):
                return place_input(ref)
            owner = program.template_of(program.calls[ref.index])
            return copy(ref.index, owner.nodes[owner.outputs[ref.output]])
        if (call, node) not in made:
            for read in node.all_input_nodes:
                copy(call, read)
            copied = graph.node_copy(node, lambda n: copy(call, n))
            copied.meta = dict(node.meta)
            made[call, node] = copied
        return made[call, node]

    for place in places:
        for ref in _reads(program, place):
            place_input(ref)
    outs = [copy(c, program.template_of(program.calls[c]).nodes[v]) for c, v in places]
    graph.output(tuple(outs))
    name = next(n for n in ("whole_batch", *(f"whole_batch_{k}" for k in range(99))) if n not in program.templates)
    names = tuple(n.name for n in outs)
    return Template(
        name, graph, (), tuple(n.name for n in inputs.values()), names, (None,) * len(names), (None,) * len(inputs), ()
    ), list(inputs)


def _reads(program: Program, place: Place) -> list[ValueRef]:
    """Program inputs that a value depends on (placeholders must come first in a graph)."""
    stack, seen, found = [place], set(), dict[ValueRef, None]()
    while stack:
        call, value = stack.pop()
        if (call, value) in seen:
            continue
        seen.add((call, value))
        template = program.template_of(program.calls[call])
        if value in template.inputs:
            ref = program.calls[call].inputs[template.inputs.index(value)]
            if _is_given(program, ref):
                found[ref] = None
        stack.extend(_sources(program, (call, value)))
    return list(found)


def _given(template: Template, values: list[str]) -> Template:
    """The template with these values as inputs, and without what only they needed."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    fresh: dict[str, fx.Node] = {}
    nodes = list(template.graph.nodes)
    last_placeholder = max(i for i, n in enumerate(nodes) if n.op == "placeholder") if nodes else -1
    given_out: dict[str, str] = {}
    for i, node in enumerate(nodes):
        if node.op == "output":
            for value in {o for o in template.outputs if o in values}:  # an output needs a producer of its own
                again = graph.call_function(torch.ops.aten.clone.default, (fresh[value],))
                again.name, again.meta = fresh_name(f"{value}_again", template.nodes), dict(fresh[value].meta)
                given_out[value] = again.name
                made[template.nodes[value]] = again
        if node.name in values:
            made[node] = fresh[node.name]
        else:
            copied = made[node] = graph.node_copy(node, made.__getitem__)
            copied.name, copied.meta = node.name, dict(node.meta)
        if i == last_placeholder:
            for value in values:
                given = graph.placeholder(fresh_name(f"{value}_whole", template.nodes))
                given.meta = {"type": template.type_of(value), "phase": "F", "source": ""}
                fresh[value] = given
    graph.eliminate_dead_code()
    return replace(
        template,
        graph=graph,
        inputs=(*template.inputs, *(fresh[v].name for v in values)),
        outputs=tuple(given_out.get(o, o) for o in template.outputs),
        input_grads=(*template.input_grads, *(None for _ in values)),
    )
