"""`rt`, what emitted code sees of its rank: communication, stored parameters and buffers, gradients, counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .comm.axis_comm import Along
from .comm.calls import Handle
from .comm.comm import Comm
from .comm.reshard import TableStep
from .errors import RuntimeProgramError
from .gradients.gather import Gather, start_gathers
from .gradients.grads import GradStore
from .guards import Guards
from .kernels.draws import Key
from .kernels.random import StepKeys, make_key
from .memory.tiers import Tiers

Steps = tuple[TableStep, ...]
Wanted = tuple[str, Steps] | tuple[str, Steps, torch.dtype]
"""A parameter's name, the steps from its storage shard, and the dtype that the shard is cast to before them."""


class Rank:
    """State of one rank between and during steps.

    params hold storage shards and buffers local values, by name; narrow holds the copies of shards in lower precision that are
    made once a step. step counts optimizer steps, microbatch the position inside a step; loss_scale is what backward starts
    from; keys holds those of random ops while a step is captured. in_tier: the parameters whose shards rest in memory tiers.
    """

    def __init__(
        self,
        comm: Comm,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        grads: GradStore,
        *,
        seed: int = 0,
        tiers: Tiers | None = None,
        in_tier: frozenset[str] = frozenset(),
        guards: Guards | None = None,
        narrow: dict[str, Tensor] | None = None,
    ) -> None:
        self.comm = comm
        self.guards = guards or Guards()
        self.tiers = tiers or Tiers(comm.device)
        self.inputs: frozenset[int] = frozenset()
        self.in_tier = in_tier
        self.params = params
        self.narrow = narrow or {}
        self.buffers = buffers
        self.grads = grads
        self.seed = seed
        self.step = 0
        self.microbatch = 0
        self.loss_scale = 1.0
        self.keys: StepKeys | None = None
        self.device: torch.device = comm.device
        self._prefetched: dict[str, Handle[list[Tensor]]] = {}
        self._updated: dict[str, Tensor] = {}

    def along(self, axis: str, *inner: str) -> Along:
        """A mesh axis, for an op that sends messages itself. inner: those along which they go on."""
        return Along(self.comm, axis, *inner)

    def prefetch(self, key: str, items: Sequence[Wanted], site: str = "") -> None:
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

    def park(self, saved: list[Any], places: Sequence[int], tier: str) -> None:
        """Move these entries of what a call saved to a memory tier; parameters, buffers and the batch stay where they are."""
        resting = (self.params, self.narrow, self.buffers)
        at_rest = {t.untyped_storage()._cdata for held in resting for t in held.values()}
        self.tiers.park(saved, places, tier, at_rest | self.inputs)

    def fetch(self, saved: list[Any]) -> None:
        """Start bringing back what was parked of it."""
        self.tiers.fetch(saved)

    def ready(self, saved: list[Any]) -> None:
        """Wait until what was fetched of the list has arrived."""
        self.tiers.ready(saved)

    def key(self, call: int, site: int) -> Key:
        """Key of one random op: the same on every rank, and again when backward or recompute asks for it."""
        if self.keys is not None:
            return self.keys.of(self.seed, self.step, (self.microbatch, call, site))
        return make_key(self.seed, self.step, self.microbatch, call, site)

    def update_buffer(self, name: str, value: Tensor, when: str) -> None:
        """Note the value of a buffer after the step: the "same" value in every microbatch, or the "sum" of theirs."""
        before = self._updated.get(name)
        self._updated[name] = value if before is None or when == "same" else before + value

    @torch.no_grad()
    def begin_step(self) -> None:
        """Cast the parameters of which there are copies in lower precision."""
        if self.narrow:
            torch._foreach_copy_([*self.narrow.values()], [self.params[name] for name in self.narrow])

    def end_step(self) -> None:
        """Write the buffers that the step updated; check that it took all it had prefetched."""
        for name, value in self._updated.items():
            self.buffers[name].copy_(value)
        self._updated.clear()
        if self._prefetched:
            raise RuntimeProgramError(f"prefetched and never taken: {', '.join(self._prefetched)}")

    def _start(self, items: Sequence[Wanted], site: str) -> Handle[list[Tensor]]:
        gathers: list[Gather] = []
        dtypes: list[torch.dtype | None] = []
        for name, steps, *dtype in items:
            if name not in self.params:
                raise RuntimeProgramError(f"the program has no parameter {name!r}")
            shard = self.narrow.get(name, self.params[name]) if dtype else self.params[name]
            gathers.append((self.tiers.read(shard) if name in self.in_tier else shard, steps, None))
            dtypes.append(dtype[0] if dtype else None)
        mark = self.tiers.mark()
        if not any(name in self.in_tier and self._travels(steps) for name, steps, *_ in items):
            handle = start_gathers(self.comm, gathers, site, dtypes=dtypes if any(dtypes) else ())
            return handle if mark is None else Handle(lambda: self._arrived(mark, handle))
        self.tiers.arrived(mark)
        return start_gathers(self.comm, gathers, site, dtypes=dtypes if any(dtypes) else ())

    def _travels(self, steps: Steps) -> bool:
        return any(self.comm.axis_size(step[1]) > 1 for step in steps)

    def _arrived(self, mark: Any, handle: Handle[list[Tensor]]) -> list[Tensor]:
        self.tiers.arrived(mark)
        return handle.wait()
