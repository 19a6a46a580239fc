"""The problem that AutoParallel's solvers are given for a step, as a factor graph: its lists of strategies and their costs.

Restated from its source (github.com/meta-pytorch/autoparallel: optimize_sharding.py, approximate_sharding.py,
cost_models/), as no package index has it:

- a node per op of the traced step (`benchmarks.auto_parallel_step`); its strategies are the combinations of DTensor's
  rows over the mesh axes (`benchmarks.dtensor_strategies`) that divide the dims, and a node's state is one of them;
- a cost per node: the larger of arithmetic and memory time at 70 % of an H100's, at least 7 µs, nothing for views;
- a cost per edge, from what a node makes to what its reader takes: collectives axis by axis, another pass where a dim
  other than the first is gathered or scattered, 1 µs for any change; what would owe a sum that nobody owed is forbidden;
- a parameter and its gradient in one placement, sharded over all axes (the default of its memory constraint); the batch
  sharded over the first axis, logits and their gradient as its examples have them;
- repeated layers, where they are to be clustered, as it does by default: copies of a node take the strategy of the first,
  and what they read takes one.

What differs: parameters are bfloat16 throughout, so that an alias stands where it casts; messages have the prices of its
fallback, torch's, not those of its model of NCCL; shards divide their dims; and sums are the only reductions owed.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.passes.shard.factors.graph import FactorGraph
from benchmarks.auto_parallel_step import ALIAS, EINSUM, FLASH, FLASH_BACKWARD, Step
from benchmarks.dtensor_strategies import OWED, REPLICATED, axis_rows

FORBIDDEN_US = 1e8
"""More than any step takes."""
_FLOPS, _MEMORY_BPS, _SHARE, _LAUNCH_US = 989e12, 3.35 * 2**40, 0.7, 7.0
_LINK_BPS, _FAR_SHARE, _START_US, _HOP_US, _FAR_HOP_US, _NODE = 87.7 * 2**30, 0.22, 6.6, 0.6, 2.7, 8
_SHORTEST = 8
"""Nodes of a layer, at least."""
_CHANGE_US, _ALL_TO_ALL_FACTOR = 1.0, 5.0


@dataclass(frozen=True, eq=False)
class Choices:
    """The strategies of a node: the placement per strategy and axis of every operand and result, and seconds of its work
    in µs."""

    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]
    cost_us: np.ndarray


@dataclass(frozen=True)
class Node:
    """An op, with the node and the number of the result that each operand is, and the operand's bytes. kind: equal for
    nodes with the same choices and operands."""

    name: str
    kind: Any
    choices: Choices
    reads: tuple[tuple[int, int], ...]
    read_bytes: tuple[int, ...]


def list_step(step: Step, mesh: Sequence[int], clustered: bool) -> FactorGraph:
    """AutoParallel's problem for a step on a mesh of these sizes, in µs. clustered: with repeated layers taken as one."""
    nodes, numbers = _nodes(step.graph, mesh)
    together = nx.utils.UnionFind(range(len(nodes)))
    for parameter, grad in step.parameters:
        together.union(numbers[parameter], numbers[grad])
    together.union(numbers[step.logits], numbers[step.logits_grad])
    if clustered:
        for first, copy in repeated(nodes):
            together.union(first, copy)
            for (a, _), (b, _) in zip(nodes[first].reads, nodes[copy].reads, strict=True):
                together.union(a, b)
    allowed: dict[int, Any] = {
        numbers[p]: (nodes[numbers[p]].choices.results[0] >= 0).all(1) for p, _ in step.parameters
    }
    rows = (0, *[REPLICATED] * (len(mesh) - 1))
    allowed[numbers[step.ids]] = (nodes[numbers[step.ids]].choices.results[0] == rows).all(1)
    of_logits = (0, 2) if len(mesh) == 2 else rows
    allowed[numbers[step.logits]] = (nodes[numbers[step.logits]].choices.results[0] == of_logits).all(1)
    return _factor_graph(nodes, together, allowed, mesh)


# --- nodes and strategies


def _nodes(graph: fx.Graph, mesh: Sequence[int]) -> tuple[list[Node], dict[fx.Node, int]]:
    """Every node in order, and its number."""
    nodes: list[Node] = []
    numbers: dict[fx.Node, int] = {}
    known: dict[Any, Choices] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        operands: list[fx.Node] = []
        map_arg((node.args, node.kwargs), operands.append)
        result = node.args[1] if node.target is operator.getitem else 0
        reads = tuple((numbers[n], result) for n in operands)
        values = [node.meta["val"]] if node.target is operator.getitem else [n.meta["val"] for n in operands]
        kind = (node.target if node.op == "call_function" else None, _described(node, reads, nodes))
        if kind not in known:
            known[kind] = _choices(node, reads, nodes, mesh)
        numbers[node] = len(nodes)
        nodes.append(Node(node.name, kind, known[kind], reads, tuple(map(_bytes, values))))
    return nodes, numbers


