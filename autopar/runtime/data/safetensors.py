"""The safetensors format, as data: a header of JSON, then the tensors' bytes, row-major and little-endian.

    n (8 bytes) | {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …} (n bytes) | data

A header is believed only where its tensors fill the data without gap or overlap, each with as many bytes as dtype and
shape say. A part of a tensor is read run by run, and no byte beside it.

torch's reader of such directories (torch.distributed.checkpoint.HuggingFaceStorageReader) opens the files with the
package safetensors, which is not there where emitted programs run, and believes its headers.
"""

from __future__ import annotations

import itertools
import json
import math
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from .datafile import parse_json
from .schema import MOST_SIZE, SchemaError, choice, integer, listed, must_be, record, row, shown, table, text, where

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""In the order in which files hold them, from the last: wide ones first, so that all are aligned."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER = 1 << 25
"""Bytes of a header."""
MOST_VALUES = 1 << 19
"""Values and keys in a header; a tensor has about nine."""
_METADATA = "__metadata__"

_OFFSET = integer(0, MOST_SIZE)
_TENSOR = record(
    {"dtype": choice(tuple(DTYPES)), "shape": listed(_OFFSET, most=64), "data_offsets": row(_OFFSET, _OFFSET)}
)
_HEADER = table(text(), _TENSOR)
_NOTES = table(where(lambda key: isinstance(key, str), "text"), where(lambda said: isinstance(said, str), "text"))


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies. start: its first byte in the file."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def tensor_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


# --- reading -----------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, with their dtypes, shapes and places. Raises OSError, and SchemaError for whatever
    is wrong with it."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise SchemaError("this is no regular file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if status.st_size < 8 or length > min(MOST_HEADER, status.st_size - 8):
            raise SchemaError(
                f"its first 8 bytes say that a header of {length} bytes follows; the file has {status.st_size} bytes, and a "
                f"header at most {MOST_HEADER}"
            )
        header = file.read(length)
    try:
        rows = parse_json(header.decode(), MOST_VALUES)
    except UnicodeDecodeError as error:
        raise SchemaError(f"the header is no UTF-8 text ({error.reason} at byte {error.start})") from error
    if not isinstance(rows, dict):
        raise must_be("the header", "a mapping of names to tensors", rows)
    _NOTES(rows.pop(_METADATA, {}), _METADATA)
    tensors = _HEADER(rows, "")
    _check_offsets(tensors, status.st_size - 8 - length)
    return {
        name: StoredTensor(path, 8 + length + t["data_offsets"][0], DTYPES[t["dtype"]], tuple(t["shape"]))
        for name, t in tensors.items()
    }


def _check_offsets(tensors: Mapping[str, Mapping[str, Sequence[int]]], size: int) -> None:
    """Raises SchemaError unless the tensors fill `size` bytes one after another."""
    end = 0
    for name, one in sorted(tensors.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        first, last = one["data_offsets"]
        needed = tensor_bytes(DTYPES[str(one["dtype"])], one["shape"])
        if last - first != needed:
            raise SchemaError(
                f"{shown(name)}: bytes {first} to {last} are no {one['dtype']} of shape {list(one['shape'])}, which "
                f"takes {needed}"
            )
        if first != end:
            raise SchemaError(
                f"{shown(name)} starts at byte {first} of the data, where the tensors before it end at {end}"
            )
        end = last
    if end != size:
        raise SchemaError(f"the tensors take {end} bytes, and the file has {size} bytes of data")


def read_part(stored: StoredTensor, slices: Sequence[slice]) -> Tensor:
    """A part of a tensor in the file's dtype, as a tensor of its own. slices: one per dim, with start and stop.

    Raises OSError, and SchemaError where the file ends before it should.
    """
    if sys.byteorder != "little":
        raise SchemaError("the format is little-endian, and this machine is not")
    shape = [one.stop - one.start for one in slices]
    part = bytearray(tensor_bytes(stored.dtype, shape))
    if not part:
        return torch.empty(shape, dtype=stored.dtype)
    with stored.path.open("rb", buffering=0) as file, memoryview(part) as room:
        filled = 0
        for start, length in runs(stored, slices):
            file.seek(start)
            _fill(file, room[filled : filled + length])
            filled += length
    return torch.frombuffer(part, dtype=stored.dtype).reshape(shape)


def runs(stored: StoredTensor, slices: Sequence[slice]) -> Iterator[tuple[int, int]]:
    """(first byte in the file, number of bytes) of the runs that a part consists of, in its own order."""
    cut = [dim for dim, one in enumerate(slices) if (one.start, one.stop) != (0, stored.shape[dim])]
    inner = cut[-1] if cut else 0
    strides = [tensor_bytes(stored.dtype, stored.shape[dim + 1 :]) for dim in range(len(stored.shape))]
    if not strides:
        yield stored.start, stored.dtype.itemsize
        return
    length = (slices[inner].stop - slices[inner].start) * strides[inner]
    for place in itertools.product(*(range(one.start, one.stop) for one in slices[:inner])):
        outer = sum(index * stride for index, stride in zip(place, strides, strict=False))
        yield stored.start + outer + slices[inner].start * strides[inner], length


def _fill(file: FileIO, room: memoryview) -> None:
    while room:
        count = file.readinto(room)
        if not count:
            raise SchemaError("the file ends inside a tensor; was it changed while it was read?")
        room = room[count:]


# --- writing -----------------------------------------------------------------------------------------------------------


def file_order(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[str]:
    """The names of tensors (dtype, shape) in the order in which a file holds them."""
    places = {dtype: place for place, dtype in enumerate(DTYPES.values())}
    return sorted(tensors, key=lambda name: (-places[tensors[name][0]], name))


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The header of a file that holds these tensors, one after another."""
    rows: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        first, end = end, end + tensor_bytes(dtype, shape)
        rows[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [first, end]}
    content = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content
