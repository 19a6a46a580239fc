"""The workspace that torch's sums over rows take of a GPU beside their results.

Where the dim that lies fastest stays, as in the gradient of a bias, and rows are many, several blocks of threads share a column
and leave their parts in a buffer. It has a number for every block, output, thread of a warp and output of a vector
(`setReduceConfig` and `global_memory_size` in torch's ATen/native/cuda/Reduce.cuh):

    sum over 1024 rows of 4096 float32      four warps add 256 rows each, shared by 16 blocks     16 · 4096 · 32 · 4 numbers

That is twice the tensor that is summed. Sums over the dim that lies fastest share rows alike, for which a number per block and
output is enough: that is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.ops.labels import dims_told
from autopar.runtime.comm.backends import CUDA
from autopar.runtime.comm.devices import Device

_THREADS, _WARP, _VECTOR = 512, 32, 4
"""Threads of a block at most, over all outputs of a vector; of a warp; outputs that a thread loads at once at most."""
_FEWEST, _MOST = 16, 256
"""Numbers that a thread adds at least where blocks share a column, and from which on they do."""
_LARGEST = 1 << 31
"""Bytes of a tensor from which on torch takes it in parts."""
_RESIDENT = 1 << 18
"""Threads that run at once on a device of which that is not known: about as many as on those of data centres."""


def workspace_bytes(tensors: Sequence[torch.Tensor], arguments: Mapping[str, Any], device: Device) -> int:
    """Bytes that the sum of the first tensor over some dims needs for a moment on a CUDA device; on others none are known.
    arguments: the sum's, of which `dim` says over which dims (none: over all)."""
    x = tensors[0]
    shape, stride, dtype = x.shape, x.stride(), x.dtype
    dims = dims_told(arguments.get("dim"), x.ndim)
    kept = [d for d in range(len(shape)) if d not in dims and shape[d] > 1]
    gone = [d for d in dims if shape[d] > 1]
    if device.type != CUDA.device_type or not kept or not gone or min(stride[d] for d in (*kept, *gone)) < 1:
        return 0
    fastest = min(kept, key=lambda d: stride[d])
    if stride[fastest] > min(stride[d] for d in gone):
        return 0
    outputs, rows = math.prod(shape[d] for d in kept), math.prod(shape[d] for d in gone)
    while outputs * rows * dtype.itemsize > _LARGEST:
        rows = -(-rows // 2)
    vector = math.gcd(_VECTOR, shape[fastest], *(stride[d] for d in (*kept, *gone) if d != fastest))
    vector = vector if stride[fastest] == 1 else 1
    most = _THREADS // vector
    wide, high = (1 << (min(n, most).bit_length() - 1) for n in (outputs // vector, rows))
    height = min(high, most // min(wide, _WARP))
    width = min(wide, most // height)
    adds = -(-rows // height)
    if rows < min(height * _FEWEST, _MOST) or adds < _MOST:
        return 0
    columns = -(-(outputs // vector) // width)
    at_once = (device.resident_threads or _RESIDENT) // (width * height)
    if columns > at_once:
        return 0
    blocks = max(min(-(-at_once // columns), -(-adds // _FEWEST)), -(-adds // _MOST))
    number = 8 if dtype == torch.float64 or not dtype.is_floating_point else 4
    return number * outputs * blocks * width * vector if blocks > 1 else 0
