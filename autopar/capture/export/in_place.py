"""Writes that are replaced in the graph itself, without the second trace that functionalization takes.

`h += x` on a value that the step has just computed is `h = h + x` for whatever reads it later; `counter += 1` on a buffer, and
what batch norm does to its statistics, are new values that the buffer has after the step. That is so wherever everything that
shares the written memory is known. Which nodes do is read off the trace: views of fake tensors share their storage. So is a
piece that is written (`ids[:, 1:] = …`): the whole with that piece replaced. A step is rewritten where this holds for each of
its writes, and is left to functionalization otherwise.

Eager refuses a backward that needs a value which was written since. Here it would succeed, therefore memory is only written
where autograd keeps nothing of what it held before: the tables of ops say which keep neither operands nor results.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

aten = torch.ops.aten
UNDER_NO_GRAD = "autopar_under_no_grad"
"""Mark in the meta of nodes that were traced under `no_grad`, whose writes autograd does not see."""

_FUNCTIONAL: dict[Any, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.fill_.Scalar: aten.fill.Scalar,
    aten.fill_.Tensor: aten.fill.Tensor,
    aten.copy_.default: aten.copy.default,
    aten.scatter_.value: aten.scatter.value,
    aten.scatter_.src: aten.scatter.src,
    aten.relu_.default: aten.relu.default,
    aten.silu_.default: aten.silu.default,
}
"""The op that returns what an op writes to its first argument."""
_SCATTER: dict[Any, Any] = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""The op that gives the whole with a viewed piece replaced, by the op of the view; further arguments are those of the view."""
_MAKE = frozenset(
    [
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.clone.default, aten.cat.default),
        *(aten.matmul.default, aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.embedding.default),
        *(aten.batch_norm.default, aten.layer_norm.default, aten.lift_fresh_copy.default, aten.new_zeros.default),
        *(aten.zeros_like.default, aten.zeros.default, aten.ones.default, aten.full.default, aten.arange.start),
    ]
)
"""Ops that return new memory, of which their backward reads nothing."""
_MAKE_FIRST = frozenset([aten.topk.default])
"""Ops of which that holds for the first result."""
_KEEP_RESULT = frozenset([aten.relu_.default, aten.silu_.default])
"""Ops among those that write after which autograd may read what they wrote."""
_READ = frozenset(
    [
        *(aten.add.Tensor, aten.sub.Tensor, aten.sum.dim_IntList, aten.sum.default, aten.clone.default),
        *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.ge.Scalar),
    ]
)
"""Ops whose backward does not read their operands."""
_BATCH_NORM, _FUNCTIONAL_BATCH_NORM = aten.batch_norm.default, aten._native_batch_norm_legit_functional.default
_STATISTICS = 3, 4
"""The running statistics are these arguments of batch norm, and the new ones these results of its functional form."""


@dataclass(frozen=True)
class _Write:
    """A node that writes to its argument number `at`."""

    node: fx.Node
    at: int

    @property
    def target(self) -> fx.Node:
        return self.node.args[self.at]  # type: ignore[return-value]


@dataclass(frozen=True)
class _Memory:
    """The nodes that lie in one memory that is written. whole: nodes that are all of it, as `root` is. pieces: those
    that are views of a piece, which is written at once and read by nothing else."""

    root: fx.Node
    whole: frozenset[fx.Node]
    pieces: frozenset[fx.Node]


def without_writes(exported: Any) -> bool:
    """Rewrite an exported step in place such that it writes nothing; False, and nothing is changed, where that is not proven
    right."""
    writes = _writes(exported.graph)
    if writes is None:
        return False
    specs = exported.graph_signature.input_specs
    buffers = {spec.arg.name: spec.target for spec in specs if spec.kind is InputKind.BUFFER}
    order = {node: i for i, node in enumerate(exported.graph.nodes)}
    sharing = _sharing(exported.graph)
    memories: list[_Memory] = []
    for key in dict.fromkeys(_key(write.target) for write in writes):
        memory = _understood(sharing[key], [w for w in writes if _key(w.target) == key], order, buffers)
        if memory is None:
            return False
        memories.append(memory)
    pieces = frozenset[fx.Node]().union(*(memory.pieces for memory in memories))
    values = {write.node: _computed(write.node, write.target not in pieces) for write in writes}
    if any(value is None for value in values.values()):
        return False
    last = _rewrite(exported.graph, writes, memories, values)
    written = {root.name: node for root, node in last.items() if root.op == "placeholder"}
    _return_buffers(exported, {buffer: written[name] for name, buffer in buffers.items() if name in written})
    return True


def _writes(graph: fx.Graph) -> list[_Write] | None:
    """The writes of a graph, in order; None where a node writes in a way that is not known here."""
    writes: list[_Write] = []
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target is _BATCH_NORM and node.args[5]:
            writes += [_Write(node, at) for at in _STATISTICS]
        elif node.target._schema.is_mutable:
            if node.target not in _FUNCTIONAL or node.kwargs or UNDER_NO_GRAD in node.meta:
                return None
            writes.append(_Write(node, 0))
    tensors = (isinstance(w.target, fx.Node) and isinstance(w.target.meta.get("val"), torch.Tensor) for w in writes)
    return writes if all(tensors) else None


