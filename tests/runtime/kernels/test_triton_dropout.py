"""Dropout as one kernel gives the bits of torch's ops, for every block of a tensor, rate and dtype."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autopar.counter import ByteCounter
from autopar.runtime.comm.devices import CPU, Device
from autopar.runtime.kernels import ops, random
from autopar.runtime.kernels.kernels import has_fused_dropout
from tests.gpu.fake_cuda import A100, H100, fake_cuda
from tests.gpu.test_fake_steps import Calls
from tests.runtime.kernels.in_triton import DEVICE, in_triton  # noqa: F401

KEY = random.make_key(3, 1)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BLOCKS = [
    ((1000,), None, None),
    ((2, 8), None, None),
    ((), None, None),
    ((3, 5, 37), (4, 10, 301), (1, 2, 7)),
    ((2, 3, 4, 9), (4, 6, 8, 21), (1, 2, 3, 5)),
    ((2, 1, 2, 3, 4, 9), (4, 1, 4, 6, 4, 9), (1, 0, 2, 3, 0, 0)),
    ((9, 1200), (9, 2403), (0, 1203)),
    ((5, 16), (1 << 40, 1 << 20), ((1 << 39) + 3, (1 << 19) + 2)),
]
"""Blocks of tensors: their sizes, the tensor's, where they start. The last one begins beyond 2^58 elements."""


def bits(x: Tensor) -> list[int]:
    return x.cpu().reshape(-1).view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.itemsize]).tolist()


def assert_same_bits(x: Tensor, p: float, shape: object = None, offsets: object = None, key: int = KEY) -> None:
    from autopar.runtime.kernels import triton_dropout

    found = triton_dropout.dropout(x.to(DEVICE), p, key, shape, offsets)  # type: ignore[arg-type]
    assert found.is_contiguous()
    assert bits(found) == bits(random.plain_dropout(x, p, key, shape, offsets))  # type: ignore[arg-type]


@pytest.mark.few(4)
@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("p", [0.0, 0.1, 0.37, 0.5, 1e-5, 0.99999, 1 - 1e-9])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_kernel_gives_the_bits_of_torchs_ops(dtype: torch.dtype, p: float) -> None:
    """By 16 bits of a hash, and by all of it where p is close to 0."""
    for local, shape, offsets in BLOCKS:
        assert_same_bits(torch.randn(local, dtype=torch.float64).to(dtype), p, shape, offsets)


@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("key", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_keys_of_any_size(key: int) -> None:
    assert_same_bits(torch.randn(3, 40), 0.3, key=key)


@pytest.mark.usefixtures("in_triton")
def test_a_key_in_memory() -> None:
    from autopar.runtime.kernels import triton_dropout

    x, keys = torch.randn(3, 40), torch.tensor([1, KEY], device=DEVICE)
    found = triton_dropout.dropout(x.to(DEVICE), 0.3, keys[1], None, None)
    assert bits(found) == bits(random.plain_dropout(x, 0.3, KEY)) == bits(random.plain_dropout(x, 0.3, keys[1].cpu()))


@pytest.mark.usefixtures("in_triton")
def test_what_is_dropped_keeps_its_sign_and_what_is_no_number_stays_none() -> None:
    x = torch.tensor([-1.0, 1.0, 0.0, -0.0, torch.inf, 1e-45]).repeat(20)
    assert_same_bits(x, 0.5)


@pytest.mark.usefixtures("in_triton")
def test_an_operand_that_lies_elsewhere() -> None:
    x = torch.randn(12, 3, 10).transpose(0, 1)
    assert_same_bits(x, 0.2, (6, 12, 10), (3, 0, 0))
    assert_same_bits(torch.randn(1, 1, 10).expand(4, 5, 10), 0.2)


# --- which kernel


def test_the_kernel_is_for_devices_that_triton_compiles_for() -> None:
    devices = (CPU, Device("cuda", (7, 0)), A100, H100, Device("rocm"))
    assert [has_fused_dropout(torch.bfloat16, device) for device in devices] == [False, False, True, True, False]
    assert not has_fused_dropout(torch.complex64, H100)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_of_a_gpu_is_one_call_without_a_mask(dtype: torch.dtype) -> None:
    """A read and a write of x, which torch's own dropout does too, with a mask of a byte an element beside them."""
    with fake_cuda(H100):
        x = torch.empty(3, 64, dtype=dtype, device="cuda")
        with Calls() as calls, ByteCounter() as counter:
            y = ops.dropout(x, 0.1, KEY, (6, 64), (3, 0))
    assert calls.names - {"device"} == {"dropout"}
    assert counter.peak == y.nbytes
    assert (y.dtype, y.device.type) == (dtype, "cuda")


def test_a_block_inside_more_dims_than_the_kernel_knows_is_by_torchs_ops() -> None:
    with fake_cuda(H100):
        x = torch.empty(2, 2, 2, 2, 2, device="cuda")
        with Calls() as calls:
            assert ops.dropout(x, 0.1, KEY, (4,) * 5, (1,) * 5).shape == x.shape
    assert "dropout" not in calls.names


@pytest.fixture
def gpu_without_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that is taken for a GPU, whose op launches nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    random._equals_plain.cache_clear()
    yield
    random._equals_plain.cache_clear()


def test_a_kernel_that_fails_is_named_and_torchs_ops_are_used(
    gpu_without_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_triton(*_: object) -> Tensor:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(random, "fused_dropout", no_triton)
    with pytest.warns(RuntimeWarning, match="the kernel for dropout fails: No module named 'triton' on a GPU; torch's"):
        assert not random._equals_plain(torch.float32, torch.device("cpu"))


def test_a_kernel_that_gives_other_bits_is_named(gpu_without_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "fused_dropout", lambda x, *_: x)
    with pytest.warns(RuntimeWarning, match="the kernel for dropout gives other bits than torch's ops on a GPU"):
        assert not random._equals_plain(torch.float32, torch.device("cpu"))


def test_a_kernel_that_gives_the_same_bits_is_used(gpu_without_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "fused_dropout", random.plain_dropout)
    assert random._equals_plain(torch.float32, torch.device("cpu"))


def test_a_cpu_does_without_triton() -> None:
    before = "triton" in sys.modules
    ops.dropout(torch.ones(4), 0.5, KEY)
    assert ("triton" in sys.modules) == before
