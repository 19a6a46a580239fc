"""The reductions of gradients: their bytes, and which gradients are reduced where they lie.

The runtime packs gradients into buckets, but for large ones that nobody else holds. How large depends on what was sent before
them (`autopar.runtime.buckets`), so its own code decides here: the gradients of a stage's last microbatch go through it, in
their order, as tensors without data.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from autopar.ir.lines import AddGradient
from autopar.ir.lowered import LoweredStage, StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.steps import bytes_before_per_byte, rows
from autopar.passes.price.meta_comm import MetaComm
from autopar.passes.rules.once import once
from autopar.runtime.gradients.buckets import Buckets, BucketSizes, bytes_in_buckets
from autopar.runtime.gradients.compression import CODECS


def unreduced_bytes(p: StoredParameter, mesh: Mesh) -> float:
    """Bytes of a parameter's gradient on a rank before its reduction."""
    return p.optimizer.local_bytes(p.type, mesh) * bytes_before_per_byte(p.reduce, mesh.sizes)


def summed_bytes(p: StoredParameter, mesh: Mesh) -> int:
    """Bytes that a rank puts into the messages that sum a parameter's gradient, of all of them together."""
    return bytes_in_buckets(p.optimizer.local_bytes(p.type, mesh), rows(p.reduce), mesh.product)


def unsent_bytes(p: StoredParameter, mesh: Mesh) -> int:
    """Bytes that a rank keeps of what compressing a parameter's gradient has lost: as much as every sum is of."""
    return summed_bytes(p, mesh) if p.compression and CODECS[p.compression].feedback else 0


def bucket_sizes(stage: LoweredStage) -> BucketSizes:
    """The sizes at which buckets of a stage's gradients are full."""
    return BucketSizes(step=sum(summed_bytes(p, stage.mesh) for p in stage.parameters.values() if p.contributions))


@once
def sent_in_place(stage: LoweredStage) -> frozenset[str]:
    """The parameters of a stage whose gradients are reduced where they lie, in a message of their own."""
    buckets = _PlayedBuckets(stage)
    added: Counter[str] = Counter()
    for function in (stage.backward, stage.weights):
        for line in function.lines if function is not None else ():
            if isinstance(line, AddGradient):
                p = stage.parameters[line.parameter]
                added[p.name] += 1
                if added[p.name] == p.contributions:
                    is_sum = p.contributions * stage.microbatches > 1  # which the store made, and nobody else holds
                    buckets.add(p.name, _unreduced(p, stage.mesh), line.owned or is_sum, rows(p.reduce))
    return frozenset(buckets.in_place)


class _PlayedBuckets(Buckets):
    """The runtime's buckets over tensors without data. in_place: values whose first message is their own memory."""

    def __init__(self, stage: LoweredStage) -> None:
        parameters = stage.parameters.values()
        super().__init__(
            MetaComm(stage.mesh.sizes),
            lambda name, value, owned: None,
            {p.name for p in parameters if p.tier},
            bucket_sizes(stage),
            {p.name: CODECS[p.compression] for p in parameters if p.compression},
        )
        self.in_place: set[str] = set()
        self._launched: set[str] = set()

    def _launch(self, kind: str, axes: Any, items: list[Any], packed: bool) -> None:
        names = {item.name for item in items} - self._launched
        self._launched |= names
        self.in_place |= set() if packed else names
        super()._launch(kind, axes, items, packed)


def _unreduced(p: StoredParameter, mesh: Mesh) -> Tensor:
    """A parameter's gradient on a rank before its reduction, without data."""
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
    return torch.empty(shape, dtype=p.type.dtype, device="meta")
