"""Demands of CUDA kernels on their tensors that torch's fake forms of the ops do not check.

Each is what the kernel of torch 2.13 raises for, or, for fused optimizers, what it takes for granted: they go through all
tensors of a parameter by their places in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_MOST_OF_A_HEAD = 256


def refused(op: str, args: Sequence[Any]) -> str:
    """The reason for which a kernel does not take its arguments, "" where it does."""
    demand = _DEMANDS.get(op)
    return demand(args) if demand is not None else ""


def _flash(tensors: Sequence[Tensor]) -> str:
    for x in tensors:
        if x.dtype not in _HALF:
            return f"the kernel is for 16 bits, and is given {x.dtype}"
        if x.shape[-1] > _MOST_OF_A_HEAD:
            return f"heads of at most {_MOST_OF_A_HEAD}, and not of {x.shape[-1]}"
    return _whole_rows(tensors)


def _whole_rows(tensors: Sequence[Tensor]) -> str:
    for x in tensors:
        if x.stride(-1) != 1 or x.shape[-1] * x.element_size() % 16:
            return (
                f"heads of whole 16 bytes side by side, and not {x.dtype} of {list(x.shape)} with strides {x.stride()}"
            )
    return ""


def _mask(mask: Tensor | None, queries: Tensor) -> str:
    if mask is None:
        return ""
    if mask.dtype != queries.dtype:
        return f"a mask of {queries.dtype}, and not of {mask.dtype}"
    strides = [s for n, s in zip(mask.shape[:-1], mask.stride()[:-1], strict=True) if n > 1 and s]
    if any(stride * mask.element_size() % 16 for stride in strides):
        return f"rows of a mask that begin at whole 16 bytes, and not strides {mask.stride()}"
    return ""


def _alike(args: Sequence[Any]) -> str:
    """args: lists of parameters, gradients and state, a row each; numbers and counts of steps aside."""
    rows = [row for row in args if isinstance(row, (list, tuple)) and row and row[0].dim() == args[0][0].dim()]
    for own in zip(*(row for row in rows if len(row) == len(args[0])), strict=True):
        first = own[0]
        for x in own[1:]:
            if x.dim() and (x.dtype != first.dtype or _steps(x) != _steps(first)):
                return (
                    f"a parameter's gradient and state laid out as it is, {first.dtype} with strides {first.stride()}, and "
                    f"not {x.dtype} with {x.stride()}"
                )
    return ""


def _steps(x: Tensor) -> list[tuple[int, int]]:
    """Size and stride of every dim along which there is more than one element."""
    return [(n, stride) for n, stride in zip(x.shape, x.stride(), strict=True) if n != 1]


_DEMANDS: dict[str, Callable[[Sequence[Any]], str]] = {
    "_scaled_dot_product_flash_attention": lambda args: _flash(args[:3]),
    "_scaled_dot_product_flash_attention_backward": lambda args: _flash(args[:5]),
    "_scaled_dot_product_cudnn_attention": lambda args: _flash(args[:3]),
    "_scaled_dot_product_cudnn_attention_backward": lambda args: _flash(args[:5]),
    "_scaled_dot_product_efficient_attention": lambda args: _whole_rows(args[:3]) or _mask(args[3], args[0]),
    "_scaled_dot_product_efficient_attention_backward": lambda args: _whole_rows(args[:4]) or _mask(args[4], args[1]),
    "_fused_sgd_": _alike,
    "_fused_adam_": _alike,
    "_fused_adamw_": _alike,
}
