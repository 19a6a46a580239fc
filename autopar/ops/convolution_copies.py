"""The copies that cuDNN's convolutions make of a GPU's tensors before and after they compute.

Their fast kernels want channels to lie fastest, and in 16 bits eight of them at a time. What lies otherwise, as dense tensors of
images do, is copied (operands before, the result after) and lives for a moment beside the tensors of the program:

    3 x 3, 320 to 320 channels, 4 images of 64 x 64 in bf16     image 10.0 MiB + kernel 1.8 + result 10.0 = 21.8 MiB

A product of every pixel (1 x 1) reads dense images as they are, but for its kernel's gradient. Depthwise convolutions have
kernels of torch, and float64 has none of these. What the gradient of a kernel adds over processors (2 to 18 MiB, once 60) no
rule tells: it is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.runtime.comm.backends import CUDA
from autopar.runtime.comm.devices import Device

_AT_ONCE = {torch.float32: 1, torch.bfloat16: 8, torch.float16: 8}
"""Channels that a kernel loads at once, of which copies have whole numbers."""


def forward_bytes(tensors: Sequence[torch.Tensor], arguments: Mapping[str, Any], device: Device) -> int:
    """Bytes of the copies of a convolution (image, kernel, bias or none, result), or of its image's gradient (result's gradient,
    kernel, the gradient)."""
    first, kernel, result = tensors[0], tensors[1], tensors[-1]
    plain = all(n == 1 for n in kernel.shape[2:]) and not any(arguments["padding"]) and set(arguments["stride"]) == {1}
    if plain and arguments["groups"] == 1 and first.is_contiguous():
        return 0
    return _copied_bytes((first, kernel, result), kernel, arguments, device)


def kernel_gradient_bytes(tensors: Sequence[torch.Tensor], arguments: Mapping[str, Any], device: Device) -> int:
    """Bytes of the copies of a kernel's gradient (result's gradient, image, the gradient)."""
    return _copied_bytes(tensors, tensors[-1], arguments, device)


def _copied_bytes(
    tensors: Sequence[torch.Tensor], kernel: torch.Tensor, arguments: Mapping[str, Any], device: Device
) -> int:
    at_once = _AT_ONCE.get(kernel.dtype)
    of_each_channel = arguments["groups"] == kernel.shape[0] and kernel.shape[1] == 1
    if device.type != CUDA.device_type or at_once is None or of_each_channel:
        return 0
    return sum(_copy_bytes(tensor, at_once) for tensor in tensors if tensor.numel())


def _copy_bytes(tensor: torch.Tensor, at_once: int) -> int:
    """Bytes of a tensor's copy in which channels (dim 1) lie fastest, a whole number of `at_once`; 0 where it lies so."""
    channels = tensor.shape[1]
    if tensor.stride(1) == 1 and channels % at_once == 0:
        return 0
    whole = -(-channels // at_once) * at_once
    return math.prod(tensor.shape) // channels * whole * tensor.dtype.itemsize
