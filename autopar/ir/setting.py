"""The setting that a plan's costs depend on beside program and mesh: the optimizer's state, microbatches, what rests elsewhere.

The formula of an optimizer's state stands here alone, and whoever counts bytes or seconds of an update asks it. Of a
parameter with n elements on a rank, of which an optimizer keeps r elements of state per element (Adam: 2),

    bytes of state     n · r · max(bytes of a state element, bytes of the parameter's dtype)
    seconds of update  (3 + 2 r) · bytes of the shard · seconds to copy a byte

as an update reads parameter and gradient, reads and writes the state, and writes the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from autopar.ir.types import TensorType
from autopar.runtime.comm.devices import CPU, Device
from autopar.runtime.kernels.kernels import has_fused_update

Bytes = TypeVar("Bytes", float, np.ndarray)
"""Bytes of one shard, or of several at once."""


@dataclass(frozen=True)
class OptimizerState:
    """The state that an optimizer (or several) keeps for the parameters it updates.

    elements: of state per element of a parameter, over the whole model. elements_of: for parameters where it differs from
    that. element_bytes: of one of them. scratch: elements that an update needs for a moment, per element of the parameter
    it updates, of the one before and of every earlier one (what updates in lists holds that of all at once). is_fused: on a
    GPU one kernel updates all parameters, without scratch. whole: names of parameters that are updated as whole tensors.
    group_of: which group of the optimizer a parameter is in, where there are several.
    """

    elements: float = 0.0
    element_bytes: int = 0
    scratch: tuple[float, float, float] = (0.0, 0.0, 0.0)
    is_fused: bool = False
    whole: frozenset[str] = frozenset()
    elements_of: Mapping[str, float] = field(default_factory=dict)
    group_of: Mapping[str, int] = field(default_factory=dict)

    def ratio(self, *names: str) -> float:
        """Elements of state per element of a parameter; of several parameters of one shape, on average."""
        if not self.elements_of:
            return self.elements
        return sum(self.elements_of.get(name, self.elements) for name in names) / len(names)

    def update_elements(self, *names: str) -> float:
        """Elements of state that an update reads and writes per element of a parameter, on average of several."""
        return self.ratio(*names)

    def kind(self, name: str) -> tuple[float, int]:
        """The kind of a parameter: those of a kind are updated alike."""
        return self.ratio(name), self.group_of.get(name, 0)

    def joined(self, own: Collection[str], other: OptimizerState, names: Collection[str]) -> OptimizerState:
        """The state of optimizers of the parameters `own`, and of others of the parameters `names`, which may be of both."""
        apart = {name: other.ratio(name) + (self.ratio(name) if name in own else 0.0) for name in names}
        first_group = 1 + max(self.group_of.values(), default=0)
        return OptimizerState(
            self.elements,
            max(self.element_bytes, other.element_bytes),
            (
                max(self.scratch[0], other.scratch[0]),
                max(self.scratch[1], other.scratch[1]),
                max(self.scratch[2], other.scratch[2]),
            ),
            self.is_fused and other.is_fused,
            self.whole | other.whole,
            {**self.elements_of, **apart},
            {**self.group_of, **{name: first_group + other.group_of.get(name, 0) for name in names}},
        )

    def shard_bytes(self, type_: TensorType, nbytes: Bytes, *names: str) -> Bytes:
        """Bytes of state for a shard of so many bytes of a parameter (on average, of several that are alike)."""
        itemsize = type_.dtype.itemsize
        return nbytes / itemsize * self.ratio(*names) * max(self.element_bytes, itemsize)

    def scratch_bytes(self, shards: Sequence[float], device: Device = CPU) -> float:
        """The most bytes that updating shards of so many bytes, one after another, needs beside their state. On a GPU they are
        updated together."""
        own, before, earlier = self.scratch
        if has_fused_update(device.type):
            return 0.0 if self.is_fused else own * sum(shards)
        most = last = others = 0.0
        for shard in shards:
            most = max(most, own * shard + before * last + earlier * others)
            last, others = shard, others + last
        return most


@dataclass(frozen=True)
class Setting:
    """The setting that costs depend on beside program and mesh.

    optimizer: what is known of its state. in_flight: microbatches whose values are held for backward at once (pipelines).
    offload: kinds of bytes that rest in memory tiers whatever the plan (`autopar.ir.memory_levers`), which therefore take
    no memory of the device. compensated: gradients of microbatches are summed with what rounding loses. compression: how
    gradients travel while they are reduced (`runtime.gradients.compression.CODECS`; "": as they are). changes_gradients:
    they are written to before the optimizer sees them, those that others may hold in a copy. by_microbatch: gradients are
    reduced after every microbatch, so that shards rest in between. kept: parameters that other steps train, so that their
    optimizer's state rests here too. averaged: how many averages of a parameter rest beside it, by name.
    """

    microbatches: int = 1
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    in_flight: float = 1.0
    offload: frozenset[str] = frozenset()
    compensated: bool = False
    compression: str = ""
    changes_gradients: bool = False
    by_microbatch: bool = False
    kept: frozenset[str] = frozenset()
    averaged: Mapping[str, int] = field(default_factory=dict)
