"""Kernels of our own for GPUs, written in Triton, and the ops of torch by which they are launched.

As an op a kernel is one call to whoever watches a program: fake and meta tensors have its results without it, and the record of a
step shows its numbers. Triton is imported where a kernel is launched for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .draws import Key

Tensor = torch.Tensor
_NAMESPACE = "autopar_kernels"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")


def kernel_op(schema: str, launch: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """An op that launches kernels on a GPU; shapes: empty results. The first copy of the runtime in a process
    defines it."""
    name = schema[: schema.index("(")]
    if not hasattr(getattr(torch.ops, _NAMESPACE), name):
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, launch, "CUDA")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def as_told(key: Key) -> tuple[int, Tensor | None]:
    """A key as two arguments of an op: the number, or the tensor that holds it."""
    return (0, key) if isinstance(key, Tensor) else (key, None)


def fused_dropout(x: Tensor, p: float, key: Key, shape: Sequence[int] | None, offsets: Sequence[int] | None) -> Tensor:
    """Dropout by one kernel."""
    return _DROPOUT(x, p, *as_told(key), shape, offsets)


def _launch_dropout(
    x: Tensor, p: float, key: int, keys: Tensor | None, shape: Sequence[int] | None, offsets: Sequence[int] | None
) -> Tensor:
    from . import triton_dropout

    return triton_dropout.dropout(x, p, key if keys is None else keys, shape, offsets)


_DROPOUT = kernel_op(
    "dropout(Tensor x, float p, int key, Tensor? keys, int[]? shape, int[]? offsets) -> Tensor",
    _launch_dropout,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
