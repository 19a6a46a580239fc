"""Products of rows with the matrix of the group that each belongs to, as the experts of a mixture compute them.

    y[r] = x[r] @ w[group[r]]

Rows come in any order. They are sorted by group, every group is one product, and the results go back to their places. A
rank may hold some of the groups, those from number `first`: rows of other groups are 0.

How many rows a group has only the data says. A kernel for all groups reads it on the device; where there is none, the host asks,
once for the same rows, and a device that it runs ahead of waits for it. A small product is therefore made of all rows with all
matrices there, and each row takes its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from ..comm.devices import device_of, runs_ahead

Tensor = torch.Tensor
WAIT_FLOPS = 1e9
"""FLOPs that a device without the kernel does in the time for which it is idle when the host has asked it something (50 µs at 20
TFLOP/s)."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows sorted by group. ends: (groups,), where those of each end; rows: how many there are, also after the last group."""

    ends: Tensor
    rows: int

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First row and end of every group. Without data (on the meta device) there are none to tell."""
        return [] if self.ends.is_meta else list(itertools.pairwise([0, *self.ends.tolist()]))

    @cached_property
    def numbers(self) -> Tensor:
        """(rows,): the group of each, the number of groups for those after the last."""
        return torch.searchsorted(self.ends, torch.arange(self.rows, device=self.ends.device), right=True)

    @cached_property
    def members(self) -> Tensor:
        """(groups, rows): whether a row is of a group."""
        return self.numbers == torch.arange(len(self.ends), device=self.ends.device).unsqueeze(1)

    @cached_property
    def offs(self) -> Tensor:
        """The ends as torch's kernel takes them."""
        return self.ends.int()

    @cached_property
    def outside(self) -> Tensor:
        """(rows, 1): whether a row is after the last group."""
        return (torch.arange(self.rows, device=self.ends.device) >= self.ends[-1]).unsqueeze(-1)


def grouped_mm(x: Tensor, w: Tensor, group: Tensor, first: int = 0) -> Tensor:
    """x: (..., k), w: (groups, k, n), group: (...) -> (..., n)."""
    rows = x.reshape(-1, x.shape[-1])
    order, ends = by_group(group, first, w.shape[0])
    y = rows.new_empty(rows.shape[0], w.shape[2])
    y[order] = products(rows[order], w, Groups(ends, len(order)))
    return y.view(*x.shape[:-1], w.shape[2])


def grouped_mm_dw(x: Tensor, g: Tensor, group: Tensor, groups: int, first: int = 0) -> Tensor:
    """The gradient of w. x: (..., k), g: (..., n), group: (...) -> (groups, k, n)."""
    order, ends = by_group(group, first, groups)
    x, g = x.reshape(-1, x.shape[-1])[order], g.reshape(-1, g.shape[-1])[order]
    dw = x.new_zeros(groups, x.shape[1], g.shape[1])
    add_outer_products(dw, x, g, Groups(ends, len(order)))
    return dw


def stacked(parts: list[Tensor]) -> Tensor:
    """The matrices of groups as one, (groups, …): a view where they lie one after another in one memory, else a copy."""
    first, n = parts[0], parts[0].numel()
    memory, start = first.untyped_storage()._cdata, first.storage_offset()
    for i, part in enumerate(parts):
        together = part.untyped_storage()._cdata == memory and part.storage_offset() == start + i * n
        if not (together and part.is_contiguous()):
            return torch.stack(parts)
    return first.as_strided((len(parts), *first.shape), (n, *first.stride()))


def by_group(group: Tensor, first: int, groups: int) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by group, those of other groups last, and where each group ends in it."""
    local = group.reshape(-1) - first
    local = local.masked_fill((local < 0) | (local >= groups), groups)
    sorted_groups, order = local.sort(stable=True)
    ends = torch.searchsorted(sorted_groups, torch.arange(groups, device=group.device), right=True)
    return order, ends


def products(rows: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """rows: (r, k), sorted by group; w: (groups, k, n) -> (r, n), 0 after the last group's."""
    if _has_kernel(rows, w) and not rows.is_meta:
        y = torch._grouped_mm(rows, w, offs=groups.offs)
        return y.masked_fill_(groups.outside, 0)  # the kernel leaves these rows as they were
    if _is_small(rows, w.shape[2], len(w)) and not _has_kernel(rows, w):
        own = groups.numbers.clamp(max=len(w) - 1).view(1, -1, 1).expand(1, -1, w.shape[2])
        return (rows @ w).gather(0, own)[0].masked_fill_(groups.outside, 0)
    y = rows.new_zeros(rows.shape[0], w.shape[2])
    for matrix, (start, end) in zip(w, groups.spans, strict=False):
        torch.mm(rows[start:end], matrix, out=y[start:end])
    return y


def add_outer_products(dw: Tensor, x: Tensor, g: Tensor, groups: Groups) -> None:
    """To the gradient of w, (groups, k, n), what these rows give. x: (r, k), g: (r, n), both sorted by group."""
    if _has_kernel(x, g) and not x.is_meta:
        dw.add_(torch._grouped_mm(x.t(), g, offs=groups.offs))
        return
    if _is_small(x, g.shape[1], len(dw)) and not _has_kernel(x, g):
        dw.add_(x.t() @ torch.where(groups.members.unsqueeze(-1), g, 0))
        return
    for out, (start, end) in zip(dw, groups.spans, strict=False):
        if end > start:
            out.addmm_(x[start:end].t(), g[start:end])


def add_sums(out: Tensor, t: Tensor, groups: Groups) -> None:
    """out: (groups, …), to which the sums of every group's rows are added. t: (rows, …)."""
    if runs_ahead(t.device):
        out.add_((groups.members.to(t.dtype) @ t.flatten(1)).view_as(out))
        return
    for total, (start, end) in zip(out, groups.spans, strict=False):
        total += t[start:end].sum(0)


def _is_small(rows: Tensor, width: int, groups: int) -> bool:
    """Whether a product of all rows with the matrices of all groups costs a device less than that the host asks it."""
    return runs_ahead(rows.device) and 2.0 * rows.numel() * width * groups <= WAIT_FLOPS


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether torch has one kernel for all groups: in bfloat16 on sm90 and sm100, rows of whole 16 bytes."""
    device = device_of(a)
    known = device.type == "rocm" or (device.type == "cuda" and device.capability[0] in (9, 10))
    return known and a.dtype == torch.bfloat16 and all(_aligned(t) for t in (a, b))


def _aligned(t: Tensor) -> bool:
    inner, outer = sorted(t.stride()[-2:])
    return inner == 1 and outer * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0 and t.numel() > 0
