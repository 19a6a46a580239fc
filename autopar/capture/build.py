"""capture_program: model and example inputs in, Program out.

Segments are traced in order; a segment whose signature was seen before reuses its template, so the work does not grow
with depth. After differentiation the parameters that receive a gradient are compared with those of the eager model
(run on fake tensors): a gradient that went missing is an error, never a silent zero.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.direct_shapes import DirectShapes
from autopar.capture.examples.inputs import batch_dim
from autopar.capture.export.fake import fake_mode
from autopar.capture.export.faster_export import lean, of_functions
from autopar.capture.export.step import export_step
from autopar.capture.exported import Captured, Exported, Gives
from autopar.capture.graph.channels_last import keep_channels_last
from autopar.capture.graph.head_losses import join_head_losses
from autopar.capture.graph.index_guards import guard_indices, without_guards
from autopar.capture.graph.precision import lower_precision, use_dtype
from autopar.capture.graph.tidy import tidied
from autopar.capture.templates.differentiate import trace_template
from autopar.capture.templates.fold import Segment, cut, signature
from autopar.capture.templates.gradient_conditions import with_conditions
from autopar.errors import CaptureError
from autopar.ir.memory_levers import PRECISIONS
from autopar.ir.program import Buffer, Call, Conditions, Parameter, Program, Template, ValueRef, is_getitem, op_name
from autopar.ir.types import TensorType
from autopar.ops.registry import find


def capture_program(
    model: nn.Module,
    inputs: Any,
    loss_fn: Any = None,
    targets: int = 0,
    batch_dims: Any = None,
    starts: Sequence[str] = (),
    precision: str | None = None,
    pieces: int = 1,
    guards: bool = True,
    branches: str = "select",
    told: Mapping[str, Any] = MappingProxyType({}),
    to_train: bool = False,
    gives: Gives = "step",
) -> Captured:
    """Capture, fold and differentiate. starts: modules at which a call must start. precision, guards, branches: see Options.
    pieces: what the loss is divided by. told: Options by name, for ops that have them as arguments. to_train: something is asked
    for that means nothing in inference, so that a scalar among other outputs may be the loss. gives: what the capture is of.

    Raises CaptureError, InputError.
    """
    mode = fake_mode()
    with lean():
        whole, conditions = with_conditions(
            export_step(model, inputs, loss_fn, targets, mode, pieces, branches, guards, to_train, gives)
        )
        keep_channels_last(whole, model)
        exported = tidied(whole)
        tell_options(exported.graph, told)
        if precision is not None:
            lower_precision(exported, PRECISIONS[precision], mode)
        join_head_losses(exported, _reach_loss(exported.graph.output_node(), exported), mode)
        with mode, of_functions():
            builder = _Builder(exported, model)
            builder.run(mode, starts)
        return Captured(builder.program(batch_dims, guards, conditions), exported)


def tell_options(graph: fx.Graph, told: Mapping[str, Any]) -> None:
    """Arguments of ops that are Options get their values."""
    for node in graph.nodes:
        asked = {name: told[name] for name in _options(node) if name in told}
        if asked:
            args, kwargs = _without_options(node)
            node.args, node.kwargs = args, {**kwargs, **asked}


def _options(node: fx.Node) -> tuple[str, ...]:
    """Arguments of an op that are Options."""
    definition = find(op_name(node.target)) if node.op == "call_function" else None
    return () if definition is None else definition.options


def _without_options(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op but those that are Options, which come last."""
    names = _options(node)
    if not names:
        return node.args, node.kwargs
    order = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return node.args[: min(map(order.index, names))], {k: v for k, v in node.kwargs.items() if k not in names}


