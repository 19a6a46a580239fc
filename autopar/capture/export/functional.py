"""An exported step as one flat graph that writes nothing.

Regions under `no_grad` are inlined with their results detached, those under autocast with its casts; in-place ops and buffer
updates are made functional (`in_place.py`, or all over again by torch's functionalization), buffer updates become outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.dead_code import remove_dead_code
from autopar.capture.export.faster_export import lean
from autopar.capture.export.in_place import UNDER_NO_GRAD, without_writes
from autopar.capture.export.repeated import with_repeats
from autopar.capture.export.transforms import is_transform, without_transforms
from autopar.capture.source_lines import source_of
from autopar.capture.while_traced.alike import repeats, traced_in_full
from autopar.capture.while_traced.autocast import Region, settle
from autopar.errors import CaptureError


def functional(traced: Any, writes: bool) -> Any:
    """The same step as a graph that writes nothing; a traced one stays as it is. writes: as `traced_step` says."""
    exported = traced.run_decompositions({}) if writes else traced
    for node in exported.graph.nodes:
        if node.target in _BY_PLACE:
            raise CaptureError(
                f"as_strided at {source_of(node)} reads elements by their places in memory, which are others where a rank "
                "holds a part of the tensor; write it with unfold, slices or reshape"
            )
    return exported


def traced_step(
    step: nn.Module, fakes: list[torch.Tensor], restore: Callable[[], None] | None = None
) -> tuple[Any, bool]:
    """The step exported on fake tensors, and whether it is still to be made functional. restore: puts the Python state back
    before the step is traced once more, in full. Raises CaptureError."""
    exported = _exported(step, fakes, restore)
    without_transforms(exported)
    _without_detached_constants(exported.graph_module.graph)
    remove_dead_code(exported.graph_module.graph)
    _check_nodes(exported.graph_module.graph)
    writes = _writes(exported.graph_module.graph)
    if writes:
        _without_idle_dropout(exported.graph_module.graph)
    if not writes or without_writes(exported):
        return exported, False
    _merge_tied_buffers(exported)
    return exported, True


def _exported(step: nn.Module, fakes: list[torch.Tensor], restore: Callable[[], None] | None = None) -> Any:
    """The step exported, without regions; in full where a call that others are like is not in one piece, or a parameter that
    was set aside is read where it cannot be a node."""
    # functions under torch.compile are traced like any other
    with torch.compiler.set_stance("force_eager"), lean(), repeats(step) as calls:
        step.repeats = calls  # type: ignore[assignment]
        try:
            exported = torch.export.export(step, tuple(fakes), strict=False)
        except Exception:
            if not calls.aside.is_lost:
                raise
    if not calls.aside.is_lost:
        _inline_regions(exported.graph_module)
        if with_repeats(exported, calls, _writes(exported.graph_module.graph)):
            return exported
    if restore is not None:
        restore()
    with traced_in_full():
        return _exported(step, fakes)


def _without_detached_constants(graph: fx.Graph) -> None:
    """`torch.tensor(…)` of Python numbers detaches what it made, in place: nothing changes, for a constant has no gradient."""
    for node in list(graph.nodes):
        if (
            node.target is torch.ops.aten.detach_.default
            and node.args[0].target is torch.ops.aten.lift_fresh_copy.default
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _without_idle_dropout(graph: fx.Graph) -> None:
    """Dropout that drops nothing returns its operand itself: what is written to the one is written to the other, which neither
    the op's schema nor its shape function says."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.dropout.default and (node.args[1] == 0 or not node.args[2]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _merge_tied_buffers(exported: Any) -> None:
    """A buffer of several names is read and written under the first: functionalization takes no tensor twice."""
    first: dict[int, fx.Node] = {}
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    for spec, node in zip(exported.graph_signature.input_specs, placeholders, strict=True):
        table = exported.state_dict if spec.target in exported.state_dict else exported.constants
        if spec.kind.name != "BUFFER" or spec.target not in table:
            continue
        buffer = table[spec.target]
        if (same := first.setdefault(id(buffer), node)) is not node:
            node.replace_all_uses_with(same)
            table[spec.target] = torch.empty_like(buffer)


