"""Picks from every row, by an index of the row's own, are captured as gathers.

    x[arange(n), y]                     becomes        x.gather(1, y[:, None])[:, 0]
    x[arange(n)[:, None], y]            becomes        x.gather(1, y)
    x[arange(n), y] = v                 becomes        x.scatter(1, y[:, None], v[:, None])

As an index the numbers of rows are data, for which a rank needs all rows; a gather leaves every row by itself. So it is where
several leading indices number their own dims, and where several others pick, one after the other. An index may count from the
end. What picks one element twice, and writes, stays: which of the two counts is then not said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.graph.new_nodes import made_like
from autopar.capture.graph.position_masks import COMPUTED, Known, known_values

aten = torch.ops.aten


def with_gathers(graph: fx.Graph, constants: Mapping[fx.Node, torch.Tensor]) -> None:
    """Put gathers and scatters in place of the index ops that are some. constants: placeholders whose values are part of the
    program."""
    picks = [n for n in graph.nodes if n.target in (aten.index.Tensor, aten.index_put.default)]
    if not picks:
        return
    known = known_values(graph, [i for n in picks for i in n.args[1] if i is not None], COMPUTED, constants)
    for node in picks:
        pick = _Pick.of(node, known)
        if pick is not None:
            with graph.inserting_before(node):
                same = pick.read() if node.target is aten.index.Tensor else pick.written()
            if same is not None:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


class _Pick:
    """Rows of a tensor, and what is picked from each. rows: leading dims that indices number; shape: that of the picks; indices:
    into the dims after those of the rows."""

    def __init__(self, node: fx.Node, rows: int, shape: Sequence[int], indices: Sequence[fx.Node]) -> None:
        self.node, self.rows, self.shape, self.indices = node, rows, list(shape), indices

    @classmethod
    def of(cls, node: fx.Node, known: Mapping[fx.Node, Known]) -> _Pick | None:
        """The picks of an op whose leading indices are the numbers of rows; None where they are not."""
        given: Any = node.args[1]
        indices = list(given)
        while indices and indices[-1] is None:
            indices.pop()
        if any(i is None or i.meta["val"].dtype not in (torch.int32, torch.int64) for i in indices):
            return None
        of_rows, rows = _value(node.args[0]).shape, 0
        shape = torch.broadcast_shapes(*(i.meta["val"].shape for i in indices))
        while rows < min(len(indices), len(shape)) and _numbers(known.get(indices[rows]), rows, shape, of_rows[rows]):
            rows += 1
        picks = rows < len(indices) or (node.target is aten.index.Tensor and len(shape) == rows)  # or takes all rows
        return cls(node, rows, shape, indices[rows:]) if rows and picks else None

    def read(self) -> fx.Node:
        """The picks, and behind their dims those that no index is of."""
        value, rows = self.node.args[0], self.rows
        for index in self.indices:
            tail = list(_value(value).shape[rows + 1 :])
            gathered = self._made(aten.gather.default, value, rows, self._places(value, index, rows))
            value, rows = self._made(aten.reshape.default, gathered, [*self.shape, *tail]), len(self.shape)
        assert isinstance(value, fx.Node)
        return value

    def written(self) -> fx.Node | None:
        """The tensor with other values where they are picked; None where one may be picked twice and does not add up."""
        (x, _, values), accumulate = self.node.args[:3], self.node.args[3] if len(self.node.args) > 3 else False
        if len(self.indices) > 1 or not (accumulate or math.prod(self.shape[self.rows :]) == 1):
            return None
        places = self._places(x, self.indices[0], self.rows)
        tail = list(_value(x).shape[self.rows + 1 :])
        source = self._made(aten.expand.default, values, [*self.shape, *tail])
        source = self._made(aten.reshape.default, source, list(places.meta["val"].shape))
        op = aten.scatter_add.default if accumulate else aten.scatter.src
        return self._made(op, x, self.rows, places, source)

    def _places(self, x: Any, index: fx.Node, rows: int) -> fx.Node:
        """An index for a gather along the dim after the rows: (rows, picks of a row, dims after it)."""
        size, *tail = _value(x).shape[rows:]
        if index.meta["val"].dtype is not torch.int64:
            index = self._made(aten._to_copy.default, index, dtype=torch.int64)
        from_end = self._made(aten.add.Tensor, index, size)
        index = self._made(aten.where.self, self._made(aten.lt.Scalar, index, 0), from_end, index)
        each = [*self.shape[:rows], math.prod(self.shape[rows:])]
        index = self._made(
            aten.reshape.default, self._made(aten.expand.default, index, self.shape), [*each, *[1] * len(tail)]
        )
        return self._made(aten.expand.default, index, [*each, *tail])

    def _made(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return made_like(self.node, _value(self.node).fake_mode, op, *args, **kwargs)


def _value(node: Any) -> Any:
    return node.meta["val"]


def _numbers(value: Known, dim: int, shape: Sequence[int], size: int) -> bool:
    """Whether an index numbers the picks along a dim of theirs, which are as many as there are rows."""
    if not isinstance(value, torch.Tensor) or value.is_meta or shape[dim] != size:
        return False
    numbers = torch.arange(size).reshape(-1, *[1] * (len(shape) - dim - 1))
    return torch.equal(value.expand(*shape), numbers.expand(*shape))
