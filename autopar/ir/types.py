"""Tensor types: a shape and a dtype, and nothing that needs memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


@dataclass(frozen=True)
class TensorType:
    """Global shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        return TensorType(tuple(int(n) for n in tensor.shape), tensor.dtype)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def short_dtype(self) -> str:
        return _SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return f"{self.short_dtype}[{', '.join(map(str, self.shape))}]"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")