def check_writes(exported: Any, names: Sequence[str]) -> None:
    """Buffers may be written; parameters and inputs that change under way have no place in a step. names: of inputs.
    Raises CaptureError."""
    outputs = exported.graph.output_node().args[0]
    for spec, node in zip(exported.graph_signature.output_specs, outputs, strict=True):
        source = source_of(node) if isinstance(node, fx.Node) else ""
        where = f" at {source}" if source else ""
        if spec.kind.name == "PARAMETER_MUTATION":
            raise CaptureError(
                f"forward writes to the parameter {spec.target.removeprefix('model.')} in place{where}; only the optimizer may "
                "change parameters: compute a value from it (w = self.weight.clamp(…)), or keep a buffer"
            )
        if spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError(
                f"forward writes to its input {names[int(spec.target.rsplit('_', 1)[1])]} in place{where}; write to a copy "
                "(x = x.clone(), or x = x + y for x += y)"
            )


_SPARSE = {
    torch.ops.aten.embedding.default: 4,
    torch.ops.aten.embedding_bag.padding_idx: 5,
    torch.ops.aten.embedding_bag.default: 5,
}
"""The position of the argument that asks for sparse gradients, by op."""


_BY_PLACE = frozenset(
    [torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default, torch.ops.aten.as_strided_scatter.default]
)
"""Ops that count elements as they lie in memory, not by their indices."""


def _writes(graph: fx.Graph) -> bool:
    """Whether any op writes to its arguments or to buffers."""
    return any(
        node.target._schema.is_mutable or (node.target is torch.ops.aten.batch_norm.default and node.args[5])
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )


def _check_nodes(graph: fx.Graph) -> None:
    """Raises CaptureError for nodes that no program has."""
    for node in graph.nodes:
        if is_transform(node):
            raise CaptureError(
                f"forward transforms a function (torch.func.grad, jvp) at {source_of(node)}, which has no graph of its own; "
                "write it with batched torch ops"
            )
        if isinstance(node.target, torch._ops.OpOverload):
            if node.target is torch.ops.aten.instance_norm.default and node.args[3] is not None and node.args[5]:
                raise CaptureError(
                    f"torch.instance_norm in training at {source_of(node)}: export loses the update of its statistics; use "
                    "F.instance_norm or nn.InstanceNorm, whose update is known"
                )
            sparse = _SPARSE.get(node.target)
            if sparse is not None and len(node.args) > sparse and node.args[sparse]:
                raise CaptureError(
                    "an embedding with sparse=True has sparse gradients, which programs do not: leave sparse=True out (the "
                    "values are the same)"
                )
            if node.target is torch.ops.aten.set_.source_Tensor:
                raise CaptureError(
                    "forward gives a tensor the memory of another one (set_); assign the tensor itself instead"
                )


def _inline_regions(module: fx.GraphModule) -> None:
    """Replace grad-mode and autocast regions by their nodes: results of no_grad are detached, operands of autocast cast."""
    graph = module.graph
    changed = False
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *args = node.args
        elif name == "wrap_with_autocast":
            device, dtype, casting, _, body, *args = node.args
            enabled = True
        else:
            continue
        inner = getattr(module, body.target)
        _inline_regions(inner)
        if name == "wrap_with_autocast":
            settle(inner.graph, Region(device, dtype or torch.get_autocast_dtype(device), casting))
        env = dict(zip((n for n in inner.graph.nodes if n.op == "placeholder"), args, strict=True))
        with graph.inserting_before(node):
            for sub in inner.graph.nodes:
                if sub.op == "call_function":
                    new = graph.node_copy(sub, env.__getitem__)
                    new.meta["stack_trace"] = sub.meta.get("stack_trace") or node.meta.get("stack_trace")
                    new.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack"))
                    if not enabled:
                        new.meta[UNDER_NO_GRAD] = True
                    env[sub] = new
            (results,) = (n.args[0] for n in inner.graph.nodes if n.op == "output")
            values = [env[r] for r in results]
            if not enabled:
                values = [_detached(graph, v, node) for v in values]
        for user in list(node.users):
            user.replace_all_uses_with(values[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        changed = True
    if changed:
        for node in graph.nodes:
            for read in node.all_input_nodes:
                read.users.setdefault(node)  # torch's own inlining forgets readers that have it in a list
        module.recompile()


def _detached(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    new = graph.call_function(torch.ops.aten.detach.default, (value,))
    new.meta = {**value.meta, "nn_module_stack": like.meta.get("nn_module_stack")}
    return new
