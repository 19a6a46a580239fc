"""The gradient store of a stage played: the runtime's own, over tensors without data, on a rank whose messages move nothing.

When a bucket is full depends on what was sent before it, what is alive on what was let go, so the code that decides it at run
time (`autopar.runtime.gradients`) decides it here. Prices ask which gradients it sends where they lie, memory what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.lines import AddGradient
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.resting import gradient_bytes
from autopar.ir.spec import Spec
from autopar.ir.steps import bytes_before_per_byte, rows, spec_before
from autopar.passes.played.meta_comm import MetaComm
from autopar.passes.played.tensors import Layout, Ledger
from autopar.passes.rules.memo import Memo
from autopar.passes.rules.once import once
from autopar.runtime.gradients.bucket_sizes import BucketSizes
from autopar.runtime.gradients.buckets import Buckets
from autopar.runtime.gradients.compression import Codec, Lost, Unsent
from autopar.runtime.gradients.grads import GradEntry, GradStore
from autopar.runtime.memory.tiers import Tiers


def unreduced_bytes(p: StoredParameter, mesh: Mesh) -> float:
    """Bytes of a parameter's gradient before its reduction, on the rank that has most."""
    before = bytes_before_per_byte(p.reduce, mesh, p.optimizer, p.type.shape)
    return gradient_bytes(p.updated_bytes(mesh)) * before


def summed_bytes(p: StoredParameter, mesh: Mesh) -> float:
    """The same where contributions are summed: no zeros fill it up yet."""
    return float(unreduced_spec(p).local_bytes(p.type, mesh))


def unreduced_spec(p: StoredParameter) -> Spec:
    """How a parameter's gradient is cut before its reduction."""
    return spec_before(p.reduce, p.optimizer)


@dataclass(frozen=True)
class SentBucket:
    """A message that sums gradients. sums: of which parameters, each with how many of its sums went before; packed: whether
    gradients were copied into it; after: lines that add gradients before it set out, in the order of the stage's."""

    sums: tuple[tuple[str, int], ...]
    packed: bool
    after: int


@once
def numbered(stage: LoweredStage) -> tuple[StoredParameter, ...]:
    """A stage's trained parameters under their numbers, as far as gradients are concerned: those of alike stages are equal."""
    trained = [p for p in stage.parameters.values() if p.contributions]
    return tuple(
        replace(p, name=str(i), storage=p.optimizer, regather=(), optimizer_tier="") for i, p in enumerate(trained)
    )


@once
def sent_buckets(stage: LoweredStage, memo: Memo) -> tuple[SentBucket, ...]:
    """The messages that sum a stage's gradients, in the order in which they set out in the last microbatch and after it. memo:
    of stages that are alike."""
    trained = [p for p in stage.parameters.values() if p.contributions]
    number = {p.name: i for i, p in enumerate(trained)}
    functions = [function for function in (stage.backward, stage.weights) if function is not None]
    lines = [line for function in functions for line in function.lines if isinstance(line, AddGradient)]
    are_sums = stage.microbatches > 1  # which the store made, and nobody else holds
    added = tuple((number[line.parameter], line.owned or are_sums) for line in lines)
    at_the_end = tuple(replace(p, by_microbatch=False) if p.by_microbatch else p for p in numbered(stage))
    played = memo[_played](at_the_end, stage.mesh, added, memo)
    return tuple(
        replace(bucket, sums=tuple((trained[int(name)].name, before) for name, before in bucket.sums))
        for bucket in played
    )


