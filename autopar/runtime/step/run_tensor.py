"""A tensor of which a rank holds runs of elements, or a block unlike others in size, as torch.distributed.checkpoint writes and
reads it: box by box.

DTensor knows equal blocks alone. What a rank holds of a run is a few boxes of the tensor (`runtime/comm/mesh.py`), which torch's
planner asks for by three methods, so a checkpoint does not say in what runs it was written, and loads under any other plan.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..comm.mesh import boxes_of
from ..program.layout import StateEntry, full_of_holders


class RunTensor(Tensor):
    """entry: the run and where it lies. starts: of each of its boxes, by where that lies in the tensor, the first element in the
    run."""

    entry: StateEntry
    starts: dict[tuple[int, ...], int]
    _chunks: list[ChunkStorageMetadata]

    @staticmethod
    def __new__(cls, entry: StateEntry) -> RunTensor:
        one: RunTensor = Tensor._make_wrapper_subclass(
            cls, entry.shape, dtype=entry.value.dtype, device=entry.value.device
        )
        boxes = boxes_of(entry.shape, entry.spec, entry.comm.mesh, entry.comm.position)
        one._chunks = [
            ChunkStorageMetadata(torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box)) for box in boxes
        ]
        ends = accumulate((math.prod(chunk.sizes) for chunk in one._chunks), initial=0)
        one.starts = {tuple(chunk.offsets): start for chunk, start in zip(one._chunks, ends, strict=False)}
        one.entry = entry
        return one

    def __init__(self, entry: StateEntry) -> None:
        """Torch makes it in `__new__`."""

    def to_local(self) -> Tensor:
        """This rank's run."""
        value: Tensor = self.entry.value
        return value

    def full_tensor(self) -> Tensor:
        """The whole tensor, of which all ranks of the stage that have a part of it ask together."""
        return full_of_holders(self.entry)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.entry.value)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.entry.shape)),
            )
            for chunk in self._chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        start = self.starts[tuple(index.offset)]
        sizes = next(chunk.sizes for chunk in self._chunks if chunk.offsets == index.offset)
        return self.to_local().view(-1)[start : start + math.prod(sizes)].view(sizes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says it is a method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a run of elements; take its to_local() or full_tensor()")
