"""Functions that forward transforms (`torch.vmap`), as the batched ops that the transform makes of them.

Export records the function's own ops between marks that open and close the transform. Such a region is run once more, under
the transform, and traced below it:

    open vmap of 3; w = batch(W); y = matmul(x, w); Y = unbatch(y); close   →   Y = matmul(x, W)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx

_OPENS, _CLOSES = "_increment_nesting", "_decrement_nesting"
_PREPARES = "lazy_load_decompositions"
_HOME = "torch._functorch"


def is_transform(node: fx.Node) -> bool:
    """Whether a node marks a transformed function."""
    return str(getattr(node.target, "__module__", "")).startswith(_HOME)


def without_transforms(exported: Any) -> None:
    """Replace regions of transformed functions by the ops that they come to, in place."""
    graph = exported.graph
    regions = list(_regions(graph))
    for region in regions:
        _dissolve(graph, _without_inner_ops(graph, region))
    if regions:
        _without_idle_constants(exported)


def _without_inner_ops(graph: fx.Graph, region: list[fx.Node]) -> list[fx.Node]:
    """A region without what torch records of the inside of a mark: where an output's batch dim is not the first,
    `_remove_batch_dim` moves it in a tensor that is no value of the graph, and the result is read by nobody."""
    kept: list[fx.Node] = []
    for node in reversed(region):
        if not node.users and isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable:
            graph.erase_node(node)
        else:
            kept.append(node)
    return kept[::-1]


def _without_idle_constants(exported: Any) -> None:
    """Tensors that only such inner ops read are no inputs of the graph."""
    signature = exported.graph_signature
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    idle = [
        (spec, node)
        for spec, node in zip(signature.input_specs, placeholders, strict=True)
        if spec.kind is InputKind.CONSTANT_TENSOR and not node.users
    ]
    for spec, node in idle:
        exported.graph.erase_node(node)
        signature.input_specs.remove(spec)
        exported.constants.pop(spec.target, None)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Nodes from a mark that opens an outermost transform to the one that closes it."""
    depth, region = 0, list[fx.Node]()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if is_transform(node) else ""
        depth += name.endswith(_OPENS)
        if depth or name == _PREPARES:
            region.append(node)
        if name.endswith(_CLOSES):
            depth -= 1
            if not depth:
                yield region
                region = []


def _dissolve(graph: fx.Graph, region: list[fx.Node]) -> None:
    inside = set(region)
    reads = list(dict.fromkeys(read for node in region for read in node.all_input_nodes if read not in inside))
    results = [node for node in region if any(user not in inside for user in node.users)]

    def run(*values: torch.Tensor) -> list[Any]:
        env: dict[fx.Node, Any] = dict(zip(reads, values, strict=True))
        for node in region:
            args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [env[node] for node in results]

    traced = make_fx(run)(*(read.meta["val"] for read in reads)).graph
    copies = dict(zip((n for n in traced.nodes if n.op == "placeholder"), reads, strict=True))
    like = results[-1].meta if results else {}
    with graph.inserting_before(region[0]):
        values = graph.graph_copy(traced, copies)
    for node in copies.values():
        for key in ("nn_module_stack", "stack_trace"):
            node.meta.setdefault(key, like.get(key))
    for node, value in zip(results, values or (), strict=True):  # type: ignore[arg-type]
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)
