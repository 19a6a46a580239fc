"""Cases of the differential suite, and the generators that their batches are drawn with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 8


@dataclass(frozen=True, eq=False)
class Case:
    """A small model, its batches and its loss. coupled: microbatches of it must be refused. only: an optional set of options
    that it is tried under (none: all)."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor] | None = None
    coupled: bool = False

    def __str__(self) -> str:
        return self.name


def draw(seed: int, *shape: int) -> Tensor:
    """Standard normal float64 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ints(seed: int, high: int, *shape: int) -> Tensor:
    """Integers in [0, high)."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Between(nn.Module):
    """A linear layer, whatever a case puts after it, and what comes out: forward(x) = f(self, first(x))."""

    def __init__(self, f: Callable[..., Any], width: int, **modules: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        for name, module in modules.items():
            if isinstance(module, Tensor) and not isinstance(module, nn.Parameter):
                self.register_buffer(name, module)
            else:
                setattr(self, name, module)
        self.f = f

    def forward(self, *inputs: Tensor) -> Any:
        return self.f(self, self.first(inputs[0]), *inputs[1:])


def weighted_square(out: Tensor, target: Tensor) -> Tensor:
    """A loss per sample that every element of the output has another say in."""
    flat = out.reshape(out.shape[0], -1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
    return ((flat * weights - target[:, :1]) ** 2).mean()
