"""The files of a checkpoint that is written again and again: torch.distributed.checkpoint's own, made from what stays the same.

torch's planner says once who writes which part of which tensor (`plan_files`). What torch.save writes for a tensor depends on
shape and dtype alone, but for the numbers in it; so a file is known before a step, but for its numbers:

    __0_0.distcp    before | numbers | after    before | numbers | after    ...    texts

and to save a step is to write its numbers between bytes that are kept: no tensor is pickled, none is described again. What is no
tensor (parameter groups, schedulers) may have another length at every step, so it comes last, and `.metadata`, which says
where everything lies, is made of both. The CRC-32 that torch.save puts behind numbers stays zero, as nothing of torch reads it
(`torch.serialization.set_crc32_options`); run_directory.py has the SHA-256 of every file.
"""

from __future__ import annotations

import io
import json
import os
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ..data.whole_files import COMPLETE
from ..errors import CheckpointError
from ..step.run_tensor import RunTensor
from .save_plans import places_rows, plan_text, read_places, read_plan

_LOCAL_HEADER = struct.Struct("<26xHH")
"""The lengths of the name and of the extra field of an entry of a zip file, which follow its header."""


@dataclass(frozen=True)
class Block:
    """A tensor in a file: what torch.save writes before and after its `nbytes` of numbers. start: where these begin among the
    rank's, which has several boxes of a run."""

    index: MetadataIndex
    before: bytes
    nbytes: int
    after: bytes
    start: int | None = None

    @property
    def length(self) -> int:
        return len(self.before) + self.nbytes + len(self.after)


@dataclass(frozen=True)
class RankFile:
    """The part of a checkpoint that one rank writes at every step: tensors, then values that are none."""

    name: str
    blocks: tuple[Block, ...]
    texts: tuple[MetadataIndex, ...]

    @property
    def tensors(self) -> list[str]:
        """Names of those whose numbers `write` takes."""
        return [block.index.fqn for block in self.blocks]

    def places(self) -> list[WriteResult]:
        """Where the tensors lie."""
        lengths = [(block.index, block.length) for block in self.blocks]
        return _places(self.name, 0, lengths)

    def write(self, folder: Path, numbers: Mapping[str, memoryview], values: Mapping[str, Any]) -> list[WriteResult]:
        """Make the file of a step durable; where the values that are no tensors lie in it. numbers: bytes of tensors by name;
        values: those that are none. Raises OSError, and CheckpointError where numbers are not as many as were planned."""
        pieces: list[bytes | memoryview] = []
        for block in self.blocks:
            own = numbers[block.index.fqn]
            if block.start is not None:
                own = own[block.start : block.start + block.nbytes]
            if own.nbytes != block.nbytes:
                raise CheckpointError(
                    f"{block.index.fqn}: {own.nbytes} bytes on this rank, {block.nbytes} were planned"
                )
            pieces += (block.before, own, block.after)
        texts = [_saved(values[index.fqn]) for index in self.texts]
        with (folder / self.name).open("wb") as file:
            file.writelines(pieces)
            start = file.tell()
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        lengths = [(index, len(text)) for index, text in zip(self.texts, texts, strict=True)]
        return _places(self.name, start, lengths)


@dataclass(frozen=True)
class Files:
    """A rank's file, and on rank 0 what is known of all files: what `.metadata` says, and where tensors lie."""

    own: RankFile
    metadata: Metadata | None
    tensors: list[WriteResult]

    def write_metadata(self, folder: Path, texts: Iterable[list[WriteResult]]) -> Path:
        """Rank 0, when all files are there; texts: where each rank's `write` put them. Raises OSError."""
        assert self.metadata is not None
        RecordedWriter(folder).finish(self.metadata, [self.tensors, *texts])
        return folder / ".metadata"


def plan_files(state: Mapping[str, Any], rank: int, tell: Callable[[str], list[str]]) -> Files:
    """Who writes what of a state of such tensors and values; all ranks call it together, and nothing is written. tell: tells all
    ranks a text, and gives everyone's. Raises CheckpointError, and what torch's planner does."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=rank == 0)
    plans = [read_plan(told) for told in tell(plan_text(planner.create_local_plan()))]
    everyone, metadata = planner.create_global_plan(plans)  # the same on every rank
    items = everyone[rank].items
    blocks = tuple(
        _block(item.index, item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype, state[item.index.fqn])
        for item in items
        if item.tensor_data is not None
    )
    texts = tuple(item.index for item in items if item.type == WriteItemType.BYTE_IO)
    own = RankFile(f"__{rank}_0.distcp", blocks, texts)
    told = tell(json.dumps(places_rows(own.places())))
    places = [place for one in told for place in read_places(one)] if rank == 0 else []
    return Files(own, metadata if rank == 0 else None, places)


class RecordedWriter(dcp.FileSystemWriter):
    """torch's writer of files, of which a record is written beside them: `.metadata` says so, and a reader asks for it."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id, modules=[COMPLETE])


def _places(file: str, start: int, lengths: Iterable[tuple[MetadataIndex, int]]) -> list[WriteResult]:
    """Values that lie one after the other in a file."""
    places = []
    for index, length in lengths:
        places.append(WriteResult(index, length, _StorageInfo(file, start, length)))
        start += length
    return places


def _block(index: MetadataIndex, sizes: torch.Size, dtype: torch.dtype, value: Any) -> Block:
    """torch.save's bytes around the numbers of a contiguous tensor, or of a part of `value`. Raises CheckpointError where they
    are not as known."""
    tensor, buffer = torch.empty(sizes, dtype=dtype), io.BytesIO()
    with warnings.catch_warnings(), torch.serialization.skip_data():
        warnings.simplefilter("ignore")
        torch.save(tensor, buffer)
    data = buffer.getbuffer()
    with zipfile.ZipFile(buffer) as archive:
        (entry,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
    if entry.file_size != tensor.nbytes or entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{index.fqn}: torch {torch.__version__} does not write tensors as versions before it do")
    header = entry.header_offset
    start = header + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack_from(data, header))
    first = value.starts[tuple(index.offset or ())] * dtype.itemsize if isinstance(value, RunTensor) else None
    return Block(index, bytes(data[:start]), tensor.nbytes, bytes(data[start + tensor.nbytes :]), first)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
