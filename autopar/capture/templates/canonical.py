"""Canonicalize a traced template graph: fewer kinds of nodes, same values.

Copies without effect vanish; every view that only regroups dims becomes `reshape`, every reordering `permute`, every
full sum `sum.dim_IntList`; scalars lifted to tensors, and constants made in the likeness of one, become `full`; equal
nodes are merged; unused ones removed.
Nothing writes in place here, so dropping a copy changes no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.capture.dead_code import remove_dead_code
from autopar.capture.graph.channels_last import is_kept
from autopar.errors import CaptureError
from autopar.ir.program import is_getitem, op_name
from autopar.ir.types import TensorType
from autopar.ops.registry import OpDef, find

aten = torch.ops.aten
_FILLED: dict[Any, Callable[[fx.Node], Any]] = {
    aten.new_zeros.default: lambda node: 0,
    aten.zeros_like.default: lambda node: 0,
    aten.new_empty.default: lambda node: 0,
    aten.empty_like.default: lambda node: 0,
    aten.new_ones.default: lambda node: 1,
    aten.ones_like.default: lambda node: 1,
    aten.new_full.default: lambda node: node.args[2],
    aten.full_like.default: lambda node: node.args[1],
}
"""Ops that take shape, dtype and device from a tensor, and its values from none: what they fill theirs with."""


def canonicalize(module: fx.GraphModule) -> None:
    """Rewrite `module.graph` in place and give every node `meta["type"]`."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "get_attr":
            _constant(module, node)
        elif node.op == "call_function" and node.meta.get("val") is None and not node.users:
            graph.erase_node(node)  # assertions about metadata: shapes are fixed here
        elif node.op == "call_function":
            node.meta["type"] = _type_of(node.meta["val"])
            _say_dtype(node)
            _simplify(graph, node)
        elif node.op == "placeholder":
            node.meta["type"] = _type_of(node.meta["val"])
    merge_equal(graph)
    remove_dead_code(graph)
    _name_values(graph)
    graph.lint()


def _name_values(graph: fx.Graph) -> None:
    """Readable names: `normed`, `rstd` for the results of a norm, no leading underscores."""
    taken = {n.name for n in graph.nodes}
    for node in graph.nodes:
        if is_getitem(node):
            producer, index = node.args
            definition = find(op_name(producer.target))
            names = definition.result_names if definition is not None else ()
            stem = names[index] if index < len(names) else f"{producer.name.lstrip('_')}_{index}"
        elif node.op == "call_function" and node.name.startswith("_"):
            stem = node.name.lstrip("_")
        else:
            continue
        name, k = stem, 1
        while name in taken:
            name, k = f"{stem}_{k}", k + 1
        taken.add(name)
        node._rename(name)


def _type_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorType.of(value)
    if isinstance(value, (tuple, list)):
        return tuple(_type_of(v) for v in value)
    return None


def _constant(module: fx.GraphModule, node: fx.Node) -> None:
    value = getattr(module, str(node.target))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise CaptureError(
            f"a constant of shape {tuple(getattr(value, 'shape', ()))} was made while tracing a backward; register it "
            "as a buffer of the module instead"
        )
    graph = module.graph
    with graph.inserting_before(node):
        new = graph.call_function(aten.full.default, (list(value.shape), value.item()), {"dtype": value.dtype})
    new.meta["type"] = TensorType(tuple(value.shape), value.dtype)
    new.meta["val"] = value
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _node(arg: Any) -> fx.Node:
    assert isinstance(arg, fx.Node)
    return arg


def _say_dtype(node: fx.Node) -> None:
    """Ops that make a tensor from nothing name its dtype, which must not follow a default of the running process."""
    type_, schema = node.meta["type"], getattr(node.target, "_schema", None)
    if isinstance(type_, TensorType) and schema is not None and not node.all_input_nodes:
        if any(a.name == "dtype" and a.kwarg_only for a in schema.arguments) and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": type_.dtype}


