"""Masks of attention that depend on positions alone: a causal one is a flag of attention, one that allows all is none.

Traced libraries write the causal mask out: positions of queries compared with those of keys, numbers of packed sequences
compared too, expanded over the batch, read by every layer. None of it depends on data. Such values are computed here while
they are small; a mask is as large as queries times keys, so it is followed as `Allowed`: the interval of keys that each
query may read, as a comparison of sorted vectors gives it, and as the `and` of two such masks gives again. Everything else is
unknown (None), and a mask that is unknown stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.call import bind

aten = torch.ops.aten
COMPUTED = 1 << 24
"""Elements of a value that is computed here, at most."""
_VIEWS = ("unsqueeze", "reshape", "view", "expand", "to", "_to_copy", "alias", "clone", "detach", "contiguous")
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.__and__.Tensor)
_EXCHANGED = {
    aten.le.Tensor: aten.ge.Tensor,
    aten.lt.Tensor: aten.gt.Tensor,
    aten.ge.Tensor: aten.le.Tensor,
    aten.gt.Tensor: aten.lt.Tensor,
    aten.eq.Tensor: aten.eq.Tensor,
}
"""Comparison -> the same of exchanged operands."""


@dataclass(frozen=True, eq=False)
class Allowed:
    """A boolean tensor (…, queries, keys), the same whatever stands before: query i reads the keys first[i] <= j < end[i]."""

    first: Tensor
    end: Tensor

    def is_causal(self, keys: int) -> bool:
        """Whether query i reads all keys up to i, of as many keys as there are queries."""
        count = len(self.first)
        return keys == count and not self.first.any() and torch.equal(self.end, torch.arange(1, count + 1))

    def is_full(self, keys: int) -> bool:
        return not self.first.any() and bool((self.end == keys).all())


Known = Tensor | Allowed | None


def without_position_masks(graph: fx.Graph, computed: int = COMPUTED) -> None:
    """Calls of scaled_dot_product_attention get a flag for a causal mask, and none for one that allows everything."""
    calls = [n for n in graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    masks = [mask for mask in map(_mask, calls) if mask is not None]
    values = known_values(graph, masks, computed)
    for node in calls:
        mask = _mask(node)
        if mask is None or mask.meta["val"].dtype is not torch.bool:
            continue
        queries, keys = (node.args[i].meta["val"].shape[-2] for i in (0, 1))
        allowed = _allowed(values.get(mask), queries, keys)
        if allowed is not None and mask.meta["val"].shape[-2:] == (queries, keys):
            if allowed.is_full(keys):
                _set_mask(node, causal=False)
            elif allowed.is_causal(keys):
                _set_mask(node, causal=True)


def known_values(
    graph: fx.Graph, wanted: Sequence[fx.Node], computed: int, given: Mapping[fx.Node, Tensor] = MappingProxyType({})
) -> dict[fx.Node, Known]:
    """Facts that are known of these nodes and of all that they are computed from. given: values of constants."""
    needed: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    values: dict[fx.Node, Known] = {}
    for node in graph.nodes:
        if node in needed:
            values[node] = given[node] if node in given else _value(node, values, computed)
    return values


def _mask(attention: fx.Node) -> fx.Node | None:
    """The mask of a call that is not flagged as causal already."""
    given = bind(attention.target, attention.args, attention.kwargs)
    return given["attn_mask"] if isinstance(given["attn_mask"], fx.Node) and not given["is_causal"] else None


def _set_mask(attention: fx.Node, causal: bool) -> None:
    given = bind(attention.target, attention.args, attention.kwargs) | {"attn_mask": None, "is_causal": causal}
    attention.args = tuple(given.pop(name) for name in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"))
    attention.kwargs = given


def _value(node: fx.Node, values: dict[fx.Node, Known], computed: int) -> Known:
    of: Any = node.meta.get("val")
    if node.op != "call_function" or not isinstance(of, Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    inputs = [values[n] for n in node.all_input_nodes]
    if any(value is None for value in inputs):
        return None
    if all(isinstance(value, Tensor) for value in inputs) and of.numel() <= computed:
        return _computed(node, values)
    first, second = (values.get(arg) if isinstance(arg, fx.Node) else None for arg in (*node.args, None, None)[:2])
    if node.target._opname in _VIEWS and of.dtype is torch.bool:
        before = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        return _allowed(first, *of.shape[-2:]) if before[-2:] == of.shape[-2:] and len(before) > 1 else None
    if node.target in _AND:
        return _both(first, second, of.shape)
    if node.target in _EXCHANGED and isinstance(first, Tensor) and isinstance(second, Tensor):
        return _compared(node.target, first, second)
    return None


def _computed(node: fx.Node, values: dict[fx.Node, Known]) -> Known:
    target: Any = node.target
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags or "empty" in target._opname:
        return None
    given: Any = (node.args, dict(node.kwargs))
    known: Any = values.__getitem__
    args, kwargs = fx.map_arg(given, known)
    value = target(*args, **kwargs)
    return value if isinstance(value, Tensor) else None


def _both(first: Known, second: Known, shape: Sequence[int]) -> Known:
    """The mask that allows what both masks allow. A single truth value that is true changes nothing."""
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Tensor) and one.numel() == 1 and bool(one.all()):
            return other
    queries, keys = shape[-2:]
    left, right = (_allowed(mask, queries, keys) for mask in (first, second))
    if left is None or right is None:
        return None
    return Allowed(torch.maximum(left.first, right.first), torch.minimum(left.end, right.end))


def _allowed(mask: Known, queries: int, keys: int) -> Allowed | None:
    """A mask whose values are known as intervals, if they are intervals, the same for all that stands before the queries."""
    if not isinstance(mask, Tensor):
        return mask
    stretched = mask.expand(*mask.shape[:-2], queries, keys)
    table = stretched[(0,) * (stretched.ndim - 2)]
    if mask.dtype is not torch.bool or not torch.equal(stretched, table.expand_as(stretched)):
        return None
    count = table.sum(1)
    first = torch.where(count > 0, table.int().argmax(1), 0)
    index = torch.arange(keys)
    intervals = (index >= first[:, None]) & (index < (first + count)[:, None])
    return Allowed(first, first + count) if torch.equal(intervals, table) else None


def _compared(comparison: Any, left: Tensor, right: Tensor) -> Known:
    """A comparison of a value for every query with one for every key."""
    by_query, by_key = _vector(left, -2), _vector(right, -1)
    if by_query is None or by_key is None:
        comparison = _EXCHANGED[comparison]
        by_query, by_key = _vector(right, -2), _vector(left, -1)
    if by_query is None or by_key is None or not bool((by_key[1:] >= by_key[:-1]).all()):
        return None
    not_below, above = (torch.searchsorted(by_key, by_query, right=side) for side in (False, True))
    none, all_keys = torch.zeros_like(above), torch.full_like(above, len(by_key))
    first, end = {
        aten.ge.Tensor: (none, above),  # query >= key: keys up to the last that is equal
        aten.gt.Tensor: (none, not_below),
        aten.le.Tensor: (not_below, all_keys),
        aten.lt.Tensor: (above, all_keys),
        aten.eq.Tensor: (not_below, above),
    }[comparison]
    return Allowed(first, end)


def _vector(value: Tensor, dim: int) -> Tensor | None:
    """The numbers along a dim of a value that changes along no other one, and whose other last dim has size 1."""
    if value.ndim < -dim or value.is_complex() or (value.ndim >= 2 and value.shape[-3 - dim] != 1):
        return None
    line = value[tuple(slice(None) if d - value.ndim == dim else 0 for d in range(value.ndim))].contiguous()
    shape = [1] * value.ndim
    shape[dim] = len(line)
    return line if torch.equal(line.reshape(shape).expand_as(value), value) else None
