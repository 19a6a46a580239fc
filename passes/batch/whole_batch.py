"""Losses that divide by a count of the batch, computed in microbatches exactly as on the whole batch.

`sum(losses) / sum(counted)`: the mean of the microbatches' quotients is not the quotient of the whole when some tokens
do not count. But what is divided by depends on the batch's inputs alone, so it can be known before the first forward:
a small *early* call computes it for every microbatch, and each forward divides by the mean over all of them. The mean
of the microbatches' losses is then the loss of the whole batch, and so are the gradients.

    loss_k = num_k / (Σ den / M)      mean over k of loss_k = Σ num / Σ den

Applies to sums over the batch that depend on inputs and constants only and reach a divisor; everything else stays as
it is: a model whose statistics couple the batch (batch norm) is computed per microbatch, as everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from autopar.ir.program import Call, Program, Template, ValueRef, operand_nodes, operand_values, resolve
from autopar.passes.batch.rebatch import NoRebatch, batch_dims, batch_factor
from autopar.passes.rules.book import RuleBook

DIVISIONS = {"aten.div.Tensor": 1, "aten.reciprocal.default": 0, "aten.true_divide.Tensor": 1}
Place = tuple[int, str]


def batch_sums(program: Program, rules: RuleBook) -> list[Place]:
    """(call, value) of every sum over the batch that depends on inputs alone and that a loss divides by."""
    try:
        return _sums(program, rules) if program.training else []
    except NoRebatch:
        return []


def with_early_calls(program: Program, places: list[Place]) -> Program:
    """The program with these sums moved into an early call."""
    if not places:
        return program
    early, refs = _early(program, places)
    at = min(c for c, _ in places)
    templates = dict(program.templates)
    templates[early.name] = early
    calls: list[Call] = []
    for i, call in enumerate(program.calls):
        if i == at:
            calls.append(Call(early.name, (), tuple(refs), program.calls[at].path, early=True))
        moved = replace(call, inputs=tuple(_later(r, at) for r in call.inputs))
        mine = [value for c, value in places if c == i]
        if mine:
            templates[call.template] = _given(program.templates[call.template], mine)
            sources = [ValueRef("call", at, places.index((i, value))) for value in mine]
            moved = replace(moved, inputs=(*moved.inputs, *sources))
        calls.append(moved)
    return replace(
        program,
        templates=templates,
        calls=tuple(calls),
        outputs=tuple(_later(r, at) for r in program.outputs),
        buffer_updates={n: _later(r, at) for n, r in program.buffer_updates.items()},
    )


def _later(ref: ValueRef, at: int) -> ValueRef:
    return replace(ref, index=ref.index + 1) if ref.kind == "call" and ref.index >= at else ref


def _sums(program: Program, rules: RuleBook) -> list[Place]:
    known = batch_dims(program, rules)
    plain = _from_inputs(program)
    found: dict[Place, None] = {}
    for i, call in enumerate(program.calls):
        template = program.template_of(call)
        if program.multiplicity[call.template] > 1:
            continue
        for node in template.ops:
            at = DIVISIONS.get(template.op_calls[node.name].op)
            if at is None or node.meta["phase"] != "F":
                continue
            operands = operand_nodes(node)
            if at >= len(operands):
                continue
            stack, seen = [(i, operands[at].name)], set()
            while stack:
                place = stack.pop()
                if place in seen or not plain.get(place):
                    continue
                seen.add(place)
                if _sums_batch(program, place, known, rules):
                    found[place] = None
                else:
                    stack.extend(_sources(program, place))
    return list(found) if all(program.multiplicity[program.calls[c].template] == 1 for c, _ in found) else []


def _sources(program: Program, place: Place) -> list[Place]:
    call, value = place
    template = program.template_of(program.calls[call])
    if value in template.inputs:
        ref = program.calls[call].inputs[template.inputs.index(value)]
        if ref.kind != "call":
            return []
        return [(ref.index, program.template_of(program.calls[ref.index]).outputs[ref.output])]
    return [(call, v) for v in operand_values(resolve(template.nodes[value])[0])]


def _from_inputs(program: Program) -> dict[Place, bool]:
    """Whether a forward value depends only on inputs, constants and buffers that no step updates."""
    plain: dict[Place, bool] = {}
    for i, call in enumerate(program.calls):
        template = program.template_of(call)
        for name in (*template.params, *(t for t in template.tangents if t)):
            plain[i, name] = False
        for name, ref in zip(template.inputs, call.inputs, strict=True):
            owner = program.template_of(program.calls[ref.index]) if ref.kind == "call" else None
            known = ref.kind == "input" or ref.name not in program.buffer_updates
            plain[i, name] = plain[ref.index, owner.outputs[ref.output]] if owner else known
        for name, node in template.nodes.items():
            if node.op == "call_function":
                producer = resolve(node)[0]
                reads = operand_values(producer)
                plain[i, name] = (
                    all(plain[i, v] for v in reads) and producer.meta["phase"] == "F" and not template.random
                )
    return plain


def _sums_batch(program: Program, place: Place, known: Any, rules: RuleBook) -> bool:
    call, value = place
    template = program.template_of(program.calls[call])
    node, index = resolve(template.nodes[value])
    if node.op != "call_function":
        return False
    rule, dims = rules.rule(template.op_calls[node.name]), known[template.name]
    if dims.get(value) or rule.results[index] is None:
        return False
    kept = {f for labels in rule.results for dim in labels or () for f in dim}
    if _batch_of_one(program):
        gone = [f for f in rule.factors if f in rule.contracted and f not in kept]
        return template.type_of(value).shape == () and any(rule.factors[f].reduce == "sum" for f in gone)
    for operand, labels in zip(operand_values(node), rule.operands, strict=True):
        for d, part in dims.get(operand, {}).items():
            held = batch_factor((labels or ())[d], rule, part)
            if held is not None and held[0] not in kept and rule.factors[held[0]].reduce == "sum":
                return True
    return False


def _batch_of_one(program: Program) -> bool:
    """In a microbatch of one sample nothing tells the batch's dims: a sum over everything then is one over the batch."""
    sizes = {t.shape[d] for (_, t), d in zip(program.inputs, program.batch_dims, strict=True) if d is not None}
    return sizes == {1}


