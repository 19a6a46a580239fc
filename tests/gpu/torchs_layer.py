"""The same Llama layer as torch.compile takes it: one graph forward and backward with the casts of autocast, cut where least is
held, for inductor to count. Attention is an op of its own, as its kernel is inductor's neighbour and not its work."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from tests.zoo.transformers import LlamaBlock, rotate

LOW = torch.bfloat16


@torch.library.custom_op("layer_budget::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@torch.library.custom_op("layer_budget::attention_backward", mutates_args=())
def _attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


_attention.register_fake(lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)))
_attention_backward.register_fake(
    lambda g, q, k, v, out, lse: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)
_attention.register_autograd(
    lambda ctx, g, _: _attention_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def torchs_graphs(block: LlamaBlock, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a layer, for a GPU. x: (batch, seq, width) in the low dtype."""
    names = [name for name, _ in block.named_parameters()]

    def layer(x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor]:
        w = dict(zip(names, weights, strict=True))

        def product(x: Tensor, name: str) -> Tensor:
            return F.linear(x, w[f"{name}.weight"].to(LOW))

        def norm(x: Tensor, own: nn.RMSNorm, name: str) -> Tensor:
            return F.rms_norm(x.float(), own.normalized_shape, w[f"{name}.weight"], own.eps).to(LOW)

        y, heads = norm(x, block.attention_norm, "attention_norm"), (*x.shape[:2], -1, block.attention.head_dim)
        q, k, v = (product(y, f"attention.w{one}").view(heads).transpose(1, 2) for one in "qkv")
        mixed, _ = _attention(rotate(q, cos, sin).to(LOW), rotate(k, cos, sin).to(LOW), v)
        x = x + product(mixed.transpose(1, 2).reshape(*x.shape[:2], -1), "attention.wo")
        y = norm(x, block.ffn_norm, "ffn_norm")
        return (x + product(F.silu(product(y, "gate")) * product(y, "up"), "down"),)

    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty_like(one, device="cpu", requires_grad=True) for one in (x, cos, sin, *block.parameters())]
        given[1:3] = [one.detach() for one in given[1:3]]
    joint = aot_export_joint_simple(layer, tuple(given), trace_joint=True, decompositions=select_decomp_table())
    for node in list(joint.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            joint.graph.erase_node(node)
        elif "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    forward, backward = min_cut_rematerialization_partition(joint, given, num_fwd_outputs=1)
    return forward, backward
