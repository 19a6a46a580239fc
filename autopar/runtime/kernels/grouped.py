"""Products of rows with the matrix of the group that each belongs to, as the experts of a mixture compute them.

    y[r] = x[r] @ w[group[r]]

Rows come in any order. They are sorted by group, every group is one product, and the results go back to their places. A
rank may hold some of the groups, those from number `first`: rows of other groups are 0.
"""

from __future__ import annotations

import itertools

import torch

Tensor = torch.Tensor


def grouped_mm(x: Tensor, w: Tensor, group: Tensor, first: int = 0) -> Tensor:
    """x: (..., k), w: (groups, k, n), group: (...) -> (..., n)."""
    rows = x.reshape(-1, x.shape[-1])
    order, ends = by_group(group, first, w.shape[0])
    y = rows.new_empty(rows.shape[0], w.shape[2])
    y[order] = products(rows[order], w, ends)
    return y.view(*x.shape[:-1], w.shape[2])


def grouped_mm_dw(x: Tensor, g: Tensor, group: Tensor, groups: int, first: int = 0) -> Tensor:
    """The gradient of w. x: (..., k), g: (..., n), group: (...) -> (groups, k, n)."""
    order, ends = by_group(group, first, groups)
    x, g = x.reshape(-1, x.shape[-1])[order], g.reshape(-1, g.shape[-1])[order]
    dw = x.new_zeros(groups, x.shape[1], g.shape[1])
    add_outer_products(dw, x, g, ends)
    return dw


def by_group(group: Tensor, first: int, groups: int) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by group, those of other groups last, and where each group ends in it."""
    local = group.reshape(-1) - first
    local = local.masked_fill((local < 0) | (local >= groups), groups)
    sorted_groups, order = local.sort(stable=True)
    ends = torch.searchsorted(sorted_groups, torch.arange(groups, device=group.device), right=True)
    return order, ends


def products(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """rows: (r, k), sorted by group; w: (groups, k, n); ends: where each group's rows end -> (r, n), 0 after the last."""
    if _has_kernel(rows, w):
        y = torch._grouped_mm(rows, w, offs=ends.int())
        outside = torch.arange(rows.shape[0], device=rows.device) >= ends[-1]
        return y.masked_fill_(outside.unsqueeze(-1), 0)  # the kernel leaves these rows as they were
    y = rows.new_zeros(rows.shape[0], w.shape[2])
    for matrix, (start, end) in zip(w, spans(ends), strict=False):
        torch.mm(rows[start:end], matrix, out=y[start:end])
    return y


def add_outer_products(dw: Tensor, x: Tensor, g: Tensor, ends: Tensor) -> None:
    """To the gradient of w, (groups, k, n), what these rows give. x: (r, k), g: (r, n), both sorted by group."""
    if _has_kernel(x, g):
        dw.add_(torch._grouped_mm(x.t(), g, offs=ends.int()))
        return
    for out, (start, end) in zip(dw, spans(ends), strict=False):
        if end > start:
            out.addmm_(x[start:end].t(), g[start:end])


def spans(ends: Tensor) -> list[tuple[int, int]]:
    """First row and end of every group. Without data (on the meta device) there are none to tell."""
    return [] if ends.is_meta else list(itertools.pairwise([0, *ends.tolist()]))


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether torch has one kernel for all groups: in bfloat16 on a GPU, rows of whole 16 bytes."""
    return a.is_cuda and a.dtype == torch.bfloat16 and all(_aligned(t) for t in (a, b))


def _aligned(t: Tensor) -> bool:
    inner, outer = sorted(t.stride()[-2:])
    return inner == 1 and outer * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0 and t.numel() > 0
