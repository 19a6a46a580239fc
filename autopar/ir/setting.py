"""What a sharding problem depends on beside program and mesh: microbatches, optimizer, what rests elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setting:
    """What the problem depends on beside program and mesh.

    state_ratio: optimizer state elements per parameter, state_bytes each. in_flight: microbatches whose values are held
    for backward at once (pipelines). scratch: elements that the optimizer's step needs for a moment, per element of
    the parameter it updates and per element of the one before. offload: kinds that rest in memory tiers whatever the
    plan ("optimizer", "activations", "parameters"; `autopar.passes.shard.offload`), which therefore take no memory here. whole:
    parameters that the optimizer updates as whole tensors. compensated: gradients of microbatches are summed with what
    rounding loses. state_of: the ratio of parameters where it is not state_ratio (which then is that of the model);
    group_of: which group of the optimizer a parameter is updated with, where there are several.
    """

    microbatches: int = 1
    state_ratio: float = 2.0
    state_bytes: int = 4
    scratch: tuple[float, float] = (0.0, 0.0)
    in_flight: float = 1.0
    offload: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    compensated: bool = False
    state_of: Mapping[str, float] = field(default_factory=dict)
    group_of: Mapping[str, int] = field(default_factory=dict)

    def ratio(self, name: str) -> float:
        """Optimizer state elements per element of a parameter."""
        return self.state_of.get(name, self.state_ratio)
