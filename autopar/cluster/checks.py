"""Bounds of a machine's figures, wherever a device, a link, a tier or a cluster is made, by a file or by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

from autopar.errors import ClusterError
from autopar.runtime.data.fields import form_of, settle
from autopar.runtime.data.schema import MOST_RANKS, Schema, SchemaError, integer, number, positive, record

T = TypeVar("T")
MOST_SECONDS = 1e9
SECONDS, SHARE, RANKS, OVERSUBSCRIPTION, RATE = (
    number(0, MOST_SECONDS),
    positive(1),
    integer(1, MOST_RANKS),
    number(1, 1e9),
    positive(),
)
Seconds = Annotated[float, SECONDS]
Share = Annotated[float, SHARE]
Ranks = Annotated[int, RANKS]
Oversubscription = Annotated[float, OVERSUBSCRIPTION]
Rate = Annotated[float, RATE]


def checked(schema: Schema[T], value: object, what: str, path: str = "") -> T:
    """The value as the schema reads it. Raises ClusterError, which names `what` is checked."""
    try:
        return schema(value, path)
    except SchemaError as error:
        raise ClusterError(f"{what}: {error}" if what else str(error)) from error


def check_fields(value: Any, what: str) -> None:
    """Give a new dataclass its fields as a file's reader would. Raises ClusterError where one is not as its hint allows."""
    name = getattr(value, "name", None)
    shown = f"{what} {name}" if isinstance(name, str) and name.isprintable() else what
    checked(lambda one, path: settle(one, path), value, shown)


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A function's arguments as their hints read them. Raises ClusterError."""
    hints = get_type_hints(function, include_extras=True)
    return checked(record({name: form_of(hints[name]).read for name in given}), dict(given), what)