class _Builder:
    """State of one capture: templates by signature, where each captured value lives, which values carry gradients."""

    def __init__(self, exported: Exported, model: nn.Module) -> None:
        self.exported = exported
        self.model = model
        self.templates: dict[str, Template] = {}
        self.by_signature: dict[Any, tuple[Template, list[bool]]] = {}
        self.calls: list[Call] = []
        self.where: dict[fx.Node, ValueRef] = {}
        self.flows: dict[fx.Node, bool] = {}
        self.reach: set[fx.Node] = set()
        named = dict(model.named_parameters(remove_duplicate=False))
        aliases: dict[str, list[str]] = {}
        for alias, name in exported.parameter_names.items():
            if alias != name:
                aliases.setdefault(name, []).append(alias)
        self.parameters = {
            name: Parameter(name, TensorType.of(p), p.requires_grad and p.numel() > 0, tuple(aliases.get(name, ())))
            for name, p in named.items()
            if exported.parameter_names.get(name, name) == name
        }
        persistent = set(model.state_dict(keep_vars=True))  # without it every tensor is detached
        self.buffers = {name: Buffer(name, TensorType.of(b), name in persistent) for name, b in model.named_buffers()}
        for name, tensor in exported.constants.items():
            self.buffers.setdefault(name, Buffer(name, TensorType.of(tensor), False))
        self.inputs: list[tuple[str, TensorType]] = []
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                self._place(node)

    def _place(self, node: fx.Node) -> None:
        kind, what = self.exported.kinds[node.name]
        if kind == "input":
            self.where[node] = ValueRef("input", what)
            self.inputs.append((self.exported.input_names[what], TensorType.of(node.meta["val"])))
            self.flows[node] = False
        elif kind in ("buffer", "constant"):
            self.where[node] = ValueRef("buffer", name=what)
            self.flows[node] = False
        else:
            self.flows[node] = self.parameters[what].trainable and self.exported.training

    def run(self, mode: DirectShapes, starts: Sequence[str] = ()) -> None:
        graph = self.exported.graph
        output = graph.output_node()
        _give_placeholders_a_node(graph, output)
        _put_beside_their_source(output, self.exported)
        results = {n for n in output.args[0] if isinstance(n, fx.Node)}  # type: ignore[union-attr]
        self.reach = _reach_loss(output, self.exported)
        parameters = {n for n in graph.nodes if self._is_param(n)}
        for segment in cut(graph, results, parameters, starts):
            if segment.writes:
                self._add(segment, mode)

    def _type(self, node: fx.Node, inside: frozenset[fx.Node]) -> TensorType:
        """The type in which a segment gets a value: parameters in the dtype that its ops read them in."""
        type_ = TensorType.of(node.meta["val"])
        low = use_dtype(node, inside) if self._is_param(node) else None
        return type_ if low is None else TensorType(type_.shape, low)

    def _is_param(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and self.exported.kinds[node.name][0] == "param"

    def _add(self, segment: Segment, mode: DirectShapes) -> None:
        pulled = [w in self.reach for w in segment.writes]
        inside = frozenset(segment.nodes)
        types = {r: self._type(r, inside) for r in segment.reads}
        described = {r: (types[r], self._is_param(r), self.flows[r]) for r in segment.reads}
        key = signature(segment, described.__getitem__), tuple(pulled)
        traced = self.by_signature.get(key)
        if traced is None:
            name = self._name(segment)
            reads = [mode.empty(types[r].shape, types[r].dtype).requires_grad_(self.flows[r]) for r in segment.reads]
            traced = trace_template(name, segment, reads, [self._is_param(r) for r in segment.reads], pulled, mode)
            self.by_signature[key] = traced
            self.templates[name] = traced[0]
        template, flows = traced
        index = len(self.calls)
        params = tuple(self.exported.kinds[r.name][1] for r in segment.reads if self._is_param(r))
        values = tuple(self.where[r] for r in segment.reads if not self._is_param(r))
        self.calls.append(Call(template.name, params, values, segment.path, start=segment.start))
        for i, write in enumerate(segment.writes):
            self.where[write] = ValueRef("call", index, i)
            self.flows[write] = flows[i]

    def _name(self, segment: Segment) -> str:
        path = segment.path.split("@")[0]
        parts = [p for p in path.split(".") if not p.isdigit()]
        stem = re.sub(r"\W", "_", "_".join(parts)) or ("step" if not self.templates else "part")
        if not stem.isidentifier() or keyword.iskeyword(stem):
            stem = f"block_{stem}"
        name, k = stem, 1
        while name in self.templates:
            name, k = f"{stem}_{k}", k + 1
        return name

    def program(self, batch_dims: Any, guards: bool, conditions: Mapping[str, Conditions]) -> Program:
        exported = self.exported
        nodes = {n.name: n for n in exported.graph.nodes}
        final = exported.graph.output_node().args[0]
        names = [n.name for n in final]  # type: ignore[union-attr]
        current = dict(zip(exported.output_names, names, strict=True))
        outputs = tuple(self.where[nodes[current[o]]] for o in exported.outputs)
        updates = {buffer: self.where[nodes[current[n]]] for buffer, n in exported.updates.items()}
        program = Program(
            self.templates,
            tuple(self.calls),
            self.parameters,
            self.buffers,
            tuple(self.inputs),
            outputs,
            updates,
            exported.training,
            tuple(_batch_dims(self.inputs, batch_dims)),
            structure=exported.output_structure,
            extras=exported.extras,
            conditions=conditions,
        )
        self._check_gradients(program)
        program = guard_indices(program, self._constants(updates)) if guards else without_guards(program)
        object.__setattr__(program, "fingerprint", fingerprint(program))
        return program

    def _constants(self, updates: Collection[str]) -> dict[str, torch.Tensor]:
        """Values of the buffers that neither the step nor a checkpoint changes."""
        held = {**self.exported.constants, **dict(self.model.named_buffers())}
        return {
            name: held[name]
            for name, buffer in self.buffers.items()
            if not buffer.persistent
            and name not in updates
            and type(held[name]) is torch.Tensor
            and not held[name].is_meta
        }

    def _check_gradients(self, program: Program) -> None:
        if not program.training:
            return
        got = set(program.trained)
        if missing := sorted(self.exported.eager_grads - got):
            raise CaptureError(
                f"the captured program has no gradient for {', '.join(missing[:5])} where the eager model has one: an op "
                "between it and the loss lost its backward in capture. Write that op with torch ops, or register it with "
                "@autopar.register_op"
            )
        if surplus := sorted(got - self.exported.eager_grads):
            raise CaptureError(
                f"the captured program has a gradient for {', '.join(surplus[:5])} where the eager model has none: a detach "
                "was lost in capture. Freeze these parameters with requires_grad_(False) if they are not to be trained"
            )


def _give_placeholders_a_node(graph: fx.Graph, output: fx.Node) -> None:
    """Outputs that are inputs or parameters themselves become results of an op."""
    results = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        for i, value in enumerate(results):
            if isinstance(value, fx.Node) and value.op == "placeholder":
                new = graph.call_function(torch.ops.aten.alias.default, (value,))
                new.meta = dict(value.meta)
                results[i] = new
    output.args = (tuple(results),)


def _put_beside_their_source(output: fx.Node, exported: Exported) -> None:
    """The extras of a training step leave the calls that make what they show, and not a call of their own that copies it."""
    names = dict(zip(exported.output_names, output.args[0], strict=True))  # type: ignore[arg-type]
    for name in exported.outputs[1 : 1 + exported.extras]:
        extra = names[name]
        source = extra.args[0] if extra.target is torch.ops.aten.detach.default else None
        if isinstance(source, fx.Node) and source.op == "call_function":
            last = source
            while is_getitem(source) and is_getitem(last.next):  # the results of an op stay together
                last = last.next
            last.append(extra)
            extra.meta = {**source.meta, "val": extra.meta["val"]}


def _reach_loss(output: fx.Node, exported: Exported) -> set[fx.Node]:
    """Nodes from which a gradient may flow: the loss reads them, and not behind a detach. Empty in inference."""
    if not exported.training:
        return set()
    names = dict(zip(exported.output_names, output.args[0], strict=True))  # type: ignore[arg-type]
    stack: list[fx.Node] = [names[exported.outputs[0]]]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(() if node.target is torch.ops.aten.detach.default else node.all_input_nodes)
    return seen


def _batch_dims(inputs: list[tuple[str, TensorType]], batch_dims: Any) -> list[int | None]:
    """Batch dim per input: as `batch_dims` says, else dim 0 where it is as large as that of the first input."""
    dims: list[int | None] = []
    size: int | None = None
    for i, (name, type_) in enumerate(inputs):
        usual = 0 if type_.shape and size in (None, type_.shape[0]) else None
        dim = batch_dim(batch_dims, i, name, default=usual)
        if size is None and dim is not None:
            size = type_.shape[dim]
        dims.append(dim)
    return dims


def fingerprint(program: Program) -> str:
    """A hash of everything that a plan depends on: templates, calls, parameters, inputs; not of Options that ops are told."""
    text: list[str] = []
    for template in program.templates.values():
        text.append(template.name)
        for node in template.graph.nodes:
            args, kwargs = _without_options(node)
            text.append(f"{node.name} {op_name(node.target)} {args} {kwargs} {node.meta.get('type')}")
    text += [f"{c.template} {c.params} {c.inputs}" for c in program.calls]
    text += [f"{p.name} {p.type} {p.trainable}" for p in program.parameters.values()]
    text += [f"{name} {type_}" for name, type_ in program.inputs]
    text += [f"{name} {ways}" for name, ways in program.conditions.items()]
    text += [f"beside the loss {ref}" for ref in program.outputs[1 : 1 + program.extras]]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
