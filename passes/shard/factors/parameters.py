"""Costs of parameters by how they rest: bytes on a rank, seconds of an update, of gathers to their uses and after the optimizer
step, and of reductions of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.resting import ParameterOnRank, is_apart, is_copy
from autopar.ir.setting import Setting
from autopar.ir.types import TensorType
from autopar.passes.price.pricer import Pricer
from autopar.passes.shard.factors.conversions import along, conversions_s
from autopar.passes.shard.factors.overlap import OverlapShares
from autopar.passes.shard.factors.stored import Resting, Stored
from autopar.runtime.gradients.bucket_sizes import BUCKETED
from autopar.runtime.gradients.gather import GATHERED


@dataclass(frozen=True)
class ParameterCosts:
    """The costs of parameters on a mesh. shares: of their messages that a step pays. move_s: seconds per byte to a memory tier or
    back, 0 where nothing rests there."""

    pricer: Pricer
    setting: Setting
    shares: OverlapShares
    move_s: float

    def own(
        self,
        type_: TensorType,
        resting: Resting,
        count: int,
        updated: tuple[str, ...],
        kept: tuple[str, ...],
        reads: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a step, and bytes of a device, per state of a group of count parameters. updated, kept: those of which the
        step, or any step, changes the value. reads: how often in a step they are brought from storage to use, all together."""
        stored, optimizer, pricer = resting.stored, resting.optimizer, self.pricer
        shard, per_dim = optimizer.local_bytes(type_, pricer), pricer.shards(type_).per_dim
        copied = is_copy(*(np.array(type_.shape, int) // per_dim[rests.numbers] for rests in (stored, optimizer)))
        for i in optimizer.runs:
            copied[i] = is_apart(type_, *resting.states[i], pricer.mesh)
        held = ParameterOnRank(type_, stored.local_bytes(type_, pricer), shard, bool(updated), kept, copied * shard)
        seconds = np.zeros(len(resting.states))
        if self.move_s:
            seconds = count * self._moved_bytes(held, reads / count) * self.move_s
        if updated:
            gather_s = self._gathers_s(type_, optimizer, stored)
            update_s = pricer.update_s(self.setting.optimizer.update_elements(*updated), shard)
            seconds = seconds + count * (self.shares.update * gather_s + update_s)
        return seconds, count * held.on_device(self.setting, self.setting.offload)

    def uses_s(self, stored: TensorType, used: TensorType, before: Stored, after: np.ndarray) -> np.ndarray:
        """Seconds from storage to use, per pair of specs: shards are cast, then gathered as they are used."""
        pair = conversions_s(self.pricer, used, before.numbers, after)
        seconds = self.shares.each * before.gathered_s(pair, self.pricer, used)
        if used == stored:
            return seconds
        both = before.local_bytes(stored, self.pricer) + before.local_bytes(used, self.pricer)
        return np.asarray(seconds + (self.pricer.copy_s * both)[:, None])

    def reductions_s(self, type_: TensorType, before: np.ndarray, optimizer: Stored) -> np.ndarray:
        """Seconds of a step from gradients in these specs to the optimizer's shards."""
        joined = BUCKETED, self.setting.compression
        pair = conversions_s(self.pricer, type_, before, optimizer.numbers, *joined)
        pair = optimizer.reduced_s(pair, self.pricer, type_, before, *joined)
        times = self.setting.microbatches if self.setting.by_microbatch else 1
        return times * self.shares.reduce * pair

    def _moved_bytes(self, held: ParameterOnRank[np.ndarray], reads: float) -> np.ndarray:
        """The bytes that go to a memory tier or come from it in a step, where the device has none of them. reads: how often the
        parameter is used."""
        moved = np.zeros(len(held.stored))
        if "parameters" in self.setting.offload:
            moved = moved + reads * held.stored
            if held.trained:  # the updated block comes and goes, and so does its gradient
                moved = moved + 2 * (held.updated + held.gradient)
        updates = held.trained and "optimizer" in self.setting.offload
        return moved + 2 * held.state_bytes(self.setting) if updates else moved

    def _gathers_s(self, type_: TensorType, before: Stored, after: Stored) -> np.ndarray:
        """Seconds of the gather after a step, from the spec of each state's shards to that of its storage."""
        lattice = self.pricer.lattice(type_, joined=GATHERED)
        seconds = along(lattice, self.pricer.mesh, type_, before.numbers, after.numbers)
        between = Stored(before.numbers, {i: run for i, run in before.runs.items() if i not in after.runs})
        return between.gathered_s(seconds, self.pricer, type_, GATHERED)
