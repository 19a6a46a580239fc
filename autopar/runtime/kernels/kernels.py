"""Which kernel does an op on which device: one table, asked by who calls kernels, by the memory model and by tests.

A question is about a call and a kind of device, never about a tensor, so it needs no GPU. Of attention the answer is the
choice that torch's scaled_dot_product_attention makes (`sdp_utils.cpp`), with three differences: cuDNN's kernel has no masks
here, as nothing says what its log-sum-exp is of a row that sees nothing; head sizes that kernels do not take are padded,
where torch computes all scores; and dropout, which draws by the place of a score among all, has a kernel of our own. AMD's
GPUs have the plain formula.

    what                                              cpu     CUDA
    attention, float32                                cpu     efficient
    attention, 16 bits                                cpu     flash; cudnn on sm90 and sm100; efficient under a mask
    attention with dropout                            plain   dropped from sm80 on, of heads of 256, in float32 of 128
    attention in float64                              cpu     plain
    RMS norm                                          plain   fused
    gradients of the weight of a norm                 torch   fused (plain on a CPU where x has 16 bits)
    statistics of batch norm                          sums    torch's
    channels of an image, for places of maxima        last    as they lie
    Adam, AdamW, SGD                                  torch's   torch's fused (`optimizer_forms`)
    dropout                                           torch's ops   a kernel of Triton from sm80 on (`fused`)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..comm.devices import Device

HALF = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64, *HALF)
_NEWEST = (12, 1)
_PREFER_CUDNN = ((9, 0), (10, 0), (10, 3))


class AttentionCall(NamedTuple):
    """The facts by which a kernel for attention is chosen. head, value: sizes of a head of queries and of values. mask:
    its dtype (None: there is none). keys: more than one, none at all."""

    dtype: torch.dtype
    head: int
    value: int
    mask: torch.dtype | None = None
    causal: bool = False
    dropout: bool = False
    keys: int = 2


def attention_kernels(call: AttentionCall, device: Device) -> tuple[str, ...]:
    """The kernels that can do a call of attention on a device, the first choice first; the last one can do all."""
    return _attention_kernels(call, device)


@functools.cache
def _attention_kernels(call: AttentionCall, device: Device) -> tuple[str, ...]:
    rows = () if call.keys == 0 else _WITH_DROPOUT if call.dropout else _ATTENTION
    return (*(name for name, takes in rows if takes(call, device)), "plain")


def _cudnn(call: AttentionCall, device: Device) -> bool:
    most = 256 if device.capability == (9, 0) else 128
    sizes = call.dtype in HALF and max(call.head, call.value) <= most and call.keys > 1
    return _is_cuda(device) and device.capability in _PREFER_CUDNN and sizes and call.mask is None


def _flash(call: AttentionCall, device: Device) -> bool:
    small = (8, 6) <= device.capability <= (8, 9) or device.capability >= (12, 0)
    sizes = call.head == call.value <= 256 and not (small and 192 < call.head <= 224)
    return _is_cuda(device, (8, 0)) and call.dtype in HALF and sizes and call.mask is None


def _efficient(call: AttentionCall, device: Device) -> bool:
    least = (8, 0) if call.dtype == torch.bfloat16 else (5, 0)
    mask = call.mask is None or (call.mask in (torch.bool, call.dtype) and not call.causal)
    return _is_cuda(device, least) and call.dtype in (torch.float32, *HALF) and mask


def _cpu(call: AttentionCall, device: Device) -> bool:
    return device.type == "cpu" and call.dtype in _FLOATS and call.head == call.value


def _dropped(call: AttentionCall, device: Device) -> bool:
    widest = {torch.float32: 128, **dict.fromkeys(HALF, 256)}
    return _has_triton(device) and max(call.head, call.value) <= widest.get(call.dtype, 0)


def _is_cuda(device: Device, least: tuple[int, int] = (0, 0)) -> bool:
    return device.type == "cuda" and least <= device.capability <= _NEWEST


_ATTENTION: tuple[tuple[str, Callable[[AttentionCall, Device], bool]], ...] = (
    ("cudnn", _cudnn),
    ("flash", _flash),
    ("efficient", _efficient),
    ("cpu", _cpu),
)
_WITH_DROPOUT = (("dropped", _dropped),)


def has_fused_norm(device: Device) -> bool:
    """Whether norms are one kernel forward, and one for each gradient."""
    return device.type == "cuda"


def has_norm_dw(device: Device, same_dtype: bool) -> bool:
    """Whether the gradient of a norm's weight is one kernel. same_dtype: statistics have the dtype of x, as a CPU's wants."""
    return has_fused_norm(device) or (device.type == "cpu" and same_dtype)


def has_ordered_embedding(device: Device) -> bool:
    """Whether torch's own gradient of a table adds in a fixed order, and scattered additions do not."""
    return device.type != "cpu"


def has_widening_kernels(device: Device) -> bool:
    """Whether pointwise kernels widen what they read as they read it, without a pass of its own."""
    return device.type != "cpu"


def has_pool_of_planes(device: Device) -> bool:
    """Whether maxima over windows are found fast where every channel is a plane of its own."""
    return device.type != "cpu"


def has_fused_dropout(dtype: torch.dtype, device: Device) -> bool:
    """Whether dropout reads its operand and writes its result, and nothing else."""
    return _has_triton(device) and dtype in _FLOATS


def _has_triton(device: Device) -> bool:
    """Whether Triton compiles for a device, as its own documentation says; torch for CUDA brings it along."""
    return _is_cuda(device, (8, 0))


def has_fused_update(device_type: str) -> bool:
    """Whether an optimizer's step is one kernel over all parameters, where torch has one for the optimizer."""
    return device_type == "cuda"
