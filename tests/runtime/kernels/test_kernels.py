"""Which kernel is chosen for which device, asked without one."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.comm.devices import CPU, LEAST_CUDA, Device, device_of, standing_for
from autopar.runtime.kernels.kernels import (
    AttentionCall,
    attention_kernels,
    has_fused_norm,
    has_norm_dw,
    has_pool_of_planes,
)

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
V100, A100, RTX3090, H100, B200, RTX5090 = (
    Device("cuda", capability) for capability in ((7, 0), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
)
MI300X = Device("rocm")


def first(device: Device, dtype: torch.dtype = BF16, head: int = 64, value: int | None = None, **call: object) -> str:
    return attention_kernels(AttentionCall(dtype, head, value or head, **call), device)[0]  # type: ignore[arg-type]


def test_the_kernel_follows_the_device_and_the_dtype() -> None:
    dtypes = (F64, F32, F16, BF16)
    assert [first(CPU, dtype) for dtype in dtypes] == ["cpu"] * 4
    assert [first(V100, dtype) for dtype in dtypes] == ["plain", "efficient", "efficient", "plain"]
    assert [first(A100, dtype) for dtype in dtypes] == ["plain", "efficient", "flash", "flash"]
    assert [first(H100, dtype) for dtype in dtypes] == ["plain", "efficient", "cudnn", "cudnn"]
    assert [first(B200, dtype) for dtype in dtypes] == ["plain", "efficient", "cudnn", "cudnn"]
    assert [first(MI300X, dtype) for dtype in dtypes] == ["plain"] * 4
    assert [first(Device("cuda", (13, 0)), dtype) for dtype in dtypes] == ["plain"] * 4


def test_a_mask_is_for_the_efficient_kernel_in_the_dtype_of_the_queries() -> None:
    for device in (A100, H100):
        assert [first(device, mask=mask) for mask in (torch.bool, BF16, F32)] == ["efficient", "efficient", "plain"]
        assert first(device, mask=torch.bool, causal=True) == "plain"
    assert first(CPU, F32, mask=torch.bool, causal=True) == "cpu"


def test_dropout_is_ours_everywhere() -> None:
    for dtype in (F32, BF16):
        names = [first(device, dtype, dropout=True) for device in (CPU, V100, A100, H100, MI300X)]
        assert names == ["plain", "plain", "dropped", "dropped", "plain"]
    assert [first(H100, dtype, head=192, dropout=True) for dtype in (F64, F32, BF16)] == ["plain", "plain", "dropped"]
    assert first(H100, BF16, mask=F32, causal=True, dropout=True) == "dropped"
    assert first(H100, BF16, keys=0, dropout=True) == "plain"


@pytest.mark.parametrize(
    ("device", "head", "kernel"),
    [
        (A100, 224, "flash"),
        (RTX3090, 224, "efficient"),
        (RTX3090, 256, "flash"),
        (RTX5090, 208, "efficient"),
        (A100, 257, "efficient"),
        (H100, 256, "cudnn"),
        (B200, 128, "cudnn"),
        (B200, 192, "flash"),
    ],
)
def test_wide_heads_take_what_has_their_size(device: Device, head: int, kernel: str) -> None:
    assert first(device, head=head) == kernel


def test_values_of_another_size_than_queries() -> None:
    assert [first(device, head=192, value=128) for device in (CPU, A100, H100)] == ["plain", "efficient", "cudnn"]


def test_no_keys_and_one_key() -> None:
    assert {first(device, keys=0) for device in (CPU, A100, H100)} == {"plain"}
    assert first(H100, keys=1) == "flash"


def test_the_last_choice_can_do_everything() -> None:
    assert attention_kernels(AttentionCall(BF16, 64, 64), H100) == ("cudnn", "flash", "efficient", "plain")


def test_an_architecture_names_a_kind_of_device() -> None:
    names = ("", "sm80", "sm90", "sm103", "gfx942")
    assert [Device.of_architecture(name) for name in names] == [CPU, A100, H100, Device("cuda", (10, 3)), MI300X]
    assert [has_fused_norm(device) for device in (CPU, H100, MI300X)] == [False, True, False]
    assert [has_norm_dw(device, same_dtype=True) for device in (CPU, H100, MI300X)] == [True, True, False]
    assert [has_norm_dw(device, same_dtype=False) for device in (CPU, H100, MI300X)] == [False, True, False]
    assert [has_pool_of_planes(device) for device in (CPU, H100, MI300X)] == [False, True, True]


def test_a_tensor_without_data_stands_for_a_device() -> None:
    tensor = torch.empty(2, device="meta")
    assert device_of(tensor) == CPU
    with standing_for(H100):
        assert device_of(tensor) == H100
        with standing_for(A100):
            assert device_of(tensor) == A100
        assert device_of(tensor) == H100
        assert device_of(torch.empty(2)) == CPU
    assert device_of(tensor) == CPU
    assert LEAST_CUDA == A100
