"""Messages of a rank to the others about the files of a checkpoint, as data: what it would write, and where that lies.

torch's planner makes both as objects, which it would pickle to send. What is read here is checked field by field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ..comm.text_exchange import one_line
from ..data.datafile import parse_json, path_inside
from ..data.fields import Form, form_of
from ..data.schema import (
    MOST_SIZE,
    Schema,
    SchemaError,
    choice,
    either,
    flag,
    integer,
    listed,
    optional,
    paragraph,
    record,
    row,
    table,
    text,
)
from ..data.whole_files import FILES
from ..errors import CheckpointError

_SIZE = integer(0, MOST_SIZE)
_SIZES = listed(_SIZE, most=64)
_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_KINDS = {kind.name: kind for kind in WriteItemType}
_INDEX = row(text(), optional(_SIZES), optional(integer()))
_TENSOR = record(
    {
        "offsets": _SIZES,
        "sizes": _SIZES,
        "size": _SIZES,
        "dtype": choice(tuple(_DTYPES)),
        "requires_grad": flag(),
        "pinned": flag(),
    }
)
_ITEM = record({"index": _INDEX, "kind": choice(tuple(_KINDS)), "tensor": optional(_TENSOR)})
_STEP = either((str, text()), (int, integer()), what="a name or a number")
_PLAN = record({"items": listed(_ITEM), "paths": table(text(), listed(_STEP, most=64))})
_PLACE = row(_INDEX, _SIZE, path_inside, _SIZE, _SIZE)


def plan_text(plan: SavePlan) -> str:
    """The plan of what a rank would write of its state, as JSON."""
    items = [{"index": _index_row(i.index), "kind": i.type.name, "tensor": _tensor(i.tensor_data)} for i in plan.items]
    return json.dumps({"items": items, "paths": plan.planner_data or {}})


def read_plan(told: str) -> SavePlan:
    """The inverse of `plan_text`. Raises CheckpointError."""
    data = _read(told, _PLAN, "what it would write")
    items = [
        WriteItem(_index(one["index"]), _KINDS[one["kind"]], tensor_data=_tensor_data(one["tensor"]))
        for one in data["items"]
    ]
    return SavePlan(items, planner_data={name: tuple(path) for name, path in data["paths"].items()})


def places_rows(places: Iterable[WriteResult]) -> list[Any]:
    """Where values lie, as plain data."""
    return [
        [
            _index_row(one.index),
            one.size_in_bytes,
            one.storage_data.relative_path,
            one.storage_data.offset,
            one.storage_data.length,
        ]
        for one in places
    ]


def _places(value: object, path: str) -> list[WriteResult]:
    return [
        WriteResult(_index(index), size, _StorageInfo(file, offset, length))
        for index, size, file, offset, length in listed(_PLACE)(value, path)
    ]


PLACES = Form(_places, places_rows)
"""Where values lie, in a file and in messages."""


def read_places(told: str) -> list[WriteResult]:
    """The places that a rank told as JSON. Raises CheckpointError."""
    return _read(told, PLACES.read, "where its tensors lie")


@dataclass(frozen=True)
class Written:
    """The message of a rank about the file that it wrote. files: bytes and SHA-256 by name; texts: where values that
    are no tensors lie; problem: why nothing was written."""

    files: Annotated[dict[str, dict[str, Any]], Form(FILES)]
    texts: Annotated[list[WriteResult], PLACES]
    problem: Annotated[str, Form(paragraph(), one_line)] = ""


def read_written(told: str) -> Written:
    """The message of a rank about its file, read from JSON. Raises CheckpointError."""
    return _read(told, form_of(Written).read, "what it wrote")


def _read(told: str, schema: Schema[Any], what: str) -> Any:
    try:
        return schema(parse_json(told), "")
    except SchemaError as error:
        raise CheckpointError(
            f"a rank tells {what} in other words than this one ({error}); do all ranks run the same versions?"
        ) from error


def _index_row(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _index(told: tuple[Any, ...]) -> MetadataIndex:
    return MetadataIndex(*told)


def _tensor(data: TensorWriteData | None) -> dict[str, Any] | None:
    if data is None:
        return None
    properties = data.properties
    return {
        "offsets": list(data.chunk.offsets),
        "sizes": list(data.chunk.sizes),
        "size": list(data.size),
        "dtype": str(properties.dtype).removeprefix("torch."),
        "requires_grad": properties.requires_grad,
        "pinned": properties.pin_memory,
    }


def _tensor_data(told: dict[str, Any] | None) -> TensorWriteData | None:
    if told is None:
        return None
    chunk = ChunkStorageMetadata(torch.Size(told["offsets"]), torch.Size(told["sizes"]))
    properties = TensorProperties(
        _DTYPES[told["dtype"]], requires_grad=told["requires_grad"], pin_memory=told["pinned"]
    )
    return TensorWriteData(chunk, properties, torch.Size(told["size"]))
