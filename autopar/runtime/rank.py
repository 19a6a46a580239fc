"""`rt`, what emitted code sees of its rank: communication, stored parameters and buffers, gradients, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .comm import Comm, Handle, Step
from .errors import RuntimeProgramError
from .gather import start_gathers
from .grads import GradStore
from .random import make_key

Steps = tuple[Step, ...]


class Rank:
    """State of one rank between and during steps.

    params hold storage shards and buffers local values, by name; step counts optimizer steps, microbatch the position
    inside a step; use_steps says how a parameter's storage shard becomes what the computation uses (ZeRO-3).
    """

    def __init__(
        self,
        comm: Comm,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        grads: GradStore,
        *,
        use_steps: Mapping[str, Steps] | None = None,
        seed: int = 0,
    ) -> None:
        self.comm = comm
        self.params = params
        self.buffers = buffers
        self.grads = grads
        self.use_steps: dict[str, Steps] = dict(use_steps or {})
        self.seed = seed
        self.step = 0
        self.microbatch = 0
        self.device: torch.device = comm.device
        self._prefetched: dict[str, Handle[list[Tensor]]] = {}

    def gather(self, names: Sequence[str], site: str = "") -> list[Tensor]:
        """The parameters as the computation uses them, gathered together."""
        return self._start([(name, self.use_steps.get(name, ())) for name in names], site).wait()

    def prefetch(self, key: str, items: Sequence[tuple[str, Steps]], site: str = "") -> None:
        """Start gathering parameters along their steps; `take(key)` gives them."""
        if key in self._prefetched:
            raise RuntimeProgramError(f"prefetch of {key!r} was started twice")
        self._prefetched[key] = self._start(items, site or f"prefetch of {key}")

    def take(self, key: str) -> list[Tensor]:
        """The tensors of a prefetch, in its order. The runtime keeps no reference to them."""
        handle = self._prefetched.pop(key, None)
        if handle is None:
            raise RuntimeProgramError(f"take of {key!r} without a prefetch before it")
        return handle.wait()

    def key(self, call: int, site: int) -> int:
        """Key of one random op: the same on every rank, and again when backward or recompute asks for it."""
        return make_key(self.seed, self.step, self.microbatch, call, site)

    def end_step(self) -> None:
        """Check that the step took all it had prefetched."""
        if self._prefetched:
            raise RuntimeProgramError(f"prefetched and never taken: {', '.join(self._prefetched)}")

    def _start(self, items: Sequence[tuple[str, Steps]], site: str) -> Handle[list[Tensor]]:
        gathers = []
        for name, steps in items:
            if name not in self.params:
                raise RuntimeProgramError(f"the program has no parameter {name!r}")
            gathers.append((self.params[name], steps, None))
        return start_gathers(self.comm, gathers, site)
