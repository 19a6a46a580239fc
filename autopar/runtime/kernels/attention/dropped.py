"""Attention with dropout on a GPU: ops of torch that launch its kernels (`triton_attention`), a row of `attention_kernels`.

Tiles of rows and keys are chosen here, by the width of heads, such that sums stay in registers where kernels are compiled
for sm80 to sm120; of heads of 128 numbers and more a thread puts up to some hundred bytes into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..draws import Key, signed, threshold
from ..fused import as_told, kernel_op
from .plain_scores import Config

Tensor = torch.Tensor
_CONFIG = "float p, bool causal, float scale, int key, Tensor? keys, int[] place"


class Dropped:
    """Kernels that draw the mask of dropout for themselves."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
        return _ATTEND(q, k, v, config.mask, *_config(q, k, config))

    def attend_grad(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: Config
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, _ = _ATTEND_GRAD(g, q, k, v, config.mask, out, lse, *_config(q, k, config))
        return dq, dk, dv


def _config(q: Tensor, k: Tensor, config: Config) -> tuple[Any, ...]:
    """The numbers that a kernel is told; the last are the sizes of all scores, and where the block starts in them."""
    place = [*(config.shape or (*q.shape[:3], k.shape[2])), *(config.offsets or (0, 0, 0, 0))]
    return config.p, config.causal, config.scale, *as_told(config.key), place


# --- launched


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    key: int,
    keys: Tensor | None,
    place: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    from . import triton_attention as kernels

    q, k, v = (in_rows(x) for x in (q, k, v))
    out, lse = _shapes(q, k, v)
    told, lies = _compiled_for(q, k, v, mask, p, causal, place, keys is not None), tuple(map(_lies, (q, k, v)))
    kernels._forward[_programs(q, told["ROWS"])](
        *lies, _bias(mask, q, k), _lies(out), lse, *_told(q, k, p, scale, key if keys is None else keys, place), **told
    )
    return out, lse


def attend_grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    p: float,
    causal: bool,
    scale: float,
    key: int,
    keys: Tensor | None,
    place: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, δ)."""
    from . import triton_attention as kernels

    g, q, k, v, out = (in_rows(x) for x in (g, q, k, v, out))
    lse = lse.contiguous()
    dq, dk, dv, delta = _grad_shapes(g, q, k, v, mask, out, lse)
    told, numbers = (
        _compiled_for(q, k, v, mask, p, causal, place, keys is not None),
        _told(q, k, p, scale, key if keys is None else keys, place),
    )
    read = (*map(_lies, (g, q, k, v)), _bias(mask, q, k))
    kernels._of_rows[_programs(q, told["ROWS"])](*read, _lies(out), lse, delta, _lies(dq), *numbers, **told)
    kernels._of_keys[_programs(k, told["KEYS"])](*read, lse, delta, _lies(dk), _lies(dv), *numbers, **told)
    return dq, dk, dv, delta


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty([*q.shape[:3], v.shape[3]]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _grad_shapes(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(lse, memory_format=torch.contiguous_format)


def in_rows(x: Tensor) -> Tensor:
    """The tensor with the numbers of a row one after another."""
    return x if x.stride(3) == 1 else x.contiguous()


def _programs(x: Tensor, rows: int) -> tuple[int]:
    """A program for so many rows of every head."""
    return (-(-x.shape[2] // rows) * x.shape[0] * x.shape[1],)


def _lies(x: Tensor) -> tuple[Any, ...]:
    return x, *x.stride()[:3]


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """A mask at the size of the scores, and its strides; the queries where there is none, which nobody reads as such."""
    if mask is None:
        return q, 0, 0, 0, 0
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return mask, *mask.expand(*q.shape[:3], k.shape[2]).stride()


def _told(q: Tensor, k: Tensor, p: float, scale: float, key: Key, place: Sequence[int]) -> tuple[Any, ...]:
    """The numbers of a call, as the kernels take them."""
    _, heads, rows, keys, *offsets = place
    sizes = (*q.shape[1:3], k.shape[2])
    number = key if isinstance(key, Tensor) else signed(key)
    return sizes, scale, number, (*offsets, heads, rows, -(-keys // threshold(p).lanes)), 1 / (1 - p)


def _compiled_for(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, place: Sequence[int], keyed: bool
) -> dict[str, Any]:
    """The constants of a kernel, and its warps and stages."""
    lanes, least = threshold(p)
    width, value = (max(1 << (x.shape[3] - 1).bit_length(), 16) for x in (q, v))
    in_float, widest = q.dtype == torch.float32, max(width, value)
    tile = 32 if in_float or widest > 128 else 64
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "WIDTH": q.shape[3],
        "VALUE": v.shape[3],
        "D": width,
        "E": value,
        "CAUSAL": causal,
        "BIAS": "none" if mask is None else "seen" if mask.dtype == torch.bool else "added",
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "LEAST": least if lanes > 1 else torch.tensor(least, dtype=torch.float32).item(),
        "LANES": lanes,
        "WORDS": lanes > 1 and place[7] % lanes == 0,
        "ROWS": tile,
        "KEYS": tile,
        "KEYED": keyed,
        "num_warps": 8 if in_float or widest > 64 else 4,
        "num_stages": 1 if in_float else 2,
    }


_ATTEND = kernel_op(
    f"attention_dropout(Tensor q, Tensor k, Tensor v, Tensor? mask, {_CONFIG}) -> (Tensor, Tensor)", attend, _shapes
)
_ATTEND_GRAD = kernel_op(
    "attention_dropout_grad(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, "
    f"{_CONFIG}) -> (Tensor, Tensor, Tensor, Tensor)",
    attend_grad,
    _grad_shapes,
)
