"""Torch's sums take a workspace of a GPU: as much as its allocator gave on an H100 (torch 2.11), in the effects of lines too."""

from __future__ import annotations

import pytest
import torch

from autopar.cluster.device import device_preset
from autopar.ir.lines import Compute, Ref
from autopar.ir.mesh import Mesh
from autopar.ops.column_sums import workspace_bytes
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
    found = workspace_bytes(x, {"dim": list(dims)}, H100)
    assert found + result_bytes == pytest.approx(given, abs=ROUNDED, rel=0.001)
    assert workspace_bytes(x, {"dim": list(dims)}, CPU) == 0


def test_the_effect_of_a_sum_has_what_its_kernel_takes_on_the_device_it_is_for() -> None:
    line = Compute("aten.sum.dim_IntList", {"self": Ref("x"), "dim": [0], "keepdim": True}, outs=("y",))
    x = Layout.dense((1024, 4096), F32)
    on_gpu, on_cpu = (Probe(Mesh.of(dp=1), device).effect(line, {"x": x})[1] for device in (H100, CPU))
    assert on_gpu.fresh == on_cpu.fresh == (16384,)
    assert on_gpu.peak == pytest.approx(33571328, abs=ROUNDED)
    assert on_cpu.peak == 16384
