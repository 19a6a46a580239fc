"""Faults of arguments: what the fake form of an op takes, and its CUDA kernel does not."""

from __future__ import annotations

import torch

from tests.gpu.planted_faults.table import on_gpu, planted

aten = torch.ops.aten
WRONG_HALF = {True: torch.float32, False: torch.bfloat16}


@planted("precondition")
def flash_attention_is_given_float32(rank: int, wrong: bool) -> object:
    q, k, v = (on_gpu(1, 2, 8, 16, dtype=WRONG_HALF[wrong]) for _ in range(3))
    return aten._scaled_dot_product_flash_attention(q, k, v)  # 1


@planted("precondition")
def heads_of_attention_are_no_whole_16_bytes(rank: int, wrong: bool) -> object:
    q, k, v = (on_gpu(1, 2, 8, 12 if wrong else 16, dtype=torch.bfloat16) for _ in range(3))
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)  # 1


@planted("precondition")
def rows_of_a_mask_begin_anywhere(rank: int, wrong: bool) -> object:
    q, k, v = on_gpu(1, 2, 8, 16), on_gpu(1, 2, 9, 16), on_gpu(1, 2, 9, 16)
    mask = on_gpu(1, 2, 8, 9) if wrong else on_gpu(1, 2, 8, 12)[..., :9]
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True)  # 1


@planted("precondition")
def a_fused_optimizer_is_given_transposed_gradients(rank: int, wrong: bool) -> object:
    parameter = torch.nn.Parameter(on_gpu(4, 4))
    parameter.grad = on_gpu(4, 4).t() if wrong else on_gpu(4, 4)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # 1
    return optimizer


@planted("precondition")
def a_recurrent_layer_is_differentiated_out_of_training_mode(rank: int, wrong: bool) -> object:
    x, h, weights = on_gpu(4, 2, 8), on_gpu(1, 2, 8), [on_gpu(24, 8), on_gpu(24, 8)]
    with torch.enable_grad():
        out, _ = torch.gru(x, h, weights, False, 1, 0.0, not wrong, False, False)  # 1
        return torch.autograd.grad([out], [x], [torch.ones_like(out)])
