"""The gradient store of a stage played: the runtime's own, over tensors without data, on a rank whose messages move nothing.

When a bucket is full depends on what was sent before it, what is alive on what was let go, so the code that decides it at run
time (`autopar.runtime.gradients`) decides it here. Prices ask which gradients it sends where they lie, memory what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.ir.lines import AddGradient
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.steps import bytes_before_per_byte, rows
from autopar.passes.played.meta_comm import MetaComm
from autopar.passes.played.tensors import Layout, Ledger
from autopar.passes.rules.once import once
from autopar.runtime.gradients.buckets import Buckets, BucketSizes, bytes_in_buckets
from autopar.runtime.gradients.compression import CODECS, Codec, Lost, Unsent
from autopar.runtime.gradients.grads import GradEntry, GradStore
from autopar.runtime.memory.tiers import Tiers


def unreduced_bytes(p: StoredParameter, mesh: Mesh) -> float:
    """Bytes of a parameter's gradient on a rank before its reduction."""
    return p.optimizer.local_bytes(p.type, mesh) * bytes_before_per_byte(p.reduce, mesh.sizes)


def summed_bytes(p: StoredParameter, mesh: Mesh) -> int:
    """Bytes that a rank puts into the messages that sum a parameter's gradient, of all of them together."""
    return bytes_in_buckets(p.optimizer.local_bytes(p.type, mesh), rows(p.reduce), mesh.product)


def bucket_sizes(stage: LoweredStage) -> BucketSizes:
    """When buckets of a stage's gradients are full."""
    return BucketSizes(step=sum(summed_bytes(p, stage.mesh) for p in stage.parameters.values() if p.contributions))


@once
def sent_in_place(stage: LoweredStage) -> frozenset[str]:
    """The parameters of a stage whose gradients are reduced where they lie, in a message of their own."""
    store = PlayedStore(stage.parameters, stage.mesh, 1)
    for function in (stage.backward, stage.weights):
        for line in function.lines if function is not None else ():
            if isinstance(line, AddGradient):
                p = stage.parameters[line.parameter]
                is_sum = stage.microbatches > 1  # which the store made, and nobody else holds
                layout = Layout.dense(_unreduced_shape(p, stage.mesh), p.type.dtype)
                store.add(p.name, store.ledger.tensor(layout), line.owned or is_sum)
    return frozenset(store.in_place)


def _unreduced_shape(p: StoredParameter, mesh: Mesh) -> list[int]:
    """The shape of a parameter's gradient on a rank before its reduction."""
    shape = list(p.optimizer.local_shape(p.type.shape, mesh))
    for step in reversed(p.reduce):
        size = mesh.product(step.axes)
        match step.kind:
            case "reduce_scatter" | "shard":
                shape[step.dims[0]] *= size
            case "all_gather":
                shape[step.dims[0]] //= size
            case "all_to_all":
                sharded, whole = step.dims
                shape[sharded] *= size
                shape[whole] //= size
    return shape


class _Tiers(Tiers):
    """Memory tiers of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__("meta")
        self.ledger = ledger

    def empty(self, shape: Sequence[int], dtype: torch.dtype, tier: str) -> Any:
        return self.ledger.tensor(Layout.dense(shape, dtype), tier)


class _Unsent(Unsent):
    """What compressing loses rests from the first step on, so it is in a ledger of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def add_to(self, lost: Lost, codec: Codec) -> None:
        super().add_to([(n, left, self.ledger.tensor(part.layout)) for n, left, part in lost], codec)


class _Buckets(Buckets):
    """The runtime's buckets. in_place: names of values whose first message is their own memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unsent = _Unsent()
        self.in_place: set[str] = set()
        self._launched: set[str] = set()

    def _launch(self, kind: str, axes: Any, items: list[Any], packed: bool) -> None:
        names = {item.name for item in items} - self._launched
        self._launched |= names
        self.in_place |= set() if packed else names
        super()._launch(kind, axes, items, packed)


class PlayedStore(GradStore):
    """A stage's gradient store. ledger: what is alive of it and of the gradients that it is given."""

    make_buckets = _Buckets

    def __init__(
        self, parameters: Mapping[str, StoredParameter], mesh: Mesh, microbatches: int, compensated: bool = False
    ) -> None:
        self.ledger = Ledger()
        trained = {name: p for name, p in parameters.items() if p.contributions}
        table = {n: GradEntry(p.contributions, rows(p.reduce), p.type.dtype, p.compression) for n, p in trained.items()}
        sizes = BucketSizes(step=sum(summed_bytes(p, mesh) for p in trained.values()))
        tiers = {name: p.tier for name, p in parameters.items() if p.tier}
        super().__init__(MetaComm(mesh.sizes), table, microbatches, sizes, compensated, _Tiers(self.ledger), tiers)

    @property
    def in_place(self) -> set[str]:
        """Parameters whose gradients were sent from where they lay."""
        return self._buckets.in_place

    @property
    def unsent_bytes(self) -> int:
        """What is kept of what compression lost."""
        return self.unsent.ledger.alive