def _key(node: fx.Node) -> int:
    """Which memory the value of a node lies in."""
    key: int = node.meta["val"].untyped_storage()._cdata
    return key


def _sharing(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """The nodes whose value lies in one memory, in order. Of several tensors the nodes that take them out do."""
    sharing: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            sharing.setdefault(_key(node), []).append(node)
    return sharing


def _understood(
    members: Sequence[fx.Node], writes: Sequence[_Write], order: dict[fx.Node, int], buffers: dict[str, str]
) -> _Memory | None:
    """The memory that members share, if up to the last of its writes nothing reads or views it in a way that is not known."""
    root, last, shared = members[0], order[writes[-1].node], set(members)
    is_buffer = root.op == "placeholder" and root.name in buffers
    if not is_buffer and not _is_new(root):
        return None
    whole, pieces, before = {root}, set(), order[root]
    for write in writes:
        node, target = write.node, write.target
        if sum(read in shared for read in _operands(node)) != 1 or (node.target in _KEEP_RESULT and order[node] < last):
            return None
        if node.target is _BATCH_NORM:
            if not is_buffer or len(writes) > 1 or target is not root:
                return None
        elif node not in shared:
            return None
        elif target in whole:
            whole.add(node)
        elif target.target in _SCATTER and target.args[0] in whole and order[target] > before:
            if node.users or len(target.users) != 1:
                return None
            pieces |= {target, node}
        else:
            return None
        before = order[node]
    writing = {write.node for write in writes}
    for member in members:
        if member not in whole | pieces and (is_buffer or order[member] < last):
            return None
    for user in {user for node in whole for user in node.users} - writing - pieces:
        if (is_buffer and user.op == "output") or (order[user] < last and user.target not in _READ):
            return None
    return _Memory(root, frozenset(whole), frozenset(pieces))


def _operands(node: fx.Node) -> list[fx.Node]:
    """Every argument of a node that is one, as often as it is."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return operands


def _is_new(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        producer, index = node.args
        return isinstance(producer, fx.Node) and producer.target in _MAKE_FIRST and not index
    return node.op == "call_function" and node.target in _MAKE


def _computed(node: fx.Node, is_whole: bool) -> Any:
    """The result of a node's functional form, on fake tensors; None where it is not like what is written (an op that
    writes keeps dtype, shape and strides; a piece is copied into the whole, whose strides it has then)."""
    args: Any = fx.map_arg(node.args, lambda read: read.meta["val"])
    with node.meta["val"].fake_mode, torch.no_grad():
        if node.target is _BATCH_NORM:
            return _FUNCTIONAL_BATCH_NORM(*args[:8])
        value = _FUNCTIONAL[node.target](*args)
    if (value.dtype, value.shape) != (args[0].dtype, args[0].shape) or (
        is_whole and value.stride() != args[0].stride()
    ):
        return None
    return value


def _rewrite(
    graph: fx.Graph, writes: Sequence[_Write], memories: Sequence[_Memory], values: dict[fx.Node, Any]
) -> dict[fx.Node, fx.Node]:
    """Every write becomes its functional form; what reads a memory reads the last value that it was given before. Returns
    the value that each memory has in the end, by its root."""
    root_of = {node: memory.root for memory in memories for node in memory.whole}
    root_of |= {piece: memory.root for memory in memories for piece in memory.pieces}
    last = {memory.root: memory.root for memory in memories}
    whole = {node for memory in memories for node in memory.whole}
    targets: dict[fx.Node, list[fx.Node]] = {}
    for write in writes:
        targets.setdefault(write.node, []).append(write.target)
    for node in list(graph.nodes):
        for read in node.all_input_nodes:
            if read in whole and last[root_of[read]] is not read:
                node.replace_input_with(read, last[root_of[read]])
        if node not in targets:
            continue
        roots = [root_of[target] for target in targets[node]]
        with graph.inserting_before(node):
            if node.target is _BATCH_NORM:
                results = _call(graph, _FUNCTIONAL_BATCH_NORM, node.args[:8], node, values[node])
                out, *new = (
                    _call(graph, operator.getitem, (results, i), node, values[node][i]) for i in (0, *_STATISTICS)
                )
                node.replace_all_uses_with(out)
            else:
                new = [_call(graph, _FUNCTIONAL[node.target], node.args, node, values[node])]
                (target,) = targets[node]
                if target not in whole:
                    args = (last[roots[0]], *new, *target.args[1:])
                    new = [_call(graph, _SCATTER[target.target], args, node, last[roots[0]].meta["val"])]
        last |= dict(zip(roots, new, strict=True))
    for node in reversed(targets):
        graph.erase_node(node)
    return last


def _call(graph: fx.Graph, target: Any, args: Any, like: fx.Node, value: Any) -> fx.Node:
    new = graph.call_function(target, tuple(args))
    new.meta = {**like.meta, "val": value}
    return new


def _return_buffers(exported: Any, new: dict[str, fx.Node]) -> None:
    """The new values of buffers, by name, become outputs of the step."""
    output, signature = exported.graph.output_node(), exported.graph_signature
    output.args = ((*new.values(), *output.args[0]),)
    signature.output_specs[:0] = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(node.name), buffer) for buffer, node in new.items()
    ]
    for spec, node in zip(signature.output_specs, output.args[0], strict=True):
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(node.name)
    exported.graph_module.recompile()