def _played(
    parameters: tuple[StoredParameter, ...], mesh: Mesh, added: tuple[tuple[int, bool], ...], memo: Memo
) -> tuple[SentBucket, ...]:
    """The messages of stages that are alike. added: whose gradients in their order, and whether nobody else holds them."""
    store, before = PlayedStore(parameters, mesh, 1, memo), Counter[str]()
    layouts = [Layout.dense(unreduced_spec(p).local_shape(p.type.shape, mesh), p.type.dtype) for p in parameters]
    buckets: list[SentBucket] = []

    def note(after: int) -> None:
        for names, packed in store.launched:
            buckets.append(SentBucket(tuple((name, before[name]) for name in names), packed, after))
            before.update(names)
        store.launched.clear()

    for after, (number, owned) in enumerate(added, 1):
        gradient: Any = store.ledger.tensor(layouts[number])
        store.add(parameters[number].name, gradient, owned)
        note(after)
    store.drain()
    note(len(added) + 1)
    return tuple(buckets)


@once
def sent_in_place(stage: LoweredStage, memo: Memo) -> frozenset[str]:
    """The parameters of a stage whose gradients are reduced where they lie, in a message of their own."""
    alone = (bucket for bucket in sent_buckets(stage, memo) if not bucket.packed)
    return frozenset(name for bucket in alone for name, before in bucket.sums if not before)


class _Tiers(Tiers):
    """Memory tiers of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__("meta")
        self.ledger = ledger

    def empty(self, shape: Sequence[int], dtype: torch.dtype, tier: str) -> Any:
        return self.ledger.tensor(Layout.dense(shape, dtype), tier)


class _Unsent(Unsent):
    """Values that compressing loses: they rest from the first step on, so they are in a ledger of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def add_to(self, lost: Lost, codec: Codec) -> None:
        played: Any = [(name, left, self.ledger.tensor(Layout.of(part))) for name, left, part in lost]
        super().add_to(played, codec)


class _Buckets(Buckets):
    """The runtime's buckets. launched: names of what every message sums, and whether it was packed."""

    unsent: _Unsent

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unsent = _Unsent()
        self.launched: list[tuple[tuple[str, ...], bool]] = []

    def _launch(self, kind: str, axes: Any, items: list[Any], packed: bool) -> None:
        self.launched.append((tuple(item.name for item in items if item.half != "end"), packed))
        super()._launch(kind, axes, items, packed)

    @staticmethod
    def _packed(*_: Any) -> None:
        """Copies into what is there, which takes no bytes."""

    def _starts(self, length: int, width: int) -> Sequence[int]:
        """Two parts are under way at once, so that what the fourth and all before the last need, the third does."""
        starts = super()._starts(length, width)
        return [*starts[:3], *starts[max(3, len(starts) - 1) :]]


class PlayedStore(GradStore):
    """A stage's gradient store. ledger: what is alive of it and of the gradients that it is given."""

    make_buckets = _Buckets
    _buckets: _Buckets

    def __init__(
        self,
        trained: Sequence[StoredParameter],
        mesh: Mesh,
        microbatches: int,
        memo: Memo,
        compensated: bool = False,
        rank: int | None = None,
    ) -> None:
        """rank: of the mesh, the one whose store it is (None: the last)."""
        self.ledger = Ledger(memo)
        table = {
            p.name: GradEntry(p.contributions, rows(p.reduce), p.type.dtype, p.compression, p.by_microbatch)
            for p in trained
        }
        sizes = BucketSizes.of(
            ((p.name, p.type.shape, p.optimizer.row, p.type.dtype.itemsize, rows(p.reduce)) for p in trained),
            mesh.sizes,
        )
        tiers = {p.name: p.tier for p in trained if p.tier}
        super().__init__(
            MetaComm(mesh.sizes, rank), table, microbatches, sizes, compensated, _Tiers(self.ledger), tiers
        )

    @property
    def launched(self) -> list[tuple[tuple[str, ...], bool]]:
        """Names of what every message summed, and whether it was packed."""
        return self._buckets.launched

    @property
    def unsent_bytes(self) -> int:
        """Bytes that are kept of what compression lost."""
        return self._buckets.unsent.ledger.alive

    def drain(self) -> None:
        """Send what is open, and wait for everything."""
        self._buckets.drain()
