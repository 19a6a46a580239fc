"""Both gradients of a convolution in one call, in a traced graph.

A program has them as ops of their own, so that each can be placed where it is wanted. Where one region makes both, the
kernels do what they share (layouts, the gradient's blocks) once:

    convolution_backward(g, anything, w, …, [True, False, False])[0]      dx, dw, _ = convolution_backward(
    convolution_backward(g, x, anything, …, [False, True, False])[1]          g, x, w, …, [True, True, False])
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

_BACKWARD = torch.ops.aten.convolution_backward.default
OF_INPUT, OF_WEIGHT, OF_BOTH = [True, False, False], [False, True, False], [True, True, False]


def join_backward(graph: Graph) -> None:
    """Join the pairs of calls whose operands are there when the first of the two is made."""
    inputs: dict[Hashable, Node] = {}
    weights: dict[Hashable, Node] = {}
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        kind = inputs if node.args[-1] == OF_INPUT else weights if node.args[-1] == OF_WEIGHT else None
        if kind is not None and not node.kwargs:
            kind[(node.args[0], _shapes(node), repr(node.args[4:-1]))] = node
    place = {node: number for number, node in enumerate(graph.nodes)}
    for key in inputs.keys() & weights.keys():
        dx, dw = inputs[key], weights[key]
        first, last = sorted((dx, dw), key=place.__getitem__)
        x, w = dw.args[1], dx.args[2]
        if all(place[operand] < place[first] for operand in (x, w) if isinstance(operand, Node)):
            first.args = (dx.args[0], x, w, *dx.args[3:-1], OF_BOTH)
            last.replace_all_uses_with(first)
            graph.erase_node(last)


def _shapes(node: Node) -> tuple[Any, ...]:
    """Of the input and of the weight: what a call is not asked the gradient of may be anything of that shape."""
    return tuple(tuple(operand.meta["val"].shape) for operand in node.args[1:3])
