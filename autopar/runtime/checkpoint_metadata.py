"""The metadata of a checkpoint as data: torch pickles it, and unpickling as such runs whatever the file says.

Here no class that the file names is ever called. Names on a short list become stand-ins that only hold what the file
gives them, any other name is refused, and the metadata that torch wants is made anew from what the stand-ins hold once
it is checked: kinds, shapes, that the chunks of a tensor fill it, and that files are those of the directory.

Python's own unpickler is used, not the one in C: a few bytes make that one ask for all memory.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .datafile import path_inside, read_bytes
from .schema import MOST_SIZE, MOST_TEXT, SchemaError, integer, listed, must_be, optional, table, where

_KINDS = "torch.distributed.checkpoint.metadata."
_NAMES = frozenset(
    {
        *(
            _KINDS + name
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "torch.Size",
        "collections.OrderedDict",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib.WindowsPath",
    }
)
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_SIZES = listed(integer(0, MOST_SIZE), most=64)
_NAME = where(lambda name: isinstance(name, str) and len(name) <= MOST_TEXT, f"text of at most {MOST_TEXT} characters")


class _StandIn:
    """What the file calls an instance of `name`: nothing but the arguments and the state that it gives."""

    name = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> _StandIn:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Makes stand-ins. The classes are this unpickler's own, so that a file can change none that others use."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.classes: dict[str, type[_StandIn]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in DTYPES:
            return DTYPES[full]
        if full not in _NAMES:
            raise SchemaError(f"it names {full}, which is nothing that metadata of a checkpoint is made of")
        return self.classes.setdefault(full, type("StandIn", (_StandIn,), {"name": full}))


def read_metadata(directory: Path) -> Metadata:
    """The metadata of a checkpoint directory. Raises OSError, and SchemaError for whatever is wrong in it."""
    data = read_bytes(directory / ".metadata")
    try:
        loaded = _Unpickler(data).load()
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(f"it is damaged ({type(error).__name__}: {error})") from error
    return _metadata(loaded)


# --- from stand-ins to what torch wants ------------------------------------------------------------------------------------


def _fields(value: Any, name: str, path: str) -> dict[str, Any]:
    """What a stand-in of this kind holds."""
    if not isinstance(value, _StandIn) or value.name != name:
        raise must_be(path, name.rpartition(".")[2], value)
    if value.state is None:
        return {}
    if not isinstance(value.state, dict):
        raise must_be(path, f"{name.rpartition('.')[2]} with fields", value.state)
    return value.state


def _size(value: Any, path: str) -> torch.Size:
    if isinstance(value, _StandIn) and value.name == "torch.Size" and len(value.args) <= 1:
        value = value.args[0] if value.args else ()
    return torch.Size(_SIZES(value, path))


def _metadata(loaded: Any) -> Metadata:
    fields = _fields(loaded, _KINDS + "Metadata", "metadata")
    values = table(_NAME, _value)(fields.get("state_dict_metadata"), "state_dict_metadata")
    stored = fields.get("storage_data")
    if not isinstance(stored, dict):
        raise must_be("storage_data", "a mapping", stored)
    places = {_index(index): _place(place) for index, place in stored.items()}
    _check_places(list(places.values()))
    for name, value in values.items():
        chunks = value.chunks if isinstance(value, TensorStorageMetadata) else None
        offsets = [None] if chunks is None else [chunk.offsets for chunk in chunks]
        if any(MetadataIndex(name, offset) not in places for offset in offsets):
            raise SchemaError(f"{name} is described, but where it is stored is not")
    return Metadata(values, planner_data=None, storage_data=places, storage_meta=StorageMeta())


def _value(value: Any, path: str) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, _StandIn) and value.name == _KINDS + "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, _KINDS + "TensorStorageMetadata", path)
    properties = fields.get("properties")
    state: Any = ()
    if isinstance(properties, _StandIn) and properties.name == _KINDS + "TensorProperties":
        state = properties.state if isinstance(properties.state, tuple) else ()
    dtype = state[0] if state else None
    if not isinstance(dtype, torch.dtype):
        raise must_be(f"{path}.properties", "TensorProperties with a dtype", dtype)
    size = _size(fields.get("size"), f"{path}.size")
    chunks = listed(_chunk)(fields.get("chunks"), f"{path}.chunks")
    _check_chunks(chunks, size, path)
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _chunk(value: Any, path: str) -> ChunkStorageMetadata:
    fields = _fields(value, _KINDS + "ChunkStorageMetadata", path)
    return ChunkStorageMetadata(
        _size(fields.get("offsets"), f"{path}.offsets"), _size(fields.get("sizes"), f"{path}.sizes")
    )


def _check_chunks(chunks: list[ChunkStorageMetadata], size: torch.Size, path: str) -> None:
    """Raises SchemaError where the chunks do not lie inside the tensor, or leave a part of it out: it would be read as
    whatever memory holds."""
    for chunk in chunks:
        ends = [a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=False)]
        ranks = {len(chunk.offsets), len(chunk.sizes), len(size)}
        if len(ranks) > 1 or any(end > n for end, n in zip(ends, size, strict=True)):
            raise SchemaError(
                f"{path}: a chunk at {list(chunk.offsets)} of {list(chunk.sizes)} lies outside {list(size)}"
            )
    elements = math.prod(size)
    if elements > MOST_SIZE:
        raise must_be(f"{path}.size", f"of at most {MOST_SIZE} elements", list(size))
    held = sum(math.prod(sizes) for _, sizes in {(tuple(c.offsets), tuple(c.sizes)) for c in chunks})
    if held != elements:
        raise SchemaError(f"{path}: its chunks hold {held} elements, the tensor of {list(size)} has {elements}")


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, _KINDS + "MetadataIndex", "storage_data")
    offset = fields.get("offset")
    return MetadataIndex(
        _NAME(fields.get("fqn"), "storage_data"),
        None if offset is None else _size(offset, "storage_data.offset"),
        optional(integer(0, MOST_SIZE))(fields.get("index"), "storage_data.index"),
    )


def _place(value: Any) -> _StorageInfo:
    fields = _fields(value, "torch.distributed.checkpoint.filesystem._StorageInfo", "storage_data")
    if fields.get("transform_descriptors"):
        raise must_be("storage_data.transform_descriptors", "empty", fields["transform_descriptors"])
    return _StorageInfo(
        path_inside(fields.get("relative_path"), "storage_data.relative_path"),
        integer(0, MOST_SIZE)(fields.get("offset"), "storage_data.offset"),
        integer(0, MOST_SIZE)(fields.get("length"), "storage_data.length"),
    )


def _check_places(places: list[_StorageInfo]) -> None:
    """Raises SchemaError where two values are said to lie in the same bytes."""
    ordered = sorted(places, key=lambda place: (place.relative_path, place.offset))
    for one, other in itertools.pairwise(ordered):
        if one.relative_path == other.relative_path and one.offset + one.length > other.offset:
            raise SchemaError(f"two values are stored at byte {other.offset} of {other.relative_path}")
