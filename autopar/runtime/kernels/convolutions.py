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
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        grad, *operands, mask = _arguments(node)
        kind = inputs if mask == OF_INPUT else weights if mask == OF_WEIGHT else None
        if kind is not None:
            shapes = tuple(tuple(operand.meta["val"].shape) for operand in operands[:2])
            kind[grad, shapes, repr(operands[2:])] = node
    for key in inputs.keys() & weights.keys():
        dx, dw = inputs[key], weights[key]
        first, last = sorted((dx, dw), key=place.__getitem__)
        grad, _, w, *window = _arguments(dx)[:-1]
        x = _arguments(dw)[1]
        if max(place[x], place[w]) < place[first]:
            first.args = (grad, x, w, *window, OF_BOTH)
            last.replace_all_uses_with(first)
            graph.erase_node(last)


def _arguments(node: Node) -> list[Any]:
    """Gradient, input, weight, sizes of the bias, window, and what is asked for. The operand whose gradient is not asked for
    may be anything of its shape."""
    return list(node.args)
