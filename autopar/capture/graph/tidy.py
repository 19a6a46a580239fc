"""Leaves out of an exported graph what computes nothing, so that a model plans like one that is written without it.

Libraries concatenate an empty cache to every key, add zero positions, scale by one, cast back and forth and repeat heads
before attention. None of it changes a value, yet a concatenation cannot be sharded, a mask is read by every layer, and heads
that are repeated are sent as many times. Tensors are taken apart in the order in which they lie (`_unbound`). Each rewrite is
exact: the new node has the old one's values, bit for bit (adding 0 to a float is not left out: it would turn -0.0 into 0.0).
Nothing in the graph writes in place, so a node may stand for its copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import fx

from autopar.capture.dead_code import remove_dead_code
from autopar.capture.exported import Exported
from autopar.capture.graph.bags import with_bags
from autopar.capture.graph.channels_last import is_kept
from autopar.capture.graph.position_masks import without_position_masks
from autopar.capture.graph.row_picks import with_gathers
from autopar.ir.types import TensorType

aten = torch.ops.aten


def tidied(exported: Exported) -> Exported:
    """The same step with a graph that was rewritten in place, and without the constants that it does not read any more."""
    graph = exported.graph
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:  # of dtypes, which are fixed
            graph.erase_node(node)
            continue
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # of a value whose copy in memory may go
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        same = rewrite(node) if rewrite is not None else None
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    without_position_masks(graph)
    held = [n for n in graph.nodes if n.op == "placeholder" and exported.kinds[n.name][0] == "constant"]
    with_gathers(graph, {n: exported.constants[exported.kinds[n.name][1]] for n in held})
    for node in graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            _without_repeats(node)
    remove_dead_code(graph)
    unread = [n for n in held if not n.users]
    read = {exported.kinds[n.name][1] for n in held if n.users}
    gone = {exported.kinds[n.name][1] for n in unread} - read  # constants that hold the same have one name
    for node in unread:
        graph.erase_node(node)
    return replace(exported, constants={k: v for k, v in exported.constants.items() if k not in gone})


def type_of(node: Any) -> TensorType | None:
    """The type of a node's tensor; None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return TensorType.of(value) if isinstance(value, torch.Tensor) else None


def _same_type(node: fx.Node, source: Any) -> fx.Node | None:
    return source if type_of(source) is not None and type_of(source) == type_of(node) else None


def _neutral(value: float) -> Callable[[fx.Node], fx.Node | None]:
    """For ops of two operands, of which the second changes nothing if it is this number."""

    def rewrite(node: fx.Node) -> fx.Node | None:
        other = node.args[1]
        if isinstance(other, bool) or not isinstance(other, (int, float)) or node.kwargs:
            return None
        if other != value or math.copysign(1, other) < 0:  # x - -0.0 is x + 0.0
            return None
        return _same_type(node, node.args[0])

    return rewrite


def _plus_zero(node: fx.Node) -> fx.Node | None:
    type_ = type_of(node)
    exact = type_ is not None and not type_.dtype.is_floating_point and not type_.dtype.is_complex
    return _neutral(0)(node) if exact else None


def _concatenated(node: fx.Node) -> fx.Node | None:
    """Empty operands give nothing (torch takes even those of one dim and no elements)."""
    parts: Any = node.args[0]
    kept = [part for part in parts if not _empty(part)]
    if len(kept) == 1:
        return _same_type(node, kept[0])
    if 1 < len(kept) < len(parts) and len({part.meta["val"].dtype for part in (node, *kept)}) == 1:
        node.args = (kept, *node.args[1:])
    return None


def _empty(part: Any) -> bool:
    type_ = type_of(part)
    return type_ is not None and 0 in type_.shape


def _expanded(node: fx.Node) -> fx.Node | None:
    if (same := _same_type(node, node.args[0])) is not None:
        return same
    source, type_ = _node(node.args[0]), type_of(node)
    if source.target is aten.expand.default and type_ is not None:
        node.args = (source.args[0], list(type_.shape))
    return None


def _copied(node: fx.Node) -> fx.Node | None:
    """A copy, or a slice of the whole size."""
    return None if is_kept(node) else _same_type(node, node.args[0])


