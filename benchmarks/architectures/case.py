"""One architecture to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Case:
    """make: gives a model and a batch. loss_fn: where the model's output is no loss. family: the library it comes from."""

    name: str
    family: str
    make: Callable[[], tuple[nn.Module, Any]]
    loss_fn: Callable[..., Any] | None = None
