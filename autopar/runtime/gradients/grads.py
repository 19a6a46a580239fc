"""Gradients on their way to the optimizer: accumulated, then reduced in buckets while the backward still runs.

A gradient is complete after `contributions * microbatches` calls of `add`. Then its resharding steps start (buckets.py);
`finish` waits for all of them. One that is scattered by microbatch goes its steps after every `contributions` calls, behind the
next microbatch's backward, and what rests in between is the sum of its shards:

    whole           add add | add add | add add, reduce_scatter
    by microbatch   add add, reduce_scatter | add add, reduce_scatter | add add, reduce_scatter      shards are added

Gradients that were computed in 16 bits are summed and reduced in the dtype of the parameter that is stored.

Compensated sums keep beside a sum of many addends what rounding lost of it (Kahan): y = g - c, t = s + y,
c = (t - s) - y, s = t. It is of use from the third addend on.

Gradients given out by `finish` are parts of buckets that last until `forget`, or the first `add` of the next step. So a
step begins with nothing of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.calls import Handle
from ..comm.comm import Axes, Comm
from ..errors import RuntimeProgramError
from ..memory.tiers import Tiers
from .bucket_sizes import BucketSizes, Steps
from .buckets import Buckets
from .compression import CODECS


@dataclass(frozen=True)
class GradEntry:
    """How often per microbatch a parameter's gradient is added to, and the steps from there to its storage spec.

    by_microbatch: the steps are gone after every microbatch instead of once, and their results are added.
    dtype: of the sum and its reduction, to which contributions are cast (None: that of the contributions). compression: how it
    travels while it is reduced, a name of compression.CODECS ("": as it is).
    """

    contributions: int
    steps: Steps = ()
    dtype: torch.dtype | None = None
    compression: str = ""
    by_microbatch: bool = False


@dataclass(slots=True)
class _Sum:
    """The sum of a gradient so far. owned: nobody else has its memory; lost: the compensation."""

    value: Tensor
    owned: bool
    lost: Tensor | None = None


class GradStore:
    """The gradients of one step; see the module docstring for the order of events."""

    make_buckets: type[Buckets] = Buckets

    def __init__(
        self,
        comm: Comm,
        table: Mapping[str, GradEntry],
        microbatches: int = 1,
        sizes: BucketSizes | None = None,
        compensated: bool = False,
        tiers: Tiers | None = None,
        tier_of: Mapping[str, str] | None = None,
    ) -> None:
        """compensated: sums of three and more addends carry what rounding loses. tier_of: memory tiers of `tiers` in which
        sums between microbatches, and reduced gradients, rest; their buckets are made anew each time and land early."""
        self.comm = comm
        self.table = dict(table)
        self.microbatches = microbatches
        self.compensated = compensated
        self.borrowed: set[str] = set()  # of the gradients that `finish` gave out: others may hold these tensors too
        self.tiers = tiers or Tiers(comm.device)
        self.tier_of = dict(tier_of or {})
        codecs = {name: CODECS[entry.compression] for name, entry in self.table.items() if entry.compression}
        scattered = {n for n, entry in self.table.items() if entry.by_microbatch} if microbatches > 1 else set()
        self._buckets = self.make_buckets(comm, self._arrived, self.tier_of, sizes or BucketSizes(), codecs, scattered)
        self._scattered = scattered
        self._under_way = len(scattered)  # of these, how many the microbatch has still to complete
        self.unsent = self._buckets.unsent
        self.feeds_back = any(codec.feedback for codec in codecs.values())
        self._sums: dict[str, _Sum] = {}
        self._shards: dict[str, _Sum] = {}
        self._arrivals: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._done: dict[str, Tensor] = {}
        self._values: dict[str, list[Tensor]] = {}
        self._finished = False

    def add(self, name: str, grad: Tensor, owned: bool = False) -> None:
        """Add a contribution, which needs no gradient itself. owned: nobody else reads or holds this tensor, it may be reduced
        in place."""
        entry = self.table.get(name)
        if entry is None:
            raise RuntimeProgramError(f"the program has no gradient entry for parameter {name!r}")
        self._begin()
        count = self._counts.get(name, 0) + 1
        due = entry.contributions * self.microbatches
        if count > due:
            raise RuntimeProgramError(f"gradient of {name!r}: contribution {count} of {due} since the last finish()")
        self._counts[name] = count
        if name not in self._scattered:
            total = self._summed(self._sums, name, grad, owned, count, due)
        else:
            each = entry.contributions
            total = self._summed(self._sums, name, grad, owned, (count - 1) % each + 1, each)
        del grad
        if total is None:
            return
        value, owned = total.value, total.owned
        del total
        self._buckets.add(name, value, owned, entry.steps)
        if name in self._scattered:
            self._under_way -= 1
            if not self._under_way:
                self._under_way = len(self._scattered)
                if count < due:
                    self._buckets.next_round()

    def _summed(self, sums: dict[str, _Sum], name: str, grad: Tensor, owned: bool, count: int, due: int) -> _Sum | None:
        """A gradient, or its shard, added to those before it. count: addends with this one. None: not all are there."""
        dtype = self.table[name].dtype
        if dtype not in (None, grad.dtype) and (count == 1 or (self.compensated and due > 2)):
            grad, owned = grad.to(dtype), True
        if count > 1:
            total = self._brought(name, sums.pop(name))
            if total.lost is not None:
                total = _add_compensated(total, total.lost, grad, owned, count == due)
            else:
                total = _Sum(total.value.add_(grad) if total.owned else total.value + grad, True)
        else:
            total = _Sum(grad, owned, torch.zeros_like(grad) if self.compensated and due > 2 else None)
        if count < due:
            sums[name] = self._rested(name, total)
            return None
        return total

    @torch.no_grad()
    def flush(self) -> None:
        """Issue what is open without waiting: nothing more will be added in this step."""
        self._buckets.flush()

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        """Issue what is open, wait for everything: name -> reduced local gradient, in table order."""
        for name, entry in self.table.items():
            due = entry.contributions * self.microbatches
            if self._counts.get(name, 0) != due:
                raise RuntimeProgramError(f"gradient of {name!r}: {self._counts.get(name, 0)} of {due} contributions")
        self._buckets.drain()
        self._counts.clear()
        self._buckets.clear()
        self._finished = True
        return {name: self._done.pop(name) for name in self.table if name in self._done}

    def forget(self) -> None:
        """The gradients that `finish` gave out are used: their buckets go when the caller has dropped them."""
        self._buckets.forget()

    @torch.no_grad()
    def start_sum(self, value: Tensor, axes: Axes) -> Handle[Tensor]:
        """Sum a small value (a loss) over axes in the same message as the next gradients of these axes.

        Best waited for after finish(): an earlier wait sends open buckets at once. Values are numbered anew in every step, as
        what is known of messages is kept by their names.
        """
        self._begin()
        name = f"value {len(self._values)} to sum"
        arrived = self._values[name] = []
        self._buckets.add(name, value, False, (("all_reduce", axes),))

        def wait() -> Tensor:
            if not arrived:
                self._buckets.drain()
            return arrived.pop().clone()

        return Handle(wait)

    def _begin(self) -> None:
        """The first call after finish(): what it gave out may be overwritten from here on."""
        if self._finished:
            self._finished = False
            self.borrowed.clear()
            self._values.clear()
            self.forget()

    def _arrived(self, name: str, grad: Tensor, owned: bool) -> None:
        """A gradient, or a value, has been through its steps. owned: it is nobody's but ours."""
        if name in self._values:
            self._values[name].append(grad)
            return
        if name in self._scattered:
            self._arrivals[name] = count = self._arrivals.get(name, 0) + 1
            total = self._summed(self._shards, name, grad, owned, count, self.microbatches)
            if total is None:
                return
            del self._arrivals[name]
            grad, owned = total.value, total.owned
        self._done[name] = self._parked(name, grad)
        if not (owned or name in self.tier_of):
            self.borrowed.add(name)

    def _parked(self, name: str, value: Tensor) -> Tensor:
        """A value in its gradient's tier, where it has one."""
        tier = self.tier_of.get(name)
        if tier is None:
            return value
        room = self.tiers.empty(value.shape, value.dtype, tier)
        self.tiers.write(room, value)
        return room

    def _rested(self, name: str, total: _Sum) -> _Sum:
        if name not in self.tier_of:
            return total
        return _Sum(
            self._parked(name, total.value), True, None if total.lost is None else self._parked(name, total.lost)
        )

    def _brought(self, name: str, total: _Sum) -> _Sum:
        if name not in self.tier_of:
            return total
        value, lost = self.tiers.read(total.value), None if total.lost is None else self.tiers.read(total.lost)
        self.tiers.arrived(self.tiers.mark())
        return _Sum(value, True, lost)


def _add_compensated(total: _Sum, lost: Tensor, grad: Tensor, owned: bool, last: bool) -> _Sum:
    """total + grad in the memory that the two have, as far as nobody else has it; after the last nothing is kept."""
    step = torch.sub(grad, lost, out=grad) if owned else grad - lost
    value = torch.add(total.value, step, out=lost)
    if last:
        return _Sum(value, True)
    lost = torch.sub(value, total.value, out=total.value) if total.owned else value - total.value
    return _Sum(value, True, lost.sub_(step))