def _cast(node: fx.Node) -> fx.Node | None:
    """A cast to the dtype that is there; of two casts the first, where it lost nothing that either end holds."""
    last = type_of(node)
    if any(name != "dtype" for name in node.kwargs) or last is None:
        return None
    source = _node(node.args[0])
    if (same := _same_type(node, source)) is not None:
        return same
    between, first = type_of(source), type_of(source.args[0]) if source.target is node.target else None
    if (
        first is not None
        and between is not None
        and _holds(between.dtype, first.dtype)
        and _holds(between.dtype, last.dtype)
    ):
        if first.dtype == last.dtype:
            return _node(source.args[0])
        node.args = (source.args[0], *node.args[1:])
    return None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of a floating-point dtype is one of another."""
    return wide.is_floating_point and narrow.is_floating_point and torch.promote_types(wide, narrow) == wide


def _unbound(node: fx.Node) -> None:
    """Parts of a permuted tensor are the parts permuted. Their gradients are then joined in the tensor's own order at once,
    where they would be joined in the other and copied."""
    permuted = _node(node.args[0])
    if permuted.target is not aten.permute.default:
        return
    order: list[Any] = list(permuted.args[1])  # type: ignore[arg-type]
    order = [dim % len(order) for dim in order]
    cut, whole = order.pop(node.args[1] if len(node.args) > 1 else 0), _node(permuted.args[0])  # type: ignore[arg-type]
    order = [dim - (dim > cut) for dim in order]
    node.args, node.meta["val"] = (whole, cut), aten.unbind.int(whole.meta["val"], cut)
    parts = [one for one in node.graph.nodes if one in node.users] if order != sorted(order) else []
    for part in parts:
        part.meta["val"] = node.meta["val"][part.args[1]]
        with node.graph.inserting_after(parts[-1]):  # those that take it apart stand behind it without others between
            turned = node.graph.call_function(aten.permute.default, (part, order))
        turned.meta = part.meta | {"val": aten.permute.default(part.meta["val"], order)}
        part.replace_all_uses_with(turned, delete_user_cb=lambda user, turned=turned: user is not turned)


_REWRITES: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.cat.default: _concatenated,
    aten.embedding_bag.default: with_bags,
    aten.embedding_bag.padding_idx: with_bags,
    aten.unbind.int: _unbound,
    aten.add.Tensor: _plus_zero,
    aten.sub.Tensor: _neutral(0),
    aten.mul.Tensor: _neutral(1),
    aten.div.Tensor: _neutral(1),
    aten.pow.Tensor_Scalar: _neutral(1),
    aten.expand.default: _expanded,
    aten.slice.Tensor: _copied,
    aten.alias.default: _copied,
    aten.clone.default: _copied,
    aten.contiguous.default: _copied,
    aten.to.dtype: _cast,
    aten._to_copy.default: _cast,
}


def _without_repeats(attention: fx.Node) -> None:
    """Keys and values whose heads were repeated for grouped queries are read as they are."""
    keys, values = (_repeated(operand) for operand in attention.args[1:3])
    if keys is None or values is None or keys[1] != values[1] or attention.kwargs.get("enable_gqa"):
        return
    attention.args = (attention.args[0], keys[0], values[0], *attention.args[3:])
    attention.kwargs = {**attention.kwargs, "enable_gqa": True}


def _repeated(node: Any) -> tuple[fx.Node, int] | None:
    """(source, times) of a value (batch, heads, positions, width) each of whose heads stands there several times in a row."""
    chain = list(islice(_sources(node), 3))
    if len(chain) < 3 or chain[0].target is not aten.reshape.default:
        return None
    expand, inner = chain[1], chain[2]
    types = [type_of(one) for one in (node, expand, inner)]
    if expand.target is not aten.expand.default or inner.target is not aten.unsqueeze.default or inner.args[1] != 2:
        return None
    repeated, expanded, single = (() if type_ is None else type_.shape for type_ in types)
    if len(expanded) != 5:
        return None
    batch, heads, times, positions, width = expanded
    if single != (batch, heads, 1, positions, width) or repeated != (batch, heads * times, positions, width):
        return None
    return _node(inner.args[0]), times


def _sources(node: Any) -> Iterator[fx.Node]:
    """A node, its first operand, that one's, and so on."""
    while isinstance(node, fx.Node):
        yield node
        node = node.args[0] if node.args else None


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value
