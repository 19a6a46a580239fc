"""Gradients of batches that no update has taken yet: what a loop that calls several batches before an update adds up.

Every batch's gradients are reduced as ever, and their shards are added on each rank: the sum is that of a loop which calls
`backward` for every batch, and as much memory as a rank's gradients take is held until the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

NOT_IN_TIERS = (
    "gradients that rest in a memory tier are not added up over batches; give the whole batch at once, which "
    "Options.microbatches cuts"
)


class Pending:
    """The sum of this rank's reduced gradients, by name. batches: how many were added."""

    def __init__(self) -> None:
        self.batches = 0
        self._sums: dict[str, Tensor] = {}

    @property
    def names(self) -> AbstractSet[str]:
        """The parameters that some batch had a gradient for."""
        return self._sums.keys()

    @torch.no_grad()
    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Add a batch's gradients, which others may write to afterwards."""
        self.batches += 1
        for name, grad in grads.items():
            if name in self._sums:
                self._sums[name].add_(grad)
            else:
                self._sums[name] = grad.clone(memory_format=torch.contiguous_format)

    def taken(self) -> dict[str, Tensor]:
        """The sums, for the update that takes them; nothing is pending then."""
        sums, self._sums, self.batches = self._sums, {}, 0
        return sums
