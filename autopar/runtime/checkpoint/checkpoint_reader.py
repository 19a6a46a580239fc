"""torch's reader of checkpoints, made to read data only, of files that are what was written, within bounds.

Metadata and values are read as data (checkpoint_metadata.py, tensor_files.py). Where a record lies beside the files, as autopar
writes it, every file is held against it before anything is loaded: each rank takes a part of them, and all ranks agree. Files
that torch alone wrote have no record; theirs are the CRC-32 sums of the values that are read.

The reader runs in torch's own loading, over processes or alone. What goes wrong there comes out as CheckpointError.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ..comm.comm import Comm
from ..comm.text_exchange import one_line
from ..data.datafile import read_bytes
from ..data.schema import SchemaError, paragraph, row, text
from ..data.tensor_files import MOST_AROUND, MOST_VALUE, read_tensor, read_value
from ..data.whole_files import COMPLETE, current, problem_of, read_record, share_of
from ..errors import CheckpointError
from .checkpoint_metadata import read_metadata
from .run_directory import newest_step_said

METADATA = ".metadata"
MOST_METADATA = 1 << 28
"""Bytes of it; reading it takes up to thirty times as many."""


class DataReader(FileSystemReader):
    """Reads the metadata once. Raises CheckpointError where the directory holds no checkpoint, or a damaged one. files: bytes and
    SHA-256 of the files; None where whoever wrote them left no record."""

    def __init__(self, directory: str | Path) -> None:
        self.folder = current(Path(directory))
        super().__init__(str(self.folder))
        self.files: Mapping[str, Mapping[str, Any]] | None = None
        try:
            data = read_bytes(self.folder / METADATA, MOST_METADATA)
            if (self.folder / COMPLETE).exists():
                self.files = read_record(self.folder)["files"]
                if problem := problem_of(self.folder, self.files, [METADATA] if METADATA in self.files else []):
                    raise CheckpointError(f"{directory}: the checkpoint is damaged: {problem}; take another one")
            self.metadata = read_metadata(data)
            stored = {place.relative_path for place in self.metadata.storage_data.values()}
            recorded = COMPLETE in getattr(self.metadata.storage_meta, "modules", [])
            if not {METADATA, *stored} <= (self.files or {}).keys() and (recorded or self.files is not None):
                raise SchemaError(f"{COMPLETE}, which says what its files are, is missing or of other files")
        except OSError as error:
            newest = newest_step_said(self.folder)
            raise CheckpointError(f"{directory} is no checkpoint directory{newest or f': {error}'}") from error
        except SchemaError as error:
            raise CheckpointError(f"{directory}: the checkpoint is damaged: {error}; take another one") from error

        self._chunks = {
            (name, chunk.offsets): (item.properties.dtype, chunk.sizes)
            for name, item in self.metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
            for chunk in item.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def check(self, rank: int = 0, ranks: int = 1) -> str:
        """A text of what is wrong with the part of the files that one of some ranks checks; empty where nothing is."""
        files = self.files or {}
        return problem_of(self.folder, files, share_of(files, rank, ranks))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every value that the plan names, each block of a file once. Raises OSError, SchemaError."""

        def place(item: ReadItem) -> tuple[str, int]:
            info = self._info(item.storage_index)
            return info.relative_path, info.offset

        held: tuple[MetadataIndex | None, torch.Tensor] = None, torch.empty(0)
        for item in sorted(plan.items, key=place):
            index = item.storage_index
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._block(index, 0, MOST_VALUE)))
                continue
            if held[0] != index:
                held = None, torch.empty(0)  # the last block's memory is free before the next is read
                held = index, self._tensor(index)
            part = held[1][tuple(map(_slice, item.storage_offsets, item.lengths))]
            target = planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise SchemaError(f"{index.fqn}: a part of {list(part.size())} for one of {list(target.size())}")
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check_room(self, name: str) -> None:
        """Raises SchemaError where the files do not hold as many bytes as a value of this name is to take; OSError."""
        item = self.metadata.state_dict_metadata[name]
        for chunk in item.chunks if isinstance(item, TensorStorageMetadata) else ():
            index = MetadataIndex(name, chunk.offsets)
            self._place(index, *self._expected(index)[2:])

    def _tensor(self, index: MetadataIndex) -> torch.Tensor:
        dtype, sizes, least, most = self._expected(index)
        try:
            return read_tensor(self._block(index, least, most), dtype, sizes, crc=self.files is None)
        except SchemaError as error:
            raise SchemaError(f"{index.fqn} in {self._info(index).relative_path}: {error}") from None

    def _expected(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size, int, int]:
        """dtype and shape of a chunk, and how many bytes it takes in a file, at least and at most. Raises SchemaError."""
        if index.offset is None or (index.fqn, index.offset) not in self._chunks:
            raise SchemaError(f"{index.fqn} is stored as what it is not described as")
        dtype, sizes = self._chunks[index.fqn, index.offset]
        nbytes = math.prod(sizes) * dtype.itemsize
        return dtype, sizes, nbytes, nbytes + MOST_AROUND

    def _info(self, index: MetadataIndex) -> _StorageInfo:
        info: _StorageInfo = self.metadata.storage_data[index]
        return info

    def _place(self, index: MetadataIndex, least: int, most: int) -> tuple[Path, _StorageInfo]:
        """Where a value lies. Raises OSError, and SchemaError where it is not of a size that it may have."""
        info = self._info(index)
        path = self.folder / info.relative_path
        nbytes = path.stat().st_size
        if not least <= info.length <= most:
            raise SchemaError(f"{index.fqn} is said to take {info.length} bytes; it takes {least} to {most}")
        if info.offset + info.length > nbytes:
            raise SchemaError(
                f"{path} has {nbytes} bytes, and {index.fqn} is said to end at {info.offset + info.length}"
            )
        return path, info

    def _block(self, index: MetadataIndex, least: int, most: int) -> bytearray:
        """The bytes of a value, as many as it may have. Raises OSError, SchemaError."""
        path, info = self._place(index, least, most)
        block = bytearray(info.length)
        with path.open("rb", buffering=0) as file, memoryview(block) as room:
            file.seek(info.offset)
            filled = 0
            while filled < info.length:
                count = file.readinto(room[filled:])
                if not count:
                    raise SchemaError(f"{path} ends inside {index.fqn}; was it changed while it was read?")
                filled += count
        return block


