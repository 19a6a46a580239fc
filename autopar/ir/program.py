"""The program being compiled: templates (distinct blocks, kept once) and the DAG of calls to them.

A template's graph is one fx graph that holds forward and backward: placeholders are its parameters, inputs and
tangents (gradients of its outputs); every node carries `meta["type"]` (TensorType, or a tuple of them), `meta["phase"]`
("F" forward, "B" input gradients, "W" parameter gradients) and `meta["source"]` (module path and source line). A
126-layer model is a handful of templates and some 130 calls; solvers and emission work per template.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from autopar.ir.call import OpCall, Operand, bind, schema_arguments
from autopar.ir.ranges import InputRange
from autopar.ir.types import TensorType

Phase = Literal["F", "B", "W"]
Named = tuple[int, tuple[int, ...]]
"""Rows chose one of these numbers, as an output of the program counts them."""
Conditions = tuple[tuple[Named, ...], ...]
"""When a parameter has a gradient: if all of one of these holds."""


@dataclass(frozen=True)
class ValueRef:
    """Where a value at program level comes from: kind "input" (index), "buffer" (name) or "call" (call, output)."""

    kind: Literal["input", "buffer", "call"]
    index: int = 0
    output: int = 0
    name: str = ""


@dataclass(frozen=True)
class Parameter:
    """One parameter; tied names appear once, with the others as aliases."""

    name: str
    type: TensorType
    trainable: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Buffer:
    """A buffer or constant of the model; `persistent` ones are in its state dict."""

    name: str
    type: TensorType
    persistent: bool = True


@dataclass(frozen=True, eq=False)
class Template:
    """One distinct block.

    params, inputs: placeholder names. outputs: value names. tangents[i]: placeholder of the gradient of output i, or
    None. input_grads[i], param_grads[i]: value names of gradients, or None. first_of: the template of which this one has the
    first calls of a stage, where these recompute otherwise than the others (`autopar.passes.lower.first_calls`).
    """

    name: str
    graph: fx.Graph
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tangents: tuple[str | None, ...]
    input_grads: tuple[str | None, ...]
    param_grads: tuple[str | None, ...]
    random: bool = False
    first_of: str = ""

    @property
    def planned_as(self) -> str:
        """The name under which plans know the template."""
        return self.first_of or self.name

    @cached_property
    def _of_first_calls(self) -> dict[str, Template]:
        return {}

    def of_first_calls(self, name: str) -> Template:
        """The same block under another name, for the first calls of a stage; the same object whenever it is asked for."""
        if name not in self._of_first_calls:
            self._of_first_calls[name] = replace(self, name=name, first_of=self.name)
        return self._of_first_calls[name]

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.graph.nodes}

    def type_of(self, value: str) -> TensorType:
        """Type of the single tensor called `value`."""
        type_ = self.nodes[value].meta["type"]
        assert isinstance(type_, TensorType), f"{value} is not one tensor"
        return type_

    @cached_property
    def ops(self) -> tuple[fx.Node, ...]:
        """Op nodes in order, `getitem` left out: a value of a multi-result op belongs to the op."""
        return tuple(n for n in self.graph.nodes if n.op == "call_function" and not is_getitem(n))

    @cached_property
    def op_calls(self) -> dict[str, OpCall]:
        return {n.name: op_call(n) for n in self.ops}

    @cached_property
    def consumers(self) -> dict[str, tuple[tuple[fx.Node, int], ...]]:
        """For every value the (op node, operand index) pairs that read it."""
        readers: dict[str, list[tuple[fx.Node, int]]] = {}
        for node in self.ops:
            for i, value in enumerate(operand_values(node)):
                readers.setdefault(value, []).append((node, i))
        return {k: tuple(v) for k, v in readers.items()}

    @property
    def differentiable(self) -> bool:
        return any(t is not None for t in self.tangents)


@dataclass(frozen=True)
class Call:
    """One use of a template: parameter names and input values in the template's order.

    path: the module that it is, or that holds it. start: the module that its first op belongs to. prologue: runs for every
    microbatch before the step proper (what must be known of the whole batch: token counts).
    """

    template: str
    params: tuple[str, ...]
    inputs: tuple[ValueRef, ...]
    path: str = ""
    prologue: bool = False
    start: str = ""


@dataclass(frozen=True)
class BoundaryTensor:
    """A value that one stage makes and another reads; `gradient`: one comes back. value: in the whole program."""

    name: str
    value: ValueRef
    source: int
    target: int
    gradient: bool


@dataclass(frozen=True)
class Boundary:
    """How a stage's program hangs in the whole one (`autopar.passes.lower.cut`).

    inputs, outputs: index in the whole program of each own batch input and output. received: what the inputs after
    those are. sent, sent_values: what leaves, and where the stage makes it. held: parameters whose state is elsewhere.
    """

    stage: int
    first_call: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    received: tuple[BoundaryTensor, ...]
    sent: tuple[BoundaryTensor, ...]
    sent_values: tuple[ValueRef, ...]
    foreign: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Join:
    """The way to put together the values that microbatches have of one output: "cat" along a dim (in each of its
    `outer` parts), "same" (all have it), or "sum", "max", "min" of them."""

    how: Literal["cat", "same", "sum", "max", "min"]
    dim: int = 0
    outer: int = 1


@dataclass(frozen=True)
class Microbatched:
    """How the program of one microbatch hangs in the step (`autopar.passes.batch`).

    outputs: per output. buffers: an update is the "sum" over microbatches, the "same" in all, or made by "each" in turn.
    prologue: how the values of prologue calls are put together. separate: each microbatch is a batch of its own, whose loss is
    divided by their number, because the whole batch couples.
    """

    outputs: tuple[Join, ...]
    buffers: dict[str, Literal["sum", "same", "each"]]
    prologue: tuple[str, ...] = ()
    separate: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """A whole step, one microbatch of it (then `microbatched` says how), or a stage of either. Of a whole one outputs[0] is
    the loss when `training`; so many `extras` after it are what the step gives beside it, which have no gradient, and further
    ones are counts of what rows chose. structure: how outputs are nested, when `training` the extras. guards: what the batch
    inputs of a whole one must hold. conditions: of parameters that have a gradient only in steps in which rows chose what they
    belong to (experts). homes: the stages in which another program's plan has parameters and buffers, whether or not this one
    uses them there."""

    templates: dict[str, Template]
    calls: tuple[Call, ...]
    parameters: dict[str, Parameter]
    buffers: dict[str, Buffer]
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[ValueRef, ...]
    buffer_updates: dict[str, ValueRef]
    training: bool
    batch_dims: tuple[int | None, ...] = ()
    fingerprint: str = ""
    guards: tuple[InputRange, ...] = ()
    conditions: Mapping[str, Conditions] = field(default_factory=dict)
    homes: Mapping[str, frozenset[int]] = field(default_factory=dict, repr=False)
    structure: Any = field(default=None, repr=False)
    extras: int = 0
    microbatched: Microbatched | None = None
    boundary: Boundary | None = None

    @property
    def first_call(self) -> int:
        """Number of calls[0] in the whole program."""
        return self.boundary.first_call if self.boundary else 0

    @property
    def loss(self) -> ValueRef | None:
        """The loss, where this is a training program that makes it."""
        if not self.training or (self.boundary is not None and 0 not in self.boundary.outputs):
            return None
        return self.outputs[0]

    @property
    def output_numbers(self) -> Sequence[int]:
        """The number of each output in the whole program."""
        return self.boundary.outputs if self.boundary is not None else range(len(self.outputs))

    def gives(self, number: int) -> bool:
        """Whether output number `number` of the whole program goes to the user as it is: in training no loss and no count."""
        return not self.training or 0 < number <= self.extras

    def boundary_tensor(self, ref: ValueRef) -> BoundaryTensor | None:
        """The stage-boundary tensor that an input is, if another stage sends it."""
        if self.boundary is None or ref.kind != "input" or ref.index < len(self.boundary.inputs):
            return None
        return self.boundary.received[ref.index - len(self.boundary.inputs)]

    def template_of(self, call: Call) -> Template:
        return self.templates[call.template]

    def type_of(self, ref: ValueRef) -> TensorType:
        if ref.kind == "input":
            return self.inputs[ref.index][1]
        if ref.kind == "buffer":
            return self.buffers[ref.name].type
        template = self.template_of(self.calls[ref.index])
        return template.type_of(template.outputs[ref.output])

    @cached_property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(template.random for template in self.templates.values())

    @cached_property
    def multiplicity(self) -> dict[str, int]:
        """Number of calls of each template."""
        counts: dict[str, int] = {}
        for call in self.calls:
            counts[call.template] = counts.get(call.template, 0) + 1
        return counts

    @cached_property
    def readers(self) -> dict[ValueRef, tuple[tuple[int, int], ...]]:
        """For every value the (call, input slot) pairs that read it."""
        slots: dict[ValueRef, list[tuple[int, int]]] = {}
        for i, call in enumerate(self.calls):
            for j, ref in enumerate(call.inputs):
                slots.setdefault(ref, []).append((i, j))
        return {k: tuple(v) for k, v in slots.items()}

    @cached_property
    def backward_calls(self) -> frozenset[int]:
        """Calls whose backward runs: a gradient of some output reaches them from the loss."""
        if not self.training:
            return frozenset()
        reached: set[int] = set()
        wanted: set[tuple[int, int]] = set()
        if self.loss is not None and self.loss.kind == "call":
            wanted.add((self.loss.index, self.loss.output))
        if self.boundary is not None:
            pairs = zip(self.boundary.sent, self.boundary.sent_values, strict=True)
            wanted |= {(ref.index, ref.output) for tensor, ref in pairs if tensor.gradient}
        for i in reversed(range(len(self.calls))):
            template = self.template_of(self.calls[i])
            if any((i, o) in wanted and t is not None for o, t in enumerate(template.tangents)):
                reached.add(i)
                for ref, grad in zip(self.calls[i].inputs, template.input_grads, strict=True):
                    if ref.kind == "call" and grad is not None:
                        wanted.add((ref.index, ref.output))
        return frozenset(reached)

    @cached_property
    def gradient_places(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By parameter the (call, param slot) pairs whose backward contributes to its gradient."""
        places: dict[str, list[tuple[int, int]]] = {}
        for i in sorted(self.backward_calls):
            grads = self.template_of(self.calls[i]).param_grads
            for slot, name in enumerate(self.calls[i].params):
                if grads[slot] is not None:
                    places.setdefault(name, []).append((i, slot))
        return {name: tuple(pairs) for name, pairs in places.items()}

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Names of parameters that receive a gradient, in table order."""
        return tuple(name for name in self.parameters if name in self.gradient_places)


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def resolve(node: fx.Node) -> tuple[fx.Node, int]:
    """(producing node, result index) of a value node."""
    if is_getitem(node):
        producer, index = node.args
        assert isinstance(producer, fx.Node)
        assert isinstance(index, int)
        return producer, index
    return node, 0


def operand_nodes(node: fx.Node) -> list[fx.Node]:
    """Tensor operands of an op node in argument order (lists flattened)."""
    operands: list[fx.Node] = []

    def visit(arg: Any) -> None:
        if isinstance(arg, fx.Node):
            operands.append(arg)
        elif isinstance(arg, (list, tuple)):
            for a in arg:
                visit(a)

    for arg in (*node.args, *node.kwargs.values()):
        visit(arg)
    return operands


def operand_values(node: fx.Node) -> list[str]:
    return [n.name for n in operand_nodes(node)]


def result_types(node: fx.Node) -> tuple[TensorType | None, ...]:
    type_ = node.meta["type"]
    return type_ if isinstance(type_, tuple) else (type_,)


def op_name(target: Any) -> str:
    """`aten.add.Tensor`, `autopar.linear`."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name.removesuffix(".default") if name.startswith("autopar.") else name
    return str(target)


def op_call(node: fx.Node) -> OpCall:
    """The op at `node` with types in place of tensors."""
    operands = operand_nodes(node)
    order = iter(range(len(operands)))

    def place(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return Operand(next(order))
        if isinstance(arg, (list, tuple)):
            return [place(a) for a in arg]
        return arg

    args = tuple(place(a) for a in node.args)
    kwargs = {k: place(v) for k, v in node.kwargs.items()}
    types = tuple(n.meta["type"] for n in operands)
    return OpCall(op_name(node.target), bind(node.target, args, kwargs), types, result_types(node))


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Another value for an argument of an op node."""
    names = [n for n, _, _ in schema_arguments(node.target)]
    at = names.index(name)
    if at < len(node.args):
        node.args = (*node.args[:at], value, *node.args[at + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
