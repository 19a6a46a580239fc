"""A format as a table of keys: each row says which fields of a `Layout` a key carries, how it is written and how it is read.

    Key("tensor_model_parallel_size", ("tp",), lambda layout: above(layout.tp, 1), lambda size: {"tp": size})

`write_keys` and `read_keys` go through the rows, so what a format carries follows from its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeGuard

from autopar.errors import InputError
from autopar.exchange.layout import Layout, NotCarried, StageUnits
from autopar.runtime.data.schema import shown


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Key:
    """One key of a format. name: dotted where it stands in a section. carries: fields of `Layout`. write: its value for a layout,
    None where it is left out. read: the fields that a value says, None for one that the format does not know."""

    name: str
    carries: tuple[str, ...]
    write: Callable[[Layout], Any]
    read: Callable[[Any], Mapping[str, Any] | None] = _nothing


def degree(name: str, of: str) -> Key:
    """A whole number that is left out where it is 1."""
    return Key(
        name, (of,), lambda layout: above(getattr(layout, of), 1), lambda size: {of: size} if is_whole(size) else None
    )


def flag(name: str, of: str) -> Key:
    """A switch that is left out where it is off."""
    return Key(
        name, (of,), lambda layout: getattr(layout, of) or None, lambda on: {of: on} if isinstance(on, bool) else None
    )


def choice(name: str, of: str, names: Mapping[str, Any]) -> Key:
    """One of several names, by value of the layout; values without one are left out."""
    back = {value: key for key, value in names.items()}

    def read(value: Any) -> Mapping[str, Any] | None:
        known = isinstance(value, str | int | bool) and value in back
        return {of: back[value]} if known else None

    return Key(name, (of,), lambda layout: names.get(getattr(layout, of)), read)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number, and no truth."""
    return isinstance(value, int) and not isinstance(value, bool)


def above(size: int | None, least: int) -> int | None:
    """The size where it is said and above `least`."""
    return size if size is not None and size > least else None


@dataclass(frozen=True)
class Facts:
    """Facts that a format may say beside the layout. sequence: tokens of a sequence; blocks: paths of modules to wrap;
    block_classes: their classes; model: its class; per_node: devices of a machine; ranks: in all."""

    sequence: int | None = None
    blocks: tuple[str, ...] = ()
    block_classes: tuple[str, ...] = ()
    model: str = "the model"
    per_node: int = 8
    ranks: int | None = None


@dataclass(frozen=True)
class Written:
    """The outcome of an export. files: text by name; carried: the layout that they say."""

    files: Mapping[str, str]
    carried: Layout
    not_carried: tuple[NotCarried, ...] = ()


@dataclass(frozen=True)
class Read:
    """The content of a file. unknown: keys that mean nothing here, with their values as text."""

    layout: Layout
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A format: its name, the version of the system whose keys it has, how it is written and read."""

    name: str
    version: str
    write: Callable[[Layout, Facts], Written]
    read: Callable[[str], Read]


def carried_by(keys: Sequence[Key]) -> frozenset[str]:
    """The fields that any of the keys carries."""
    return frozenset(name for key in keys for name in key.carries)


def write_keys(keys: Sequence[Key], layout: Layout) -> dict[str, Any]:
    """Values by key, in the order of the table."""
    values = {key.name: key.write(layout) for key in keys}
    return {name: value for name, value in values.items() if value is not None}


def read_keys(keys: Sequence[Key], values: Mapping[str, Any]) -> Read:
    """The layout that values by key say. Raises InputError for a value that its key does not allow."""
    by_name = {key.name: key for key in keys}
    said: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for name, value in values.items():
        key = by_name.get(name)
        if key is None:
            unknown[name] = shown(value)
            continue
        read = key.read(value)
        if read is None:
            raise InputError(f"{name}: {shown(value)} is no value that is known here")
        said |= read
    return Read(replace(Layout(), **said), unknown)


def lost(layout: Layout, carried: Layout, system: str) -> tuple[NotCarried, ...]:
    """The fields that a layout says otherwise than what is left of it, in words; of dp and of single modules formats speak
    themselves."""
    return tuple(
        NotCarried(
            f"{f.name} = {_words(said)}", f"{system} has no key for it; left at {_words(getattr(carried, f.name))}"
        )
        for f in fields(layout)
        if f.name not in ("dp", "modules") and (said := getattr(layout, f.name)) not in (None, getattr(carried, f.name))
    )


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        layers = [one.layers for one in value if isinstance(one, StageUnits)]
        return f"{layers} layers" if layers else f"{len(value)} rows" if value else "none of its own"
    return repr(value) if value != "" else "none"


def flattened(sections: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Values of nested sections by dotted key."""
    found: dict[str, Any] = {}
    for name, value in sections.items():
        inside = isinstance(value, Mapping) and value
        found |= flattened(value, f"{path}{name}.") if inside else {f"{path}{name}": value}
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `flattened`."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        place = sections
        for one in path:
            place = place.setdefault(one, {})
        place[last] = value
    return sections