def _replace(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    node.target, node.args, node.kwargs = target, args, kwargs


def _simplify(graph: fx.Graph, node: fx.Node) -> None:
    type_ = node.meta["type"]
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(type_, TensorType):
        if node.target in (aten.scalar_tensor.default,):
            _replace(graph, node, aten.full.default, ([], node.args[0]), {"dtype": type_.dtype})
        return
    if node.target in _FILLED:
        _replace(
            graph, node, aten.full.default, (list(type_.shape), _FILLED[node.target](node)), {"dtype": type_.dtype}
        )
        return
    if is_kept(node):
        return
    before = source.meta["type"]
    same = before == type_
    definition = find(op_name(node.target)) or OpDef()
    form = definition.canonical
    without_effect = form == "copy" or (same and form in ("cast", "regroup"))
    if source.op == "placeholder" and without_effect and any(u.op == "output" for u in node.users):
        _replace(graph, node, aten.clone.default, (source,), {})  # an output needs a producer of its own
    elif without_effect:
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    elif form == "regroup":
        while source.target is aten.reshape.default:
            source = _node(source.args[0])
        if source.meta["type"] == type_:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        else:
            _replace(graph, node, aten.reshape.default, (source, list(type_.shape)), {})
    elif form == "cast" and before.shape == type_.shape:
        _replace(graph, node, aten._to_copy.default, (source,), {"dtype": type_.dtype})
    elif definition.reorder is not None:
        order = definition.reorder(node.args[1:], len(before.shape))
        if source.target is aten.permute.default:
            first: Any = source.args[1]
            order, source = [first[d] for d in order], _node(source.args[0])
        if order == list(range(len(order))):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        else:
            _replace(graph, node, aten.permute.default, (source, order), {})
    elif node.target is aten._conj.default:  # a tensor that is to be conjugated later cannot be sent
        _replace(graph, node, aten.conj_physical.default, (source,), {})
    elif node.target is aten._neg_view.default:
        _replace(graph, node, aten.neg.default, (source,), {})
    elif node.target is aten.expand.default and same:
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    elif node.target is aten.expand.default:
        _replace(graph, node, aten.expand.default, (source, list(type_.shape)), {})
    elif node.target is aten.copy.default:
        _copied(graph, node, type_)
    elif node.target in (aten.mean.default, aten.mean.dim):
        _mean(graph, node, before.shape, type_)
    elif node.target is aten.sum.default:
        _replace(graph, node, aten.sum.dim_IntList, (source, list(range(len(before.shape)))), dict(node.kwargs))


def _mean(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...], type_: TensorType) -> None:
    """A mean is a sum divided by a number, so that what is summed can be sharded (composite losses hold means)."""
    given: Any = node.args[1] if len(node.args) > 1 else None
    dims = [d % len(shape) for d in given] if given else list(range(len(shape)))
    keep = bool(node.args[2]) if len(node.args) > 2 else False
    with graph.inserting_before(node):
        total = graph.call_function(aten.sum.dim_IntList, (node.args[0], dims, keep), {"dtype": type_.dtype})
    total.meta = {**node.meta}
    _replace(graph, node, aten.div.Scalar, (total, max(math.prod(shape[d] for d in dims), 1)), {})


def _copied(graph: fx.Graph, node: fx.Node, type_: TensorType) -> None:
    """`copy(self, source)` is the source in the shape and dtype of self."""
    source: Any = node.args[1]
    before = source.meta["type"]
    if before == type_:
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    elif before.dtype == type_.dtype:
        _replace(graph, node, aten.expand.default, (source, list(type_.shape)), {})
    else:
        with graph.inserting_before(node):
            cast = graph.call_function(aten._to_copy.default, (source,), {"dtype": type_.dtype})
        cast.meta = {**node.meta, "type": TensorType(before.shape, type_.dtype)}
        _replace(graph, node, aten.expand.default, (cast, list(type_.shape)), {})


def merge_equal(graph: fx.Graph) -> None:
    """Common subexpressions: nodes with the same target and arguments become one (random sites are arguments)."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _freeze(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return ("node", arg.name)
    if isinstance(arg, (list, tuple)):
        return tuple(_freeze(a) for a in arg)
    if isinstance(arg, dict):
        return tuple(sorted((k, _freeze(v)) for k, v in arg.items()))
    return (type(arg).__name__, str(arg))
