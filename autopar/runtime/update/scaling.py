"""Dynamic loss scaling: the scale that backward starts from, and what becomes of it after each step.

Small gradients of fp16 values would be rounded to zero; the loss is multiplied by a large scale, gradients are divided
by it after they are reduced. A scale that is too large shows as a gradient that is not finite: then all ranks skip the
step and the scale shrinks. The numbers are those of torch.amp.GradScaler, its kernel included, down to a floor, which it has
none of: below 2^-24, the smallest fp16 number, backward of fp16 values would start from zero, and a scale of zero has no inverse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
from torch import Tensor

from .clipping import alike
from .update_rule import LossScaling

LEAST_SCALE = 2.0**-24
"""Under no scale that is smaller are fp16 gradients other than zero."""


class Scaler:
    """The state of dynamic loss scaling, the same on every rank. growth_tracker: steps since the scale changed."""

    def __init__(self, choice: LossScaling) -> None:
        self.choice = choice
        self.scale = max(_float32(choice.initial), LEAST_SCALE)
        self.growth_tracker = 0

    def unscale(self, grads: Iterable[Tensor], device: torch.device) -> Tensor:
        """Divide gradients by the scale, in place; positive where one of this rank's is not finite, else 0."""
        total = torch.zeros(1, dtype=torch.float32, device=device)
        for (own, _), members in alike(grads).items():
            overflow = torch.zeros(1, dtype=torch.float32, device=own)
            inverse = torch.full((1,), 1.0 / self.scale, dtype=torch.float32, device=own)
            torch._amp_foreach_non_finite_check_and_unscale_(members, overflow, inverse)
            total += overflow.to(device)
        return total

    def update(self, overflow: bool) -> None:
        """Shrink the scale after a step in which a gradient overflowed, let it grow after enough steps without."""
        if overflow:
            self.scale, self.growth_tracker = max(_float32(self.scale * self.choice.backoff), LEAST_SCALE), 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.choice.interval:
            grown = _float32(self.scale * self.choice.growth)
            self.scale, self.growth_tracker = grown if grown < float("inf") else self.scale, 0

    def restore(self, scale: float, growth_tracker: int) -> None:
        """Go on from a checkpoint, which may have been written where scales had no floor."""
        self.scale, self.growth_tracker = max(scale, LEAST_SCALE), growth_tracker

    def dump(self) -> str:
        return json.dumps({"scale": self.scale, "growth_tracker": self.growth_tracker})


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
