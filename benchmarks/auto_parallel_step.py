"""A Llama's step as torch traces it for AutoParallel: forward and backward in one graph of ATen ops, on the meta device.

As there, linear layers are products that keep both dims of the tokens apart, attention is the op that GPUs run, and an
alias stands after every parameter and before every gradient and the logits, where a placement may change once for all
that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx


def _einsum_result(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """A tensor of the shape that the product has."""
    operands, result = equation.split("->")
    sizes = {
        letter: n
        for letters, x in zip(operands.split(","), (a, b), strict=True)
        for letter, n in zip(letters, x.shape, strict=True)
    }
    return a.new_empty([sizes[letter] for letter in result])


_LIBRARY = torch.library.Library("auto_parallel_benchmark", "DEF")
_LIBRARY.define("einsum(str equation, Tensor a, Tensor b) -> Tensor")
_LIBRARY.impl("einsum", _einsum_result, "Meta")
EINSUM = torch.ops.auto_parallel_benchmark.einsum.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
ALIAS = torch.ops.aten.alias.default


class _Linear(torch.autograd.Function):
    """x: (batch, seq, in), w: (out, in) -> (batch, seq, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return EINSUM("bsi,oi->bso", x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return EINSUM("bso,oi->bsi", grads[0], w), EINSUM("bso,bsi->oi", grads[0], x)


class _Attention(torch.autograd.Function):
    """Causal attention. q, k, v: (batch, heads, seq, width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, sums, queries, keys, longest_q, longest_k, seed, offset, _ = FLASH(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, sums, queries, keys, seed, offset)
        ctx.longest = longest_q, longest_k
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, sums, queries, keys, seed, offset = ctx.saved_tensors
        return FLASH_BACKWARD(grads[0], q, k, v, out, sums, queries, keys, *ctx.longest, 0.0, True, seed, offset)


@dataclass(frozen=True)
class Step:
    """The graph of a step, with the nodes that are given (ids, the gradient of the logits) or made (logits), and pairs of a
    parameter and the alias of its gradient."""

    graph: fx.Graph
    ids: fx.Node
    logits: fx.Node
    logits_grad: fx.Node
    parameters: tuple[tuple[fx.Node, fx.Node], ...]


def traced_step(model: nn.Module, ids: Tensor) -> Step:
    """The step of a model whose tensors are on the meta device, for ids: (batch, seq), from logits and their gradient."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def step(parameters: Any, buffers: Any, ids: Tensor, logits_grad: Tensor) -> Any:
        logits = torch.func.functional_call(model, (parameters, buffers), (ids,))
        return logits, torch.autograd.grad(logits, list(parameters.values()), logits_grad)

    with (
        mock.patch.object(F, "linear", lambda x, w, _=None: _Linear.apply(x, w)),
        mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: _Attention.apply(q, k, v)),
    ):
        graph = make_fx(step)(parameters, buffers, ids, torch.zeros_like(model(ids))).graph
    graph.eliminate_dead_code()
    for node in [*graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    given = graph.find_nodes(op="placeholder")
    of_parameters, (of_ids, of_grad) = given[: len(parameters)], given[-2:]
    for node in of_parameters:
        first = min(node.users)
        with graph.inserting_before(first):
            _alias(graph, node, list(node.users))
    (output,) = graph.find_nodes(op="output")
    made = list(output.all_input_nodes)
    for node in made:
        with graph.inserting_after(node):
            _alias(graph, node, [output])
    logits, *grads = output.all_input_nodes
    return Step(graph, of_ids, logits, of_grad, tuple(zip(of_parameters, grads, strict=True)))


def _alias(graph: fx.Graph, node: fx.Node, readers: list[fx.Node]) -> None:
    """Puts an alias of a node here, which these readers read instead."""
    alias = graph.call_function(ALIAS, (node,))
    alias.meta["val"] = node.meta["val"]
    for reader in readers:
        reader.replace_input_with(node, alias)
