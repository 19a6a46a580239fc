"""An optimizer factory that a program can import by name."""

from __future__ import annotations

from typing import Any

import torch


def decayed(named_parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not."""
    matrices = [p for _, p in named_parameters if p.ndim > 1]
    rest = [p for _, p in named_parameters if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=lr)
