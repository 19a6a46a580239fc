"""What a parameter's (storage, optimizer) pair of specs costs on one rank: bytes on the device, and seconds of a step.

Bytes are the stored shard, its gradient and the optimizer's state. What `Setting.offload` puts into a memory tier takes no
bytes of the device and pays its whole way there and back instead, so that the solver shards it all the same.
"""

from __future__ import annotations

from autopar.ir.mesh import Mesh
from autopar.ir.setting import Setting
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType

State = tuple[Spec, Spec]
"""How a parameter is stored, and how its gradient and optimizer state are."""


def parameter_bytes(type_: TensorType, state: State, trained: bool, setting: Setting, mesh: Mesh) -> float:
    """Parameter, gradient and optimizer state of one parameter on one rank's device."""
    stored = 0.0 if "parameters" in setting.offload else state[0].local_bytes(type_, mesh)
    if not trained or "parameters" in setting.offload:
        return stored
    shard = state[1].local_bytes(type_, mesh)
    return stored + shard + (0.0 if "optimizer" in setting.offload else _state_bytes(type_, shard, setting))


def moved_bytes(type_: TensorType, state: State, trained: bool, reads: float, setting: Setting, mesh: Mesh) -> float:
    """Bytes of one parameter that go to a memory tier or come from it in a step; reads: how often it is used."""
    shard, moved = state[1].local_bytes(type_, mesh), 0.0
    if "parameters" in setting.offload:
        moved += reads * state[0].local_bytes(type_, mesh) + (4 * shard if trained else 0.0)
    if "optimizer" in setting.offload and trained:
        moved += 2 * _state_bytes(type_, shard, setting)
    return moved


def optimizer_s(type_: TensorType, spec: Spec, setting: Setting, mesh: Mesh, copy_s: float) -> float:
    """Seconds of the optimizer's step on one parameter's shard; copy_s: per byte that is touched."""
    return (3 + 2 * setting.state_ratio) * spec.local_bytes(type_, mesh) * copy_s


def _state_bytes(type_: TensorType, shard: float, setting: Setting) -> float:
    return shard / type_.dtype.itemsize * setting.state_ratio * max(setting.state_bytes, type_.dtype.itemsize)