def _described(node: fx.Node, reads: Sequence[tuple[int, int]], nodes: list[Node]) -> Any:
    """All that a node's strategies and costs depend on, beside its op."""
    if node.target is operator.getitem:
        return nodes[reads[0][0]].kind, reads[0][1]

    def shown(value: Any) -> Any:
        return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else str(value)

    args = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    leaves = torch.utils._pytree.tree_leaves(args)
    return (*map(shown, leaves), *map(shown, _each(node.meta["val"])))


def _choices(node: fx.Node, reads: Sequence[tuple[int, int]], nodes: list[Node], mesh: Sequence[int]) -> Choices:
    """The strategies of a node on a mesh, with their costs."""
    value = node.meta["val"]
    if node.target is operator.getitem:
        item = np.unique(nodes[reads[0][0]].choices.results[reads[0][1]], axis=0)
        return Choices((item,), (item,), np.zeros(len(item)))
    if node.op == "placeholder" or node.target is ALIAS:
        tensors = [value] * (1 + len(reads))
        rows = [(p,) * len(tensors) for p in (REPLICATED, *range(value.ndim))]
        results, operands = _combined(rows, 1, tensors, mesh)
        return Choices(operands, results, np.zeros(len(results[0])))
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    read = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    made = _each(value)
    op: Any = node.target
    rows = axis_rows(op, args, kwargs, len(made))
    results, operands = _combined(rows, len(made), [*made, *read], mesh)
    cost = np.zeros(len(results[0])) if op.is_view else _computed_us(op, made, read, results, operands, mesh)
    return Choices(operands, results, cost)


def _combined(
    rows: Sequence[tuple[int, ...]], results: int, tensors: Sequence[Any], mesh: Sequence[int]
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Results and operands of every combination of rows over the axes that divides the dims of all tensors (results, then
    operands)."""
    placed = np.array([*itertools.product(rows, repeat=len(mesh))], int)  # strategies × axes × tensors
    kept = np.ones(len(placed), bool)
    for i, tensor in enumerate(tensors):
        for dim, n in enumerate(_shape(tensor)):
            kept &= n % np.where(placed[:, :, i] == dim, np.array(mesh), 1).prod(1) == 0
    columns = [np.ascontiguousarray(placed[kept][:, :, i]) for i in range(len(tensors))]
    return tuple(columns[:results]), tuple(columns[results:])


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


# --- costs


def _computed_us(
    op: Any,
    made: Sequence[Any],
    read: Sequence[Tensor],
    results: Sequence[np.ndarray],
    operands: Sequence[np.ndarray],
    mesh: Sequence[int],
) -> np.ndarray:
    """Per strategy the larger of arithmetic and memory time of the blocks, and no less than a launch."""
    parts = [_parts(placed, mesh) for placed in (*results, *operands)]
    nbytes = sum(_bytes(t) / n for t, n in zip((*made, *read), parts, strict=True))
    shared = np.where((np.array(operands) >= 0).any(0), np.array(mesh), 1).prod(1)
    arithmetic = 1e6 * _operations(op, made, read) / shared / (_FLOPS * _SHARE)
    return np.maximum(arithmetic, _passed_us(np.asarray(nbytes)))


def _operations(op: Any, made: Sequence[Any], read: Sequence[Tensor]) -> float:
    """Floating-point operations of products and attention; of other ops memory alone counts."""
    if op is EINSUM:
        a, b, c = read[0].numel(), read[1].numel(), made[0].numel()
        if read[0].ndim == read[1].ndim:  # both have the tokens: (tokens, m) and (tokens, n)
            return 2.0 * c * (a / read[0].shape[-1])
        return 2.0 * b * (a / read[0].shape[-1])
    if op in (FLASH, FLASH_BACKWARD):
        query, key = (read[0], read[1]) if op is FLASH else (read[1], read[2])
        return (4.0 if op is FLASH else 10.0) * query.numel() * key.shape[2]
    return 0.0


def _parts(placed: np.ndarray, mesh: Sequence[int]) -> np.ndarray:
    """Into how many blocks each placement cuts a tensor. placed: (placements, axes)."""
    return np.where(placed >= 0, np.array(mesh), 1).prod(1)


def _passed_us(nbytes: np.ndarray) -> np.ndarray:
    """Time to read or write so many bytes."""
    return np.maximum(1e6 * nbytes / _MEMORY_BPS / _SHARE, _LAUNCH_US)


def moved_us(before: np.ndarray, after: np.ndarray, nbytes: float, mesh: Sequence[int]) -> np.ndarray:
    """Time from every placement of `before` to every one of `after` (placements × axes) of a tensor of so many bytes."""
    local = np.repeat(nbytes / _parts(before, mesh)[:, None], len(after), 1)
    total = np.zeros(local.shape)
    for axis, n in enumerate(mesh):
        far = np.prod(mesh[axis:]) > _NODE
        hop, rate = (_FAR_HOP_US, _LINK_BPS * _FAR_SHARE) if far else (_HOP_US, _LINK_BPS)

        def sent(amount: np.ndarray, rounds: int, n: int = n, hop: float = hop, rate: float = rate) -> np.ndarray:
            return _START_US + rounds * hop + 1e6 * amount * rounds / n / rate

        a, b = before[:, None, axis], after[None, :, axis]
        gathered = np.where((a >= 0) & (b == REPLICATED), local * n, local)
        another = np.where(a >= 0, a > 0, False).astype(int), np.where(b >= 0, b > 0, False).astype(int)
        passes = _passed_us(2 * gathered)
        for where, took in (
            ((a >= 0) & (b == REPLICATED), sent(gathered, n - 1) + another[0] * passes),
            ((a >= 0) & (b >= 0) & (a != b), _ALL_TO_ALL_FACTOR * sent(local, n - 1) + sum(another) * passes),
            ((a == OWED) & (b == REPLICATED), sent(local, 2 * (n - 1))),
            ((a == OWED) & (b >= 0), sent(local, n - 1) + another[1] * passes),
            ((a != OWED) & (b == OWED), np.full(local.shape, FORBIDDEN_US)),
        ):
            total += np.where(where, took, 0.0)
        local = np.where((a == OWED) & (b >= 0), local / n, gathered)
    changed = (before[:, None] != after[None]).any(2)
    return np.minimum(total + _CHANGE_US * changed, FORBIDDEN_US)


# --- repeated layers


def repeated(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Pairs of a node of a layer and its copy in a later one: runs of nodes that follow each other again and again, each
    of the same kind and reading the same lists as the one before."""
    order = [i for i, node in enumerate(nodes) if node.reads]
    signs = [(nodes[i].kind, tuple((nodes[n].kind, r) for n, r in nodes[i].reads)) for i in order]
    number = {sign: k for k, sign in enumerate(dict.fromkeys(signs))}
    kinds = np.array([number[sign] for sign in signs])
    pairs: list[tuple[int, int]] = []
    free = np.ones(len(kinds), bool)
    while True:
        periods = range(_SHORTEST, len(kinds) // 2 + 1)
        length, begin, period = max((_longest(kinds, free, period) for period in periods), default=(0, 0, 0))
        if length < max(_SHORTEST, period / 2):
            return pairs
        pairs += [(order[i], order[i + period]) for i in range(begin, begin + length)]
        free[begin : begin + length + period] = False


def _longest(kinds: np.ndarray, free: np.ndarray, period: int) -> tuple[int, int, int]:
    """The longest run of nodes that are of the kind of the node a period later: how many, the first, the period."""
    same = (kinds[period:] == kinds[:-period]) & free[period:] & free[:-period]
    ends = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(int), [0]))))
    return max(((int(b - a), int(a), period) for a, b in zip(ends[::2], ends[1::2], strict=True)), default=(0, 0, 0))


