"""Torch's sums and convolutions take a workspace of a GPU: what its allocator gave on an H100, in the effects of
lines too."""

from __future__ import annotations

import pytest
import torch

from autopar.cluster.device import device_preset
from autopar.ir.lines import Compute, Ref
from autopar.ir.mesh import Mesh
from autopar.ops.column_sums import workspace_bytes
from autopar.ops.registry import find
from autopar.passes.memory.probe import Probe
from autopar.passes.played.tensors import Layout
from autopar.runtime.comm.devices import CPU

H100 = device_preset("h100").runs_as
ROUNDED = 4096
"""Bytes by which the allocator rounds results, and semaphores that blocks share."""
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
GIVEN = [
    ((1024, 4096), (0,), F32, 33571328),
    ((8192, 4096), (0,), F32, 138428928),
    ((8192, 1024), (0,), F32, 67113472),
    ((65536, 768), (0,), F32, 138415616),
    ((300, 4096), (0,), F32, 16384),
    ((4096, 4098), (0,), F32, 17851904),
    ((4096, 4097), (0,), F32, 2640384),
    ((16384, 64), (0,), F32, 2098176),
    ((20000, 6), (0,), F32, 512),
    ((512, 50304), (0,), F32, 201216),
    ((32768, 16384), (0,), F32, 268501504),
    ((32768, 16384), (0,), F64, 285344256),
    ((8192, 4096), (0,), F64, 276857344),
    ((8192, 4096), (0,), torch.int64, 276857344),
    ((8192, 4096), (0,), BF16, 138420736),
    ((65536, 768), (0,), BF16, 138414080),
    ((4096, 4098), (0,), BF16, 17843712),
    ((4096, 4097), (0,), BF16, 2632192),
    ((140000, 8192), (0,), BF16, 289456640),
    ((70000, 8192), (0,), F32, 146833920),
    ((8, 128, 4096), (0, 1), F32, 33571328),
    ((8, 128, 64, 64), (0, 2, 3), F32, 512),
    ((64, 256, 4096), (0,), F32, 4194304),
    ((64, 256, 4096), (1,), F32, 1048576),
    ((8192, 4096), (1,), F32, 32768),
    ((8192, 4096), (0, 1), F32, 3584),
    ((4, 2048, 16, 64), (0, 1), F32, 67113472),
    ((4, 2048, 16, 64), (0, 2), F32, 524288),
]


@pytest.mark.parametrize(("shape", "dims", "dtype", "given"), GIVEN, ids=str)
def test_a_sum_takes_what_the_allocator_gave(
    shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype, given: int
) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    result_bytes = x.sum(dims).nbytes
    found = workspace_bytes([x], {"dim": list(dims)}, H100)
    assert found + result_bytes == pytest.approx(given, abs=ROUNDED, rel=0.001)
    assert workspace_bytes([x], {"dim": list(dims)}, CPU) == 0


def test_the_effect_of_a_sum_has_what_its_kernel_takes_on_the_device_it_is_for() -> None:
    line = Compute("aten.sum.dim_IntList", {"self": Ref("x"), "dim": [0], "keepdim": True}, outs=("y",))
    x = Layout.dense((1024, 4096), F32)
    on_gpu, on_cpu = (Probe(Mesh.of(dp=1), device).effect(line, {"x": x})[1] for device in (H100, CPU))
    assert on_gpu.fresh == on_cpu.fresh == (16384,)
    assert on_gpu.peak == pytest.approx(33571328, abs=ROUNDED)
    assert on_cpu.peak == 16384


