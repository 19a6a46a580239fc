"""Which parameters of a step have a gradient only if rows chose what they belong to, and what counts these rows.

A captured graph has a node `gradient_if` at every place where a module with parts of its own choosing (experts) takes a tensor.
A parameter has a gradient if there is a way from the loss to it on which every such node is open:

    loss ── experts ── gradient_if(w, chosen) ── w          w: rows chose its expert
      └──── experts ── gradient_if(x, chosen) ── x ── u     u: always, where the residual
      └─────────────── residual ──────────────── x ── u        goes round the experts

So its condition is an OR of ways, each an AND of nodes: `{{a, b}, {c}}`, and `{{}}` is always. The nodes go, and the counts that
conditions speak of become outputs of the step, which are summed beside the loss: what eager would have seen of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from autopar.capture.before.conditional_gradients import Sometimes
from autopar.capture.exported import Exported
from autopar.ir.program import Conditions, Named
from autopar.ops.chosen import count_chosen, gradient_if

aten = torch.ops.aten

Ways = frozenset[frozenset[Named]]
ALWAYS: Ways = frozenset({frozenset()})
NEVER: Ways = frozenset()
Counted = tuple[fx.Node, bool, int]
"""An integer tensor, whether it is one-hot, and below which number."""

_NO_WAY = (
    aten.detach.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_full.default,
)
"""Ops whose results have no gradient to give."""


def with_conditions(exported: Exported) -> tuple[Exported, Mapping[str, Conditions]]:
    """The same step without `gradient_if`, what is counted being outputs after the loss; and the conditions, as
    `Program.conditions` has them."""
    graph = exported.graph
    gates = [n for n in graph.nodes if n.target is gradient_if]
    counted: list[Counted] = []
    found: dict[str, Ways] = {}
    if exported.training and any(one.numbers for one in exported.sometimes.values()):
        found = _conditions(exported, counted)
    spoken_of = sorted({number for ways in found.values() for way in ways for number, _ in way}, reverse=True)
    names = tuple(_count(exported, gates, counted[number]) for number in spoken_of)
    for gate in gates:
        gate.replace_all_uses_with(_gated(gate))
        graph.erase_node(gate)
    place = {number: len(exported.outputs) + k for k, number in enumerate(spoken_of)}
    conditions = {name: _in_order(ways, place) for name, ways in found.items()}
    outputs, names_of_all = (*exported.outputs, *names), (*exported.output_names, *names)
    return replace(exported, outputs=outputs, output_names=names_of_all), conditions


def _conditions(exported: Exported, counted: list[Counted]) -> dict[str, Ways]:
    """The conditions of every parameter whose gradient is not always there. counted: grows by what they speak of."""
    output = exported.graph.output_node()
    results = dict(zip(exported.output_names, output.args[0], strict=True))  # type: ignore[arg-type]
    ways: dict[fx.Node, Ways] = {results[exported.outputs[0]]: ALWAYS}
    parameters: dict[str, Ways] = {}
    for node in reversed(exported.graph.nodes):
        here = ways.get(node, NEVER)
        if here == NEVER:
            continue
        if node.op == "placeholder":
            kind, name = exported.kinds[node.name]
            if kind == "param":
                parameters[name] = _either(parameters.get(name, NEVER), here)
        elif node.target is gradient_if:
            x = _gated(node)
            ways[x] = _either(ways.get(x, NEVER), _through(node, here, exported.sometimes, counted))
        elif node.target not in _NO_WAY and _differentiable(node):
            for read in node.all_input_nodes:
                ways[read] = _either(ways.get(read, NEVER), here)
    return {name: parameters[name] for name in reversed(parameters) if parameters[name] != ALWAYS}


def _gated(gate: fx.Node) -> fx.Node:
    """The value that a gate lets through."""
    value = gate.args[0]
    assert isinstance(value, fx.Node)
    return value


def _through(gate: fx.Node, here: Ways, sometimes: Mapping[int, Sometimes], counted: list[Counted]) -> Ways:
    """The ways that go on through a node that may be shut."""
    choices, module, slot = cast("tuple[list[fx.Node], int, str]", gate.args[1:])
    one = sometimes[module]
    numbers = one.numbers.get(slot)
    if numbers is None:
        return here
    chosen = choices[one.choice]
    what = chosen, one.one_hot, chosen.meta["val"].shape[-1] if one.one_hot else one.below
    if what not in counted:
        counted.append(what)
    named: Named = (counted.index(what), tuple(sorted(numbers)))
    return _either(NEVER, frozenset(way | {named} for way in here))


def _either(a: Ways, b: Ways) -> Ways:
    """One of two; a way that another one is a part of says nothing new."""
    ways = a | b
    return frozenset(way for way in ways if not any(other < way for other in ways))


def _differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def _count(exported: Exported, gates: list[fx.Node], what: Counted) -> str:
    """Name of the output that counts, as the loss is summed."""
    (chosen, one_hot, below), graph = what, exported.graph
    output = graph.output_node()
    results = dict(zip(exported.output_names, output.args[0], strict=False))  # type: ignore[arg-type]
    dtype = results[exported.outputs[0]].meta["val"].dtype
    gate = next(gate for gate in gates if chosen in gate.args[1])  # type: ignore[operator]
    with graph.inserting_before(gate):
        count = graph.call_function(count_chosen, (chosen, below, one_hot, dtype))
    with chosen.meta["val"].fake_mode:
        count.meta = {**gate.meta, "val": torch.empty([below], dtype=dtype)}
    output.args = ((*output.args[0], count),)  # type: ignore[misc]
    return count.name


def _in_order(ways: Ways, place: Mapping[int, int]) -> Conditions:
    return tuple(sorted(tuple(sorted((place[number], numbers) for number, numbers in way)) for way in ways))
