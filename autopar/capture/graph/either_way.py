"""A branch that repairs is computed both ways, and selected: `if not torch.isfinite(h).all(): h = h.clamp(-c, c)`.

The step was traced twice, with one answer of the data turned round. Equal parts of the two graphs are found by what they
compute; from the outputs back, ops that differ in their operands alone are one op of selected operands, and where the graphs
differ there stands a select:

    one way     h = linear(x, w)                     y = relu(h)
    the other   h = linear(x, w)   r = clamp(h)      y = relu(r)
    either      h = linear(x, w)   r = clamp(h)      y = relu(where(condition, h, r))

A side is a repair if it does no work of its own: no products, look-ups, random numbers or choice of parameters. No gradient
passes from a side that is not taken: its floating operands are detached there, since zero times infinity is no zero.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.capture.exported import Exported, Held
from autopar.capture.while_traced import functions
from autopar.ir.program import op_name
from autopar.ops.registry import precision_of

aten = torch.ops.aten
Pair = tuple[fx.Node, fx.Node]
_OPAQUE = functions.OP


class _Differ(Exception):
    """The two graphs are no two ways of one step."""


def either_way(one: Exported, other: Exported, question: int) -> Exported | None:
    """The step that goes the way of `one` or of `other` as the data say, which the two answer otherwise at a question; None where
    they differ in more than a repair. Both graphs stay as they are."""
    if _facts(one, question) != _facts(other, question) or one.answers[question] is not (not other.answers[question]):
        return None
    try:
        return _Merge(one, other, question).merged()
    except _Differ:
        return None


def _facts(exported: Exported, question: int) -> tuple[Any, ...]:
    """The facts that must be equal of two ways beside their graphs, parameters that have a gradient among them."""
    held = [(h.value, h.asked) for h in exported.held if h.question != question]
    asked = [h.asked for h in exported.held if h.question == question]
    outputs = len(exported.outputs), len(exported.output_names), exported.extras, str(exported.output_structure)
    meant = exported.training, exported.loss_path, exported.eager_grads, exported.selects
    return held, asked, outputs, sorted(exported.updates), meant


class _Merge:
    """Two graphs in one. `same` has the equal node of the first graph for nodes of the other."""

    def __init__(self, one: Exported, other: Exported, question: int) -> None:
        self.one, self.question = one, question
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(one.graph, {}))
        self.at = {node: i for i, node in enumerate(self.graph.nodes)}
        self.rank: dict[fx.Node, tuple[int, ...]] = {node: (i,) for node, i in self.at.items()}
        self.canonical, known = _numbered(self.graph, one.kinds, {})
        self.same, _ = _numbered(other.graph, other.kinds, known)
        self.common = set(self.same.values())
        self.draws, others = _draw_numbers(self.graph), _draw_numbers(other.graph)
        if [node.target for node in self.draws] != [node.target for node in others]:
            raise _Differ
        self.draws |= others
        self.number = {node: i for i, node in enumerate(other.graph.nodes)}
        ends = self.graph.output_node().args[0], other.graph.output_node().args[0]
        self.ends: list[Pair] = list(zip(*ends, strict=True))  # type: ignore[arg-type]
        place = one.output_names.index(next(h.output for h in one.held if h.question == question))
        self.place, (self.condition, turned) = place, self.ends[place]
        if self.same.get(turned) is not self.canonical[self.condition]:
            raise _Differ
        self.value = bool(one.answers[question])
        self.added: dict[fx.Node, fx.Node] = {}
        self.gates: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.result: dict[Pair, fx.Node] = {}

    def merged(self) -> Exported:
        """The step that goes either way. Raises _Differ."""
        ends = [pair for i, pair in enumerate(self.ends) if i != self.place]
        self._pair(ends)
        results = [self.result[pair] for pair in ends]
        old = [name for i, name in enumerate(self.one.output_names) if i != self.place]
        self.graph.output_node().args = (tuple(results),)
        self._gate_own_side(results)
        self._in_order()
        names: dict[str, str] = {}
        for name, node in zip(old, results, strict=True):
            if names.setdefault(name, node.name) != node.name:
                raise _Differ
        held = tuple(
            Held(names[h.output], h.value, h.asked, h.question) for h in self.one.held if h.question != self.question
        )
        return replace(
            self.one,
            graph=self.graph,
            outputs=tuple(names[name] for name in self.one.outputs),
            updates={buffer: names[name] for buffer, name in self.one.updates.items()},
            output_names=tuple(names[name] for name in old),
            held=held,
        )

    def _pair(self, ends: list[Pair]) -> None:
        """Make every pair one node: the equal one, one op of both, or a select."""
        todo, operands = list(ends), dict[Pair, list[Pair] | None]()
        while todo:
            pair = todo.pop()
            if pair not in operands:
                operands[pair] = below = None if self._equal(pair) else self._operands(*pair)
                todo += below or ()
        for pair in sorted(operands, key=lambda pair: self.at[pair[0]]):
            one, _ = pair
            if self._equal(pair):
                self.result[pair] = one
            elif (below := operands[pair]) is None:
                self.result[pair] = self._selected(*pair)
            else:
                self.result[pair] = self._joined(one, [self.result[p] for p in below])

    def _equal(self, pair: Pair) -> bool:
        one, other = pair
        return self.same.get(other) is self.canonical[one]

    def _operands(self, one: fx.Node, other: fx.Node) -> list[Pair] | None:
        """Pairs of operands, where the nodes are the same op otherwise, or the same draw."""
        if one.op != "call_function" or other.op != "call_function" or _type(one) != _type(other):
            return None
        if self.draws.get(one) != self.draws.get(other):
            return None
        if _described(one, lambda _: "%") != _described(other, lambda _: "%"):
            return None
        return list(zip(_reads(one), _reads(other), strict=True))

    def _joined(self, one: fx.Node, operands: list[fx.Node]) -> fx.Node:
        order = iter(operands)

        def following(_: fx.Node) -> fx.Node:
            return next(order)

        args, kwargs = map_arg(one.args, following), map_arg(one.kwargs, following)
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.create_node(one.op, one.target, args, kwargs)
        node.meta = dict(one.meta)
        self.rank[node] = (self.at[one], 1)
        return node

    def _selected(self, one: fx.Node, other: fx.Node) -> fx.Node:
        parameter = one.op == "placeholder" and self.one.kinds[one.name][0] == "param"
        if parameter or _type(one) != _type(other) or not isinstance(one.meta.get("val"), torch.Tensor):
            raise _Differ
        repaired = self._added(other)
        sides = (one, repaired) if self.value else (repaired, one)
        node = self._node(aten.where.self, (self.condition, *sides), one, (self.at[one], 2))
        node.meta = {**self.condition.meta, "val": one.meta["val"]}
        return node

    def _node(self, target: Any, args: tuple[Any, ...], like: fx.Node, rank: tuple[int, ...]) -> fx.Node:
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(target, args)
        node.meta = dict(like.meta)
        self.rank[node] = rank
        return node

    def _added(self, other: fx.Node) -> fx.Node:
        """A node of the other graph, with what it needs, in this one."""
        needed, todo = set[fx.Node](), [other]
        while todo:
            node = todo.pop()
            if node not in needed and node not in self.same and node not in self.added:
                _check_repair(node)
                needed.add(node)
                todo += node.all_input_nodes
        for node in sorted(needed, key=self.number.__getitem__):
            with self.graph.inserting_before(self.graph.output_node()):
                self.added[node] = self.graph.node_copy(node, lambda read: self._read(read))
            self.rank[self.added[node]] = (self.at[self.condition], 1, self.number[node])
        return self.same[other] if other in self.same else self.added[other]

    def _read(self, other: fx.Node) -> fx.Node:
        """The operand of the other side: a node of its own, or an equal one behind a gate."""
        return self.added[other] if other in self.added else self._gated(self.same[other], False)

    def _gated(self, node: fx.Node, own: bool) -> fx.Node:
        """The same value, which passes a gradient only where the side is taken. own: the side of the first graph."""
        value = node.meta.get("val")
        floating = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        if not self.one.training or not floating:
            return node
        if (node, own) not in self.gates:
            rank = max(self.at[self.condition], self.at[node]), 0
            blocked = self._node(aten.detach.default, (node,), node, rank)
            sides = (node, blocked) if own is self.value else (blocked, node)
            gate = self._node(aten.where.self, (self.condition, *sides), self.condition, rank)
            gate.meta["val"] = value
            self.gates[node, own] = gate
        return self.gates[node, own]

    def _gate_own_side(self, results: list[fx.Node]) -> None:
        """Gates before what the first graph has of its own."""
        alive, todo = set[fx.Node](), list(results)
        while todo:
            node = todo.pop()
            if node not in alive:
                alive.add(node)
                todo += node.all_input_nodes
        for node in [n for n in self.at if n in alive and n not in self.common and n.op != "placeholder"]:
            if self.canonical[node] in self.common:
                continue
            _check_repair(node)
            for read in list(node.all_input_nodes):
                if self._shared(read):
                    node.replace_input_with(read, self._gated(read, True))

    def _shared(self, node: fx.Node) -> bool:
        return node.op == "placeholder" or self.canonical[node] in self.common

    def _in_order(self) -> None:
        """Nodes that are read, each behind what it reads, otherwise as they stood."""
        output = self.graph.output_node()
        for node in reversed(list(self.graph.nodes)):
            if not node.users and node.op == "call_function":
                self.graph.erase_node(node)
        nodes = [n for n in self.graph.nodes if n is not output]
        waits = {n: len(n.all_input_nodes) for n in nodes}
        ready = [(self.rank[n], i, n) for i, n in enumerate(nodes) if not waits[n]]
        heapq.heapify(ready)
        place = {n: i for i, n in enumerate(nodes)}
        while ready:
            *_, node = heapq.heappop(ready)
            output.prepend(node)
            for user in node.users:
                if user is not output:
                    waits[user] -= 1
                    if not waits[user]:
                        heapq.heappush(ready, (self.rank[user], place[user], user))


def _numbered(
    graph: fx.Graph, kinds: Mapping[str, Any], known: dict[Any, fx.Node]
) -> tuple[dict[fx.Node, fx.Node], dict[Any, fx.Node]]:
    """Per node the first that computes the same, and these by what they compute. known: of another graph, whose nodes are meant
    and which gains none."""
    first, of, draws = dict(known), dict[fx.Node, fx.Node](), _draw_numbers(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            key: Any = kinds[node.name]
        elif node.op != "call_function" or any(read not in of for read in node.all_input_nodes):
            continue
        else:
            key = _described(node, lambda read: str(id(of[read]))), draws.get(node)
        if key in first or not known:
            of[node] = first.setdefault(key, node)
    return of, first


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _described(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """The text of what a node computes, its operands by these names."""
    args, target = node.args, str(node.target)
    if node.target is _OPAQUE:
        target, args = str(functions.identity(args[0])), args[1:]  # type: ignore[arg-type]
    said = map_arg((args, dict(node.kwargs)), lambda read: _Text(name(read)))  # type: ignore[arg-type, return-value]
    return f"{target} {said}"


def _reads(node: fx.Node) -> list[fx.Node]:
    """Operands in order, as often as they are read."""
    reads: list[fx.Node] = []
    map_arg((node.args, node.kwargs), reads.append)
    return reads


def _type(node: fx.Node) -> Any:
    """Shape and dtype of a node's tensor, or of its tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]


def _draw_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Nodes that draw random numbers, and the how many-th each is."""
    ops = (node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return {node: i for i, node in enumerate(n for n in ops if torch.Tag.nondeterministic_seeded in n.target.tags)}


def _check_repair(node: fx.Node) -> None:
    """Raises _Differ for what is no part of a repair; both ways draw as often."""
    if node.op != "call_function" or node.target is _OPAQUE or precision_of(op_name(node.target)) == "low":
        raise _Differ
