"""The program of one microbatch: every shard as large as one microbatch has it.

An op is rewritten as it is for a rank: what its definition says of a block of the batch's factor (`OpDef.localize`) holds
for a shard in time. A template whose calls differ in what they give only a share of, or in what they know beforehand,
becomes several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from autopar.errors import CoupledError, InputError
from autopar.ir.call import OpCall, schema_arguments
from autopar.ir.mesh import Mesh
from autopar.ir.names import fresh_name
from autopar.ir.program import (
    Call,
    Join,
    Microbatched,
    Program,
    Template,
    is_getitem,
    op_name,
    operand_nodes,
    set_argument,
)
from autopar.ir.rule import Rule
from autopar.ir.types import TensorType
from autopar.ops.registry import Block, Offset, find
from autopar.passes.batch.dims import Dims, Part, result_values
from autopar.passes.batch.prologue import with_prologue
from autopar.passes.batch.states import Batched, OperandShare, ResultShare, Share, State
from autopar.passes.rules.book import RuleBook

_AXIS = "mb"


def divides(batch: Batched, microbatches: int) -> bool:
    """Whether the batch, and every piece of it that the program works with, can be cut into so many microbatches."""
    return all(size % microbatches == 0 for size in batch.sizes)


def divided(program: Program, batch: Batched, microbatches: int, rules: RuleBook) -> Program:
    """The program for one of so many microbatches, which accumulate to the step of the whole program.

    Raises InputError where the batch cannot be cut so, CoupledError for an op that must know where in the batch it is.
    """
    if not divides(batch, microbatches):
        raise InputError(
            f"a batch that the program works with in pieces of {', '.join(map(str, sorted(batch.sizes)))} cannot be cut into "
            f"{microbatches} microbatches; choose a number that divides them all"
        )
    templates: dict[str, Template] = {}
    calls: list[Call] = []
    variants: dict[tuple[str, Any], str] = {}
    for i, call in enumerate(program.calls):
        own_prologue = i if any(c == i for c, _ in batch.prologue) else None
        key = call.template, (batch.shares[i], own_prologue)
        if key not in variants:
            name = variants[key] = fresh_name(call.template, templates)
            divide = _Divide(program.template_of(call), batch, microbatches, batch.shares[i], rules)
            templates[name] = replace(divide.template(), name=name)
        calls.append(replace(call, template=variants[key]))
    inputs = tuple(
        (name, type_ if dim is None else _cut(type_, {dim: Part(1, type_.shape[dim])}, microbatches))
        for (name, type_), dim in zip(program.inputs, program.batch_dims, strict=True)
    )
    outputs = tuple(_join(program, batch, k, state) for k, state in enumerate(batch.outputs))
    buffers: dict[str, Literal["sum", "same", "each"]] = {
        name: "sum" if state == "sum" else "same" for name, state in batch.buffers.items()
    }
    rounds = [
        [place for place, early in batch.prologue.items() if early.round == number]
        for number in range(max((early.round + 1 for early in batch.prologue.values()), default=0))
    ]
    reductions = tuple(str(batch.prologue[place].terms) for places in rounds for place in places)
    hangs = Microbatched(outputs, buffers, reductions)
    parts = replace(program, templates=templates, calls=tuple(calls), inputs=inputs, microbatched=hangs)
    return with_prologue(parts, rounds)


def _join(program: Program, batch: Batched, k: int, state: State) -> Join:
    """How the microbatches' values of output k are joined to the output of the whole batch."""
    ref = program.outputs[k]
    if ref.kind == "input":
        dim = program.batch_dims[ref.index]
        return Join("same") if dim is None else Join("cat", dim)
    assert state != "unknown", "the last pass knows every state"
    if state != "shard":
        return Join("same" if state == "whole" else state)
    template = program.template_of(program.calls[ref.index])
    value = template.outputs[ref.output]
    ((dim, part),) = batch.dims[template.name][value].items()
    size = template.type_of(value).shape[dim]
    return Join("cat", dim, size // (part.inner * part.size))


def _cut(type_: TensorType, places: dict[int, Part], parts: int) -> TensorType:
    return TensorType(tuple(n // parts if d in places else n for d, n in enumerate(type_.shape)), type_.dtype)


class _Divide:
    """One template for one of so many microbatches. shares: whole values that it gives only its part of."""

    def __init__(
        self, template: Template, batch: Batched, parts: int, shares: frozenset[Share], rules: RuleBook
    ) -> None:
        self.whole, self.parts, self.shares, self.rules = template, parts, shares, rules
        self.dims: Dims = batch.dims[template.name]
        self.factors = batch.factors[template.name]
        self.graph = fx.Graph()
        self.copied: dict[fx.Node, fx.Node] = {}
        self.shared: dict[tuple[str, str], fx.Node] = {}
        self.taken = set(template.nodes)

    def template(self) -> Template:
        whole = self.whole
        for node in whole.graph.nodes:
            if node.op == "output":
                break
            self.copied[node] = self._copy(node)
        outputs = self._results("outputs", whole.outputs)
        input_grads = self._results("input_grads", whole.input_grads)
        param_grads = self._results("param_grads", whole.param_grads)
        self.graph.output(tuple(node for node in (*outputs, *input_grads, *param_grads) if node is not None))
        return replace(
            whole,
            graph=self.graph,
            outputs=tuple(node.name for node in outputs if node is not None),
            input_grads=tuple(None if node is None else node.name for node in input_grads),
            param_grads=tuple(None if node is None else node.name for node in param_grads),
        )

    def _results(
        self, results: Literal["outputs", "input_grads", "param_grads"], values: Sequence[str | None]
    ) -> list[fx.Node | None]:
        """The node that the template returns at each place: a value, or this microbatch's share of it."""
        nodes: list[fx.Node | None] = []
        for slot, value in enumerate(values):
            node = None if value is None else self.whole.nodes[value]
            is_share = ResultShare(results, slot) in self.shares
            nodes.append(node and (self._share(node, node.meta.get("phase", "B")) if is_share else self.copied[node]))
        return nodes

    def _copy(self, node: fx.Node) -> fx.Node:
        operands = [self.copied[n] for n in operand_nodes(node)] if node.op == "call_function" else []
        changes: dict[str, Any] = {}
        for share in self.shares:
            if isinstance(share, OperandShare) and share.node == node.name and isinstance(share.operand, int):
                operands[share.operand] = self._share(operand_nodes(node)[share.operand], node.meta["phase"])
        if node.op == "call_function" and not is_getitem(node):
            changes = self._local(node)
        order = iter(operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(order))
        copied = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        copied.name, copied.meta = node.name, dict(node.meta)
        for name, value in changes.items():
            set_argument(copied, name, value)
        if "type" in node.meta:
            copied.meta["type"] = self._type(node)
        return copied

    def _type(self, node: fx.Node) -> TensorType | tuple[TensorType | None, ...]:
        type_ = node.meta["type"]
        if isinstance(type_, TensorType):
            return _cut(type_, self.dims.get(node.name, {}), self.parts)
        names = result_values(node)
        return tuple(t if t is None else _cut(t, self.dims.get(names[i], {}), self.parts) for i, t in enumerate(type_))

    def _local(self, node: fx.Node) -> dict[str, Any]:
        """Arguments that are others for a microbatch."""
        call = self.whole.op_calls[node.name]
        scalars = {
            s.operand: call[s.operand] / self.parts
            for s in self.shares
            if isinstance(s, OperandShare) and s.node == node.name and isinstance(s.operand, str)
        }
        factor = self.factors.get(node.name)
        definition = find(call.op)
        if factor is None or definition is None or definition.localize is None:
            return scalars
        changes = definition.localize(_block(call, self.rules.rule(call), factor, self.parts))
        known = {name for name, _, _ in schema_arguments(node.target)}
        if not definition.random and any(_has_offset(value) for value in changes.values()):
            raise CoupledError(f"{op_name(node.target)} at {node.meta['source']} must know where in the batch it is")
        return scalars | {name: value for name, value in changes.items() if name in known}

    def _share(self, node: fx.Node, phase: str) -> fx.Node:
        """The node of 1/M of a whole value."""
        key = node.name, phase
        if key not in self.shared:
            new = self.graph.call_function(torch.ops.aten.div.Scalar, (self.copied[node], self.parts))
            new.name = fresh_name(
                f"{node.name}_share" if phase == "F" else f"{node.name}_share_{phase.lower()}", self.taken
            )
            self.taken.add(new.name)
            new.meta = {"type": self._type(node), "phase": phase, "source": node.meta.get("source", "")}
            self.shared[key] = new
        return self.shared[key]


def _block(call: OpCall, rule: Rule, factor: str, parts: int) -> Block:
    return Block(call, rule, (factor,), Mesh(((_AXIS, parts),)))


def _has_offset(value: Any) -> bool:
    return isinstance(value, Offset) or (isinstance(value, tuple) and any(map(_has_offset, value)))