class DataPlanner(DefaultLoadPlanner):
    """Takes values that are no tensors as plain data: text and numbers. The state that is loaded is flat."""

    def __init__(self, *, crc: bool = True) -> None:
        super().__init__()
        self.crc = crc

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.original_state_dict[name] = read_value(bytearray(value.getbuffer()), crc=self.crc)
        except SchemaError as error:
            raise SchemaError(f"{name}: {error}") from None


def verified(directory: str | Path, comm: Comm | None = None, *, checked: bool = False) -> DataReader:
    """A reader of a checkpoint whose files are what was written. comm: of the ranks that call it together, each of which checks a
    part; alone without. checked: the files were held against their record a moment ago. Raises CheckpointError, on all."""
    reader, problem = None, ""
    try:
        with comm.excused(f"checking {directory}") if comm is not None else contextlib.nullcontext():
            reader = DataReader(directory)
            if not checked:
                problem = reader.check(comm.rank, comm.world_size) if comm is not None else reader.check()
                problem = problem and f"{directory}: the checkpoint is damaged: {problem}; take another one"
    except CheckpointError as error:
        problem = str(error)
    own = "" if reader is None or reader.files is None else str(reader.files[METADATA]["sha256"])
    everyone: list[Any] = [(problem, own)]
    if comm is not None:
        everyone = comm.share((one_line(problem), own), row(paragraph(), text(64)))
    problem = problem or next((said for said, _ in everyone if said), "")
    if not problem and any(sha256 != own for _, sha256 in everyone):
        problem = (
            f"{directory}: ranks find different checkpoints there; give a directory that is the same on all machines"
        )
    if problem or reader is None:
        raise CheckpointError(problem)
    return reader


def _slice(offset: int, length: int) -> slice:
    return slice(offset, offset + length)


@contextlib.contextmanager
def named(directory: str | Path, problem: str = "is damaged", instead: str = "take another one") -> Iterator[None]:
    """Inside, what torch raises about the files of a checkpoint is a CheckpointError, as is what this reader raises."""
    try:
        yield
    except CheckpointException as error:
        causes = [failure for failure, _ in error.failures.values()] or [error]
        said = next((text for text in (str(cause).strip() for cause in causes) if text), type(causes[0]).__name__)
        raise CheckpointError(
            f"{directory}: the checkpoint {problem} ({type(causes[0]).__name__}: {said.splitlines()[0][:300]}); {instead}"
        ) from error
    except (OSError, SchemaError) as error:
        raise CheckpointError(f"{directory}: the checkpoint {problem} ({error}); {instead}") from error
