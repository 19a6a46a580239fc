"""The cost of a parameter's (storage, optimizer) pairs of specs on one rank: bytes on the device, and bytes that move in a step.

What `Setting.offload` puts into a memory tier takes no bytes of the device and pays its whole way there and back instead, so
that the solver shards it all the same.
"""

from __future__ import annotations

import numpy as np

from autopar.ir.resting import ParameterOnRank
from autopar.ir.setting import Setting


def device_bytes(held: ParameterOnRank[np.ndarray], setting: Setting) -> np.ndarray:
    """Bytes of one rank's device."""
    rows = (row.nbytes for row in held.rows(setting) if row.moves not in setting.offload)
    return sum(rows, np.zeros(len(held.stored)))


def moved_bytes(held: ParameterOnRank[np.ndarray], reads: float, setting: Setting) -> np.ndarray:
    """The bytes that go to a memory tier or come from it in a step; reads: how often the parameter is used."""
    moved = np.zeros(len(held.stored))
    if "parameters" in setting.offload:
        moved = moved + reads * held.stored
        if held.trained:  # the updated block comes and goes, and so does its gradient
            moved = moved + 2 * (held.updated + held.gradient)
    return moved + 2 * held.state_bytes(setting) if "optimizer" in setting.offload else moved