CONVOLVED = [  # MiB that the allocator gave beside the result: forward, and of the gradients of image and kernel
    (F32, (8, 64, 56, 56), (64, 1, 1), 1, (0.0, 0.0, None)),
    (F32, (32, 128, 28, 28), (128, 3, 1), 1, (26.0, 26.0, 32.94)),
    (F32, (32, 256, 14, 14), (256, 3, 1), 1, (14.5, 14.5, 21.25)),
    (F32, (32, 512, 7, 7), (512, 3, 1), 1, (15.13, 15.13, 20.38)),
    (F32, (64, 3, 224, 224), (64, 7, 2), 1, (232.79, None, 250.79)),
    (F32, (128, 64, 32, 32), (64, 3, 1), 1, (64.14, 64.14, 66.11)),
    (F32, (32, 96, 56, 56), (96, 7, 1), 96, (0.0, 0.0, 0.0)),
    (F32, (4, 1280, 16, 16), (1280, 3, 1), 1, (66.25, None, 66.25)),
    (BF16, (8, 64, 56, 56), (64, 1, 1), 1, (0.0, 0.0, None)),
    (BF16, (8, 128, 56, 56), (128, 3, 2), 1, (8.03, 7.94, 7.94)),
    (BF16, (32, 128, 28, 28), (128, 3, 1), 1, (12.53, 12.53, 14.78)),
    (BF16, (32, 1024, 14, 14), (256, 1, 1), 1, (None, 0.0, 15.31)),
    (BF16, (32, 256, 56, 56), (512, 1, 2), 1, (73.5, 73.5, 74.5)),
    (BF16, (64, 3, 224, 224), (64, 7, 2), 1, (148.0, 148.0, 152.89)),
    (BF16, (8, 3, 224, 224), (768, 16, 16), 1, (11.42, None, 11.42)),
    (BF16, (4, 320, 64, 64), (320, 3, 1), 1, (21.76, 21.76, 26.0)),
    (BF16, (4, 320, 64, 64), (4, 3, 1), 1, (10.29, 10.29, 11.79)),
    (BF16, (32, 96, 56, 56), (96, 7, 1), 96, (0.0, 0.0, 0.0)),
    (BF16, (128, 128, 16, 16), (128, 5, 1), 1, (16.78, 16.78, 20.28)),
]
"""dtype, image, (channels, size and stride of the kernel), groups, what was given (None: by another way of computing it). Padded
by half the kernel, patches by none."""


@pytest.mark.parametrize(("dtype", "image", "kernel", "groups", "given"), CONVOLVED, ids=str)
def test_convolutions_take_the_copies_that_the_allocator_gave(
    dtype: torch.dtype,
    image: tuple[int, ...],
    kernel: tuple[int, int, int],
    groups: int,
    given: tuple[float | None, float | None, float | None],
) -> None:
    channels, size, stride = kernel
    padding = 0 if stride == size else size // 2
    arguments = {"stride": [stride] * 2, "padding": [padding] * 2, "groups": groups}
    x = torch.empty(image, dtype=dtype, device="meta")
    w = torch.empty(channels, image[1] // groups, size, size, dtype=dtype, device="meta")
    y = torch.nn.functional.conv2d(x, w, None, stride, padding, 1, groups)
    tensors = {"conv": (x, w, y), "conv_dx": (y, w, x), "conv_dw": (y, x, w)}
    for (op, operands), measured in zip(tensors.items(), given, strict=True):
        workspace = find(f"autopar.{op}").workspace
        assert workspace is not None
        assert workspace(operands, arguments, CPU) == 0
        if measured is not None:
            few_mib = 18.1 if op == "conv_dw" else 1.0  # what is added over processors is not counted
            assert measured - few_mib <= workspace(operands, arguments, H100) / 2**20 <= 1.02 * measured + 0.1


def test_a_convolution_whose_channels_lie_fastest_copies_nothing_but_odd_channels() -> None:
    workspace = find("autopar.conv").workspace
    assert workspace is not None
    arguments = {"stride": [1, 1], "padding": [1, 1], "groups": 1}

    def bytes_of(channels: int) -> int:
        x = torch.empty(4, channels, 32, 32, dtype=BF16, device="meta").to(memory_format=torch.channels_last)
        w = torch.empty(64, channels, 3, 3, dtype=BF16, device="meta").to(memory_format=torch.channels_last)
        y = torch.nn.functional.conv2d(x, w, padding=1).to(memory_format=torch.channels_last)
        return workspace((x, w, y), arguments, H100)

    assert bytes_of(64) == 0
    assert bytes_of(3) == 2 * 8 * (4 * 32 * 32 + 64 * 3 * 3)


def test_the_effect_of_a_convolution_has_its_copies_on_the_device_it_is_for() -> None:
    config = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0]}
    line = Compute("autopar.conv", {"x": Ref("x"), "w": Ref("w"), "b": None, **config, "groups": 1}, outs=("y",))
    layouts = {"x": Layout.dense((4, 320, 64, 64), BF16), "w": Layout.dense((320, 320, 3, 3), BF16)}
    on_gpu, on_cpu = (Probe(Mesh.of(dp=1), device).effect(line, layouts)[1] for device in (H100, CPU))
    result = 4 * 320 * 64 * 64 * 2
    assert on_gpu.fresh == on_cpu.fresh == (result,)
    assert on_gpu.peak == result + 2 * result + 320 * 320 * 9 * 2
    assert on_cpu.peak == result