# --- the factor graph


def _factor_graph(nodes: Sequence[Node], together: Any, allowed: dict[int, Any], mesh: Sequence[int]) -> FactorGraph:
    """A variable per group of nodes that take one strategy, in the order of their first nodes."""
    members: dict[int, list[int]] = {}
    for v in range(len(nodes)):
        members.setdefault(together[v], []).append(v)
    graph = FactorGraph()
    variable: dict[int, int] = {}
    states: list[np.ndarray] = []
    for group in members.values():
        kept = np.ones(len(nodes[group[0]].choices.cost_us), bool)
        for v in group:
            kept &= allowed.get(v, kept)
        possible = np.flatnonzero(kept)
        cost = sum(nodes[v].choices.cost_us[possible] for v in group)
        number = graph.add(
            ("node", nodes[group[0]].name), tuple(possible.tolist()), np.asarray(cost), np.zeros(len(possible))
        )
        variable.update(dict.fromkeys(group, number))
        states.append(possible)
    edges = Counter(
        (variable[p], variable[v], result, nodes[p].choices, nodes[v].choices, k, nodes[v].read_bytes[k])
        for v, node in enumerate(nodes)
        for k, (p, result) in enumerate(node.reads)
    )
    priced: dict[Any, np.ndarray] = {}
    for (u, v, result, made, read, k, nbytes), times in edges.items():
        key = (made, result, read, k, nbytes, times, states[u].tobytes(), states[v].tobytes())
        if key not in priced:
            before, after = made.results[result][states[u]], read.operands[k][states[v]]
            ones_before, to = np.unique(before, axis=0, return_inverse=True)
            ones_after, back = np.unique(after, axis=0, return_inverse=True)
            priced[key] = times * moved_us(ones_before, ones_after, nbytes, mesh)[np.ix_(to.ravel(), back.ravel())]
        graph.connect(u, v, priced[key])
    return graph
