"""Reductions of tensors by name, in an order that no timing decides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda acc, x: torch.add(acc, x, out=acc),
    "max": lambda acc, x: torch.maximum(acc, x, out=acc),
    "min": lambda acc, x: torch.minimum(acc, x, out=acc),
}


@torch.no_grad()
def reduce_in_order(parts: list[Tensor], op: str, out: Tensor) -> None:
    """parts[0] op parts[1] op … in this order, so that no result depends on timing. out may be one of the parts, which then
    comes first."""
    place = next((i for i, part in enumerate(parts) if part.data_ptr() == out.data_ptr()), 0)
    parts = [parts[place], *parts[:place], *parts[place + 1 :]]
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if op == "sum":
        torch.add(parts[0], parts[1], out=out)
    else:
        REDUCTIONS[op](out.copy_(parts[0]), parts[1])
    for part in parts[2:]:
        REDUCTIONS[op](out, part)