def _early(program: Program, places: list[Place]) -> tuple[Template, list[ValueRef]]:
    """A template of everything the sums depend on, across calls, and the program values it reads."""
    graph = fx.Graph()
    inputs: dict[ValueRef, fx.Node] = {}
    made: dict[tuple[int, fx.Node], fx.Node] = {}

    def place_input(ref: ValueRef) -> fx.Node:
        if ref not in inputs:
            node = graph.placeholder(f"input_{ref.index}")
            node.meta = {"type": program.type_of(ref), "phase": "F", "source": ""}
            inputs[ref] = node
        return inputs[ref]

    def copy(call: int, node: fx.Node) -> fx.Node:
        template = program.template_of(program.calls[call])
        if node.op == "placeholder":
            ref = program.calls[call].inputs[template.inputs.index(node.name)]
            if ref.kind != "call":
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
            if ref.kind != "call":
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
    for i, node in enumerate(nodes):
        if node.name in values:
            made[node] = fresh[node.name]
        else:
            copied = made[node] = graph.node_copy(node, made.__getitem__)
            copied.name, copied.meta = node.name, dict(node.meta)
        if i == last_placeholder:
            for value in values:
                name = f"{value}_whole"
                given = graph.placeholder(name)
                given.meta = {"type": template.type_of(value), "phase": "F", "source": ""}
                fresh[value] = given
    graph.eliminate_dead_code()
    rename = {value: fresh[value].name for value in values}
    return replace(
        template,
        graph=graph,
        inputs=(*template.inputs, *(fresh[v].name for v in values)),
        outputs=tuple(rename.get(o, o) for o in template.outputs),
        input_grads=(*template.input_grads, *(None for _ in values)),
    )
