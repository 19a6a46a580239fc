"""The metadata of a checkpoint as data: torch pickles it, and unpickling as such runs whatever the file says.

Here no class that the file names is ever called (pickles.py). The metadata that torch wants is made anew from what the file
gives once that is checked: kinds, shapes, that the chunks of a tensor fill it, and that files are those of the directory.
"""

from __future__ import annotations

import itertools
import math
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

from ..data import pickles
from ..data.datafile import path_inside
from ..data.pickles import Made, Name
from ..data.schema import MOST_SIZE, MOST_TEXT, SchemaError, integer, listed, must_be, optional, table, where
from ..data.tensor_files import DTYPES

_KINDS = "torch.distributed.checkpoint.metadata."
_NAMES = frozenset(
    {
        *DTYPES,
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
_SIZES = listed(integer(0, MOST_SIZE), most=64)
_NAME = where(lambda name: isinstance(name, str) and len(name) <= MOST_TEXT, f"text of at most {MOST_TEXT} characters")


def read_metadata(data: bytes) -> Metadata:
    """The metadata in the bytes of a `.metadata`. Raises SchemaError for whatever is wrong in it."""
    return _metadata(pickles.read(data, _NAMES))


# --- from what was read to what torch wants --------------------------------------------------------------------------


def _fields(value: Any, name: str, path: str) -> dict[str, Any]:
    """The fields of an object of this kind."""
    if not isinstance(value, Made) or value.name != name:
        raise must_be(path, name.rpartition(".")[2], value)
    if value.state is None:
        return {}
    if not isinstance(value.state, dict):
        raise must_be(path, f"{name.rpartition('.')[2]} with fields", value.state)
    return value.state


def _size(value: Any, path: str) -> torch.Size:
    if isinstance(value, Made) and value.name == "torch.Size" and len(value.args) <= 1:
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
    return Metadata(values, planner_data=None, storage_data=places, storage_meta=_storage(fields.get("storage_meta")))


def _storage(value: Any) -> StorageMeta:
    """The metadata of a checkpoint's storage: the record of the files' hashes, where whoever wrote them says so."""
    fields = {} if value is None else _fields(value, _KINDS + "StorageMeta", "storage_meta")
    return StorageMeta(modules=listed(_NAME, most=64)(fields.get("modules") or [], "storage_meta.modules"))


def _value(value: Any, path: str) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Made) and value.name == _KINDS + "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value, _KINDS + "TensorStorageMetadata", path)
    properties = fields.get("properties")
    state: Any = ()
    if isinstance(properties, Made) and properties.name == _KINDS + "TensorProperties":
        state = properties.state if isinstance(properties.state, tuple) else ()
    dtype = DTYPES.get(state[0].name) if state and isinstance(state[0], Name) else None
    if dtype is None:
        raise must_be(f"{path}.properties", "TensorProperties with a dtype", properties)
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
