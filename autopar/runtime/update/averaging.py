"""Averages of parameters over the steps of training, as torch.optim.swa_utils.AveragedModel keeps them with
get_ema_multi_avg_fn: a copy at the first step, and after every later one

    average <- average + (1 - decay) · (parameter - average)

Each rank averages the blocks that it stores, so nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..data.schema import is_number, where

Decay = Annotated[float, where(lambda x: is_number(x, 0, 1) and 0 < x < 1, "a number between 0 and 1")]


@dataclass(frozen=True)
class Averaging:
    """How an entry averages the parameters that it computes with. names: those that some step trains."""

    decay: Decay
    names: tuple[str, ...]


class Averages:
    """The averages of one rank. pairs: each with the parameter that it follows; steps: averaged so far."""

    def __init__(self, decay: float, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.decay = decay
        self.averages, self.parameters = [one for one, _ in pairs], [other for _, other in pairs]
        self.steps = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first step averages are what the parameters are."""
        if self.averages and not self.steps.item():
            torch._foreach_copy_(self.averages, self.parameters)

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are after a step."""
        self.begin()
        if self.averages and self.steps.item():
            torch._foreach_lerp_(self.averages, self.parameters, 1 - self.decay)
        self.steps += 1
