"""What a parameter's (storage, optimizer) pair of specs costs on one rank: bytes on the device, and seconds of a step.

Bytes are the stored shard, its gradient and the optimizer's state. What `Setting.offload` puts into a memory tier takes no
bytes of the device and pays its whole way there and back instead, so that the solver shards it all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType

State = tuple[Spec, Spec]
"""How a parameter is stored, and how its gradient and optimizer state are."""


def parameter_bytes(type_: TensorType, state: State, trained: Sequence[str], setting: Setting, mesh: Mesh) -> float:
    """Parameter, gradient and optimizer state of one parameter on one rank's device.

    trained: the parameter's name, or those of several that are alike, where they are trained; of these it is the average.
    """
    shard = state[1].local_bytes(type_, mesh) if trained else 0.0
    nbytes = 0.0 if "parameters" in setting.offload else state[0].local_bytes(type_, mesh) + shard
    if "optimizer" in setting.offload or not trained:
        return nbytes
    return nbytes + setting.optimizer.shard_bytes(type_, shard, *trained)


def moved_bytes(
    type_: TensorType, state: State, trained: Sequence[str], reads: float, setting: Setting, mesh: Mesh
) -> float:
    """Bytes of one parameter that go to a memory tier or come from it in a step; reads: how often it is used."""
    shard, moved = state[1].local_bytes(type_, mesh), 0.0
    if "parameters" in setting.offload:
        moved += reads * state[0].local_bytes(type_, mesh) + (4 * shard if trained else 0.0)
    if "optimizer" in setting.offload and trained:
        moved += 2 * setting.optimizer.shard_bytes(type_, shard, *trained)
    return moved
