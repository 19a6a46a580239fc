"""The kernels of attention in one form: a block of queries with a block of keys, forward and backward.

    attend(q, k, v, config)                    -> (out, lse)
    attend_grad(g, q, k, v, out, lse, config)  -> (dq, dk, dv)

Layouts are those of `scores`; lse is (batch, heads, query), the logarithm of Σ exp(score), in every kernel. So what one of them
gives, or several pieces that were merged, is what the backward of any can be given. What torch's ops want beside that is
hidden here:

    plain       the plain formula, for everything (`plain_scores`)
    cpu         torch's flash attention on CPUs, which takes for granted that a row's numbers lie one after another: masks at the
                size of the scores, several query heads to a key head as they are
    flash       GPU, 16 bits, no mask: key heads as on CPUs
    cudnn       the same; log-sum-exp (batch, heads, query, 1)
    efficient   GPU: log-sum-exp in rows of whole 32, infinite beyond the last; masks as on CPUs, key heads repeated
    dropped     GPU: our own, with dropout; masks and key heads as they are (`dropped`)

On a GPU heads are padded to whole 16 bytes. What a kernel needs inside is no tensor that anybody sees: where tensors have no
data, and are asked what they need, one of its size is there while the kernel is (`_inside`). The sizes are those of
torch's sources; cuDNN's is taken for that of flash.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from ..kernels import HALF
from . import plain_scores
from .dropped import Dropped, in_rows
from .plain_scores import Config, softmax_dtype

Tensor = torch.Tensor
aten = torch.ops.aten
_LSE_ROWS = 32
"""The backward of the memory-efficient kernel reads the log-sum-exp in tiles of so many rows."""


class Kernel(Protocol):
    """One of the kernels of attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]: ...

    def attend_grad(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: Config
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class _Cpu:
    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
        bias = _bias(config.mask, q, k)
        q, k, v = map(in_rows, (q, k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, config.causal, attn_mask=bias, scale=config.scale
        )

    def attend_grad(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: Config
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias = _bias(config.mask, q, k)
        g, q, k, v, out = map(in_rows, (g, q, k, v, out))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, config.causal, attn_mask=bias, scale=config.scale
        )


class _Flash:
    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
        out, lse = self._forward(_ready(q), _ready(k), _ready(v), config)
        return _unpadded(out, v), lse

    def attend_grad(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: Config
    ) -> tuple[Tensor, Tensor, Tensor]:
        operands = (_by_rows(_ready(g)), *map(_ready, (q, k, v)), _by_rows(_ready(out)), lse.contiguous())
        inside = _inside(q, flash_grad_bytes(operands[1], k))
        dq, dk, dv = self._backward(operands, config)
        del inside, operands
        return _unpadded(dq, q), _unpadded(dk, k), _unpadded(dv, v)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, config.causal, False, scale=config.scale)
        return out, lse

    def _backward(self, operands: tuple[Tensor, ...], config: Config) -> tuple[Tensor, Tensor, Tensor]:
        _, q, k, *_ = operands
        drawn = (q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64))  # by dropout, which is none
        return aten._scaled_dot_product_flash_attention_backward(
            *operands, None, None, q.shape[2], k.shape[2], 0.0, config.causal, *drawn, scale=config.scale
        )


class _Cudnn(_Flash):
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, config.causal, False, scale=config.scale
        )
        return out, lse.reshape(q.shape[:3])

    def _backward(self, operands: tuple[Tensor, ...], config: Config) -> tuple[Tensor, Tensor, Tensor]:
        *first, lse = operands
        q, k = operands[1:3]
        unread = (*_no_draws(q), None, None, None)  # a mask and lengths of samples, which are none
        sizes = (q.shape[2], k.shape[2], 0.0, config.causal)
        return aten._scaled_dot_product_cudnn_attention_backward(
            *first, lse.unsqueeze(-1), *unread, *sizes, scale=config.scale
        )


