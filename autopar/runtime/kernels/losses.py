"""The product of a language model's head and its cross-entropy, together, chunk of rows by chunk of rows.

Logits of all tokens over a large vocabulary are the largest tensors of a step, and nobody but the loss reads them. So a chunk of
rows goes the whole way, forward and back, before the next one begins, and what is alive has the size of one chunk:

    z = x wᵀ        loss += Σ r · (lse z - z[label])        d = r · (softmax z - onehot label)        dx = d w        dw += dᵀ x

Gradients are made beside the loss, as if the loss's own were 1: what comes back to a sum is one number, by which `times`
multiplies them in place. So there are three products, as without chunks. Over a vocabulary in blocks every chunk
exchanges two rows of statistics (`along`), and dx is a partial sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..comm.axis_comm import Along
from ..comm.devices import CPU, Device, device_of
from .ops import norm_dtype, pick, softmax_less_onehot, sumexp

Tensor = torch.Tensor
CHUNK_ROWS = 1024
"""Fewer rows do not fill a device's products, and every chunk reads and writes dw."""
GPU_TIMES = 4
"""The factor of the rows of a chunk on a GPU, which computes a hundred times faster than a core and reads fifty times faster."""


def chunk_rows(width: int, device: Device = CPU) -> int:
    """Rows of a chunk on a device, x having rows of `width` numbers: logits that are much smaller than dw would save nothing."""
    return max(CHUNK_ROWS, width // 2) * (1 if device == CPU else GPU_TIMES)


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    index: Tensor,
    scale: Tensor,
    smoothing: float,
    each: float,
    offset: int = 0,
    along: Along | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(Σ scale · (lse z - (1 - smoothing) z[index] - each Σ z), and its gradients in x and w), z = x wᵀ.

    x: (…, h), w: (v, h), of which this rank has the rows from `offset` on; index, scale: (…). A row of scale 0 counts nowhere,
    whatever it holds. Statistics of rows and sums over chunks have at least 32 bits.
    """
    rows, labels = x.reshape(-1, x.shape[-1]), index.reshape(-1)
    scales = scale.reshape(-1).to(norm_dtype(scale))
    dx, loss = torch.empty_like(rows), scales.new_zeros(())
    chunks = list(_chunks(rows))
    dw = None if len(chunks) == 1 else torch.zeros_like(w, dtype=norm_dtype(w))
    for chunk in chunks:
        r, label = scales[chunk], labels[chunk]
        part = rows[chunk].masked_fill((r == 0).unsqueeze(1), 0)
        z = F.linear(part, w)
        lse, picked, total = _statistics(z, label, scales.dtype, each != 0, offset, along)
        loss += (r * (lse - (1 - smoothing) * picked - each * total)).sum()
        d = softmax_less_onehot(z, lse, label, r, (1 - smoothing) * r, 1, offset, out=z)
        if each:
            d -= (each * r).unsqueeze(1).to(d.dtype)
        torch.mm(d, w, out=dx[chunk])
        dw = _added(dw, d, part)
        del z, d, part
    assert dw is not None
    return loss.to(scale.dtype), dx.view(x.shape), dw.to(w.dtype)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Chunks of rows; two of them for meta tensors, which are asked what is needed beside results."""
    n, step = len(rows), chunk_rows(rows.shape[1], device_of(rows))
    starts = range(0, max(n, 1), step)
    for start in itertools.islice(starts, 2 if rows.is_meta else None):
        yield slice(start, min(start + step, n))


def _statistics(
    z: Tensor, label: Tensor, dtype: torch.dtype, with_total: bool, offset: int, along: Along | None
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Per row of z log-sum-exp, the label's entry, and the sum of all (0 where nobody asks): over all blocks."""
    top = z.amax(1).to(dtype)
    if along is not None:
        top = along.start_all_reduce(top, "max").wait()
    sums = [sumexp(z, top, 1), pick(z, label, 1, offset).to(dtype)]
    if with_total:
        sums.append(z.sum(1, dtype=dtype))
    if along is not None:
        sums = list(along.start_all_reduce(torch.stack(sums)).wait().unbind(0))
    return sums[0].log() + top, sums[1], sums[2] if with_total else 0.0


def _added(dw: Tensor | None, d: Tensor, x: Tensor) -> Tensor:
    """dw + dᵀ x, in place. Where dw is wider the product is made in eight blocks of its rows, not to be as large as dw."""
    if dw is None:
        return d.t() @ x
    if dw.dtype == d.dtype:
        return dw.addmm_(d.t(), x)
    for total, of_rows in zip(dw.chunk(8), d.chunk(8, 1), strict=True):
        total += of_rows.t() @ x
    return dw


def times(x: Tensor, g: Tensor) -> Tensor:
    """x · g in the memory of x, which nobody reads after this. g: a number."""
    return x.mul_(g)
