"""On a GPU: every kernel that may be chosen gives what the plain formula gives, and the choice is torch's."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend

from autopar.runtime.comm.devices import kind_of
from autopar.runtime.kernels import ops, random
from autopar.runtime.kernels.attention import scores
from autopar.runtime.kernels.kernels import AttentionCall, attention_kernels
from tests.gpu import one_gpu

pytestmark = pytest.mark.gpu
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BACKENDS = {
    SDPBackend.MATH: "plain",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}


def chosen(call: AttentionCall) -> tuple[str, ...]:
    return attention_kernels(call, kind_of(torch.device(one_gpu.DEVICE, 0)))


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
@pytest.mark.parametrize("width", [64, 128, 80, 20, 256])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_every_kernel_that_may_be_chosen_equals_the_plain_formula(
    dtype: torch.dtype, width: int, kind: str, group: bool, by_rows: bool
) -> None:
    mask = torch.bool if kind == "mask" else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # which says by how much a kernel differs
        for dropout in (False, True):
            call = AttentionCall(dtype, width, width, mask, kind == "causal", dropout)
            for name in chosen(call):
                assert scores._equals_plain(name, call, by_rows, group, torch.device(one_gpu.DEVICE, 0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float64, F32, F16, BF16])
def test_the_choice_is_torchs(dtype: torch.dtype, width: int, causal: bool) -> None:
    q, k, v = (
        torch.randn(2, 4, 128, width, device=one_gpu.DEVICE).to(dtype).requires_grad_() for _ in range(3)
    )  # fmt: skip
    torchs = SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, causal))
    assert chosen(AttentionCall(dtype, width, width, None, causal))[0] == BACKENDS[torchs]


@pytest.mark.parametrize("dtype", [torch.float64, F32, F16, BF16])
def test_fused_norms_equal_the_formula_on_a_cpu(dtype: torch.dtype) -> None:
    x, g = (torch.randn(3, 50, 96, dtype=torch.float64).to(dtype) for _ in range(2))
    w = torch.randn(96, dtype=torch.float64).to(dtype)

    def norms(*operands: torch.Tensor) -> list[torch.Tensor]:
        x, g, w = operands
        y, rstd = ops.rms_norm(x, w, 1e-5, 1)
        z, mean, rstd2 = ops.layer_norm(x, w, w, 1e-5, 1)
        of_rms = ops.rms_norm_dx(g, x, rstd, w, 1), ops.norm_dw(g, x, None, rstd, 1)
        of_layer = ops.layer_norm_dx(g, x, mean, rstd2, w, 1), ops.norm_dw(g, x, mean, rstd2, 1)
        of_layer += ops.layer_norm_backward(g, x, mean, rstd2, w, 1)
        return [y, rstd, z, mean, rstd2, *of_rms, *of_layer]

    found = norms(*(one.to(one_gpu.DEVICE) for one in (x, g, w)))
    eps = torch.finfo(dtype).eps
    for one, other in zip(found, norms(*(one.double() for one in (x, g, w))), strict=True):
        difference = (one.double().cpu() - other).abs().max() / other.abs().max()
        assert float(difference) < 16 * eps


@pytest.mark.parametrize("dtype", [torch.float64, F32, F16, BF16])
def test_the_kernel_for_dropout_gives_the_bits_of_a_cpu(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert random._equals_plain(dtype, torch.device(one_gpu.DEVICE, 0))
