"""Ops whose kernels on a GPU add in an order of their own: ranks that compute the same get other bits, and their copies of what
comes of it drift apart.

The list is that of `torch.use_deterministic_algorithms`: ops that have a kernel in a fixed order which can be asked for ("by
default" they take another one), and ops that have none ("always").
"""

from __future__ import annotations

from autopar.ops.registry import define, named

define(
    *named("index_add index_put _unsafe_index_put index_copy scatter scatter_add scatter_reduce"),
    *named("replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"),
    *named("max_pool3d_with_indices_backward"),
    *("autopar.attention_grad", "autopar.conv", "autopar.conv_dx", "autopar.conv_dw"),
    unordered="by default",
)
define(
    *named("avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    *named("adaptive_max_pool2d_backward adaptive_max_pool3d_backward put histc cumsum"),
    *named("upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward"),
    *named("upsample_trilinear3d_backward grid_sampler_2d_backward grid_sampler_3d_backward"),
    *named("reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward"),
    "autopar.ctc_grad",
    unordered="always",
)
