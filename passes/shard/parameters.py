"""The cost of a parameter's (storage, optimizer) pairs of specs on one rank: bytes on the device, and seconds of a step.

Bytes are the stored shard, its gradient and the optimizer's state. What `Setting.offload` puts into a memory tier takes no
bytes of the device and pays its whole way there and back instead, so that the solver shards it all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.setting import Setting
from autopar.ir.types import TensorType


@dataclass(frozen=True)
class Resting:
    """A parameter as ranks may hold it. stored, shard: per pair the bytes of its block in storage and in the optimizer.

    trained: the parameter's name, or those of several that are alike, where they are trained; of these it is the average.
    """

    type: TensorType
    stored: np.ndarray
    shard: np.ndarray
    trained: Sequence[str]

    def nbytes(self, setting: Setting) -> np.ndarray:
        """Parameter, gradient and optimizer state on one rank's device."""
        nbytes = self.stored + (self.shard if self.trained else 0.0)
        if "parameters" in setting.offload:
            nbytes = np.zeros(len(self.stored))
        return nbytes if "optimizer" in setting.offload else nbytes + self._state(setting)

    def moved_bytes(self, reads: float, setting: Setting) -> np.ndarray:
        """The bytes that go to a memory tier or come from it in a step; reads: how often the parameter is used."""
        moved = np.zeros(len(self.stored))
        if "parameters" in setting.offload:
            moved = moved + reads * self.stored + (4 * self.shard if self.trained else 0.0)
        return moved + 2 * self._state(setting) if "optimizer" in setting.offload else moved

    def _state(self, setting: Setting) -> np.ndarray:
        if not self.trained:
            return np.zeros(len(self.stored))
        return setting.optimizer.shard_bytes(self.type, self.shard, *self.trained)