class _Efficient:
    def attend(self, q: Tensor, k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
        queries, keys, values, bias = self._operands(q, k, v, config)
        inside = _inside(q, efficient_bytes(queries, values))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            queries, keys, values, bias, True, 0.0, config.causal, scale=config.scale
        )
        del inside
        return _unpadded(out, v), lse.narrow(2, 0, q.shape[2])

    def attend_grad(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, config: Config
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values, bias = self._operands(q, k, v, config)
        g, out = _by_rows(_ready(g)), _by_rows(_ready(out))
        missing = -lse.shape[2] % _LSE_ROWS
        lse = F.pad(lse, (0, missing), value=math.inf) if missing else lse.contiguous()
        inside = _inside(q, efficient_grad_bytes(queries, values))
        wanted = [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            g, queries, keys, values, bias, out, lse, *_no_draws(q), 0.0, wanted, config.causal, scale=config.scale
        )
        del inside, g, out, lse, queries, keys, values, bias
        dk, dv = _sum_groups(_unpadded(dk, k), k.shape[1]), _sum_groups(_unpadded(dv, v), v.shape[1])
        return _unpadded(dq, q), dk, dv

    def _operands(
        self, q: Tensor, k: Tensor, v: Tensor, config: Config
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of every query head, and the mask, whose rows begin at whole 16 bytes too."""
        keys, values = (_ready(_expanded(x, q.shape[1])) for x in (k, v))
        mask = config.mask
        if mask is None:
            return _ready(q), keys, values, None
        columns = k.shape[2]
        bias = _ready(_additive(mask, q.dtype).expand(-1, -1, -1, columns)).narrow(3, 0, columns)
        return _ready(q), keys, values, bias.expand(*q.shape[:3], columns)


KERNELS: dict[str, Kernel] = {
    "plain": plain_scores,
    "cpu": _Cpu(),
    "flash": _Flash(),
    "cudnn": _Cudnn(),
    "efficient": _Efficient(),
    "dropped": Dropped(),
}
"""The kernels by the names that `kernels` gives."""


# --- how operands lie


def _no_draws(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of dropout, which is none."""
    return q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)


def _repeated(kv: Tensor, heads: int) -> Tensor:
    groups = heads // kv.shape[1]
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def _expanded(kv: Tensor, heads: int) -> Tensor:
    """The same, without a copy where one head is for all."""
    return kv.expand(-1, heads, -1, -1) if kv.shape[1] == 1 else _repeated(kv, heads)


def _sum_groups(grad: Tensor, heads: int) -> Tensor:
    if grad.shape[1] == heads:
        return grad
    return grad.unflatten(1, (heads, grad.shape[1] // heads)).sum(2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The additive mask at the size of the scores and in their dtype."""
    if mask is None:
        return None
    return _additive(mask, q.dtype).to(softmax_dtype(q)).expand(*q.shape[:3], k.shape[2])


def _ready(x: Tensor) -> Tensor:
    """The tensor with a last dim of whole 16 bytes, every row of which begins at such a place."""
    whole = 16 // x.itemsize
    if missing := -x.shape[-1] % whole:
        return F.pad(x, (0, missing))
    aligned = x.stride(-1) == 1 and all(n % whole == 0 for n in (*x.stride()[:-1], x.storage_offset()))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _unpadded(x: Tensor, like: Tensor) -> Tensor:
    """The tensor with as many numbers in the last dim as `like` has."""
    return x if x.shape[-1] == like.shape[-1] else x.narrow(-1, 0, like.shape[-1])


def _by_rows(x: Tensor) -> Tensor:
    """The heads of a row one after another in memory, as backward reads gradients and results."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# --- what kernels need inside


def _inside(x: Tensor, nbytes: int) -> Tensor | None:
    """A tensor of so many bytes, where tensors have no data."""
    return x.new_empty(nbytes, dtype=torch.uint8) if x.is_meta else None


def flash_grad_bytes(q: Tensor, k: Tensor) -> int:
    """Σ dO ∘ O and the gradient of queries in float32; of groups the gradients of keys and values of every query head."""
    batch, heads, rows, width = q.shape
    rows, widened = _rounded(rows, 128), _rounded(width, 32 if width <= 128 else 64)
    of_heads = 2 * batch * heads * k.shape[2] * width * q.itemsize if k.shape[1] < heads else 0
    return 4 * batch * heads * rows * (1 + widened) + of_heads


def efficient_bytes(q: Tensor, v: Tensor) -> int:
    """Results in float32, where they are in 16 bits and too wide for registers."""
    return 4 * math.prod(q.shape[:3]) * v.shape[3] if q.dtype in HALF and v.shape[3] > 128 else 0


def efficient_grad_bytes(q: Tensor, v: Tensor) -> int:
    """Σ dO ∘ O, in float32 with the product that is summed; the gradient of queries in float32; and where heads are in 16
    bits and too wide for registers those of a part of the keys and values."""
    batch, heads, rows, width = q.shape
    widest = max(width, v.shape[3])
    delta = 4 * batch * heads * rows
    queries = 4 * batch * heads * _rounded(rows, 64) * _rounded(width, 64 if widest <= 64 else 128)
    if q.dtype not in HALF:
        return delta + max(delta * v.shape[3], queries)
    if widest <= 128:
        return delta + queries
    parts = max(min(-(-v.shape[2] // 64), 200 // (batch * heads)), 1)
    return delta + queries + 4 * batch * heads * parts * 64 * (_rounded(width, 128) + _rounded(v.shape[3], 128))


def _rounded(n: int, whole: int) -> int:
    return -(-n // whole) * whole
