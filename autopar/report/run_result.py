"""The result of a program that was run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.report.predicted_vs_measured import Profile


@dataclass(frozen=True)
class RunResult:
    """Losses per step (training) or outputs per batch (inference), the final full state by the program's names, and what was
    recorded, if that was asked for. saved: the state as the model's own state dict has it."""

    losses: tuple[torch.Tensor, ...]
    outputs: tuple[Any, ...]
    state: dict[str, torch.Tensor] = field(repr=False, default_factory=dict)
    profile: Profile | None = field(repr=False, default=None)
    saved: dict[str, Any] = field(repr=False, default_factory=dict)

    def _items(self) -> tuple[Any, ...]:
        return self.losses or self.outputs

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, index: Any) -> Any:
        return self._items()[index]

    def state_dict(self) -> dict[str, Any]:
        """Full parameters and buffers after training, with exactly the names that the model's own state dict has."""
        return self.saved
