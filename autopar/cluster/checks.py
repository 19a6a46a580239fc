"""Checks of a machine's figures, wherever a device, a link, a tier or a cluster is made, by a file or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from autopar.errors import ClusterError
from autopar.runtime.data.schema import (
    MOST_NUMBER,
    MOST_RANKS,
    Schema,
    SchemaError,
    integer,
    number,
    positive,
    record,
    text,
)

T = TypeVar("T")
MOST_SECONDS = 1e9
SECONDS = number(0, MOST_SECONDS)
SHARE = positive(1)
RANKS = integer(1, MOST_RANKS)
OVERSUBSCRIPTION = number(1, 1e9)
RATE = positive(MOST_NUMBER)


def checked(schema: Schema[T], value: object, what: str, path: str = "") -> T:
    """The value as the schema reads it. Raises ClusterError, which names `what` is checked."""
    try:
        return schema(value, path)
    except SchemaError as error:
        raise ClusterError(f"{what}: {error}" if what else str(error)) from error


def check_fields(schemas: Mapping[str, Schema[object]], value: object, what: str) -> None:
    """Raises ClusterError where a field of a dataclass is not as its schema says."""
    checked(record(schemas), {field: getattr(value, field) for field in schemas}, what)


def name_text(name: object, kind: str) -> str:
    """The name of a device, a link level or a cluster. Raises ClusterError."""
    return checked(text(), name, kind, "name")
