"""Data of files as the fields of dataclasses say it: what may stand there, how it is read and how it is written.

    @dataclass(frozen=True)
    class Link:
        name: str
        bandwidth_GBps: Annotated[float, positive()]
        latency_us: float = field(default=0.0, metadata=kept(sparse=True))

    to_data(Link("node", 450.0))                      {"name": "node", "bandwidth_GBps": 450.0}
    from_data(Link, {"name": "node"}, "levels[1]")    SchemaError: levels[1]: 'bandwidth_GBps' is missing

A type hint is a form: numbers, text and flags are bounded as `schema` bounds them where nothing is said, tuples are lists
(named ones too), mappings are mappings, dataclasses are records. `Annotated[…]` says more: a schema instead, `Length`, or a
`Form` with its own notation. Constructors may `settle` what they are given by the same hints. A dataclass with
`as_read(path)` checks or replaces itself once it is read (raising SchemaError), one with `as_written()` says what is written in
its place. Forms are made when the first file of their kind is read or written.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar

from .schema import (
    MOST_COUNT,
    Schema,
    SchemaError,
    anything,
    flag,
    identifier,
    inside,
    integer,
    is_number,
    known,
    listed,
    must_be,
    number,
    optional,
    paragraph,
    parsed,
    record,
    row,
    table,
    text,
    where,
)

T = TypeVar("T")
Identifier = Annotated[str, identifier()]
Paragraph = Annotated[str, paragraph()]
Bytes = Annotated[float, number(0, 1e21)]
Seconds = Annotated[float, number(0, 1e9)]
Stage = Annotated[int, integer(0, 1 << 16)]
"""A stage of a pipeline by its index."""


@dataclass(frozen=True, eq=False)
class Form:
    """How values of a kind stand in a file: `read` checks data and gives the value, `write` gives its data (None: the value is
    its own)."""

    read: Schema[Any]
    write: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Length:
    """How many entries a list or a mapping may have."""

    least: int = 0
    most: int = MOST_COUNT


@dataclass(frozen=True)
class Pairs(Length):
    """Pairs in a tuple that are a mapping in the file, in their order."""


def notation(parse: Callable[[str], Any], show: Callable[[Any], str], most: int | None = None) -> Form:
    """Values that are text in a notation of their own, of at most so many characters."""
    return Form(parsed(parse, None if most is None else text(most)), show)


def in_rows(*hints: Any) -> Form:
    """Mappings from tuples that are rows in the file: a key's entries and its value, each by its hint."""
    forms = [form_of(hint) for hint in hints]
    read = listed(row(*(one.read for one in forms)))
    return Form(
        lambda value, path: {tuple(key): entry for *key, entry in read(value, path)},
        lambda value: [[*key, entry] for key, entry in value.items()],
    )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The place of a field in the file, as its metadata says (`kept`)."""

    key: str | None = None
    required: bool = False
    sparse: bool = False
    beside: str | None = None
    inline: bool = False
    last: bool = False
    absent: bool = False
    unit: tuple[str, float] | None = None


def kept(**said: Any) -> Mapping[str, Kept]:
    """A field's metadata. key: its name in the file; required: it has to be there though the field has a default; sparse: it is
    left out where it is the default; beside: it is left out where that field is the default; inline: its fields stand among
    these; last: it is written behind the others; absent: it is not of the file, and comes from who reads; unit: another key that
    may stand for its own, and how much of the field's unit one of that is.

    Else a field is always written, and has to be there when it has no default."""
    return {"kept": Kept(**said)}


def to_data(value: Any, kind: Any = None) -> Any:
    """A value as plain data for JSON. kind: its class or type hint, where that is not the value's own class."""
    hint: Any = type(value) if kind is None else kind
    write = form_of(hint).write
    return value if write is None else write(value)


def from_data(kind: type[T], data: object, path: str = "", *, others: bool = False, **absent: Any) -> T:
    """The dataclass that data of a file say. path: of the data in the file; others: keys beside the fields are left out,
    instead of being refused; absent: values of fields that are not of the file. Raises SchemaError."""
    own: Any = kind
    return _record_of(own, others).read(data, path, absent)


def given(
    kind: Any, data: object, path: str = "", *, only: Sequence[str] = (), also: Mapping[str, Schema[Any]] | None = None
) -> dict[str, Any]:
    """The fields of a dataclass that data say, none of which has to be there, as `dataclasses.replace` takes them. only: fields
    that may stand there, all where there are none; also: schemas of other keys that may. Raises SchemaError."""
    fields = tuple(one for one in _record_of(kind, False).fields if not only or one.name in only)
    own, others = _Record(kind, fields, False), also or {}
    if not isinstance(data, Mapping):
        raise must_be(path, "a mapping", data)
    known(data, (*others, *own.keys), path)
    return record({}, others, others=True)(data, path) | own.values(data, path)


def check(value: Any, path: str) -> None:
    """See that every field of a dataclass holds what its type hint allows. Raises SchemaError."""
    _held(value, path)


def settle(value: Any, path: str = "") -> None:
    """Give a new dataclass its fields as a file's reader would: checked, lists as tuples. Raises SchemaError."""
    vars(value).update(_held(value, path))


def _held(value: Any, path: str) -> dict[str, Any]:
    kind: Any = type(value)
    entries = ((one, getattr(value, one.name)) for one in _record_of(kind, False).fields)
    return {
        one.name: one.form.read(entry, inside(path, one.name))
        for one, entry in entries
        if entry is not None or one.default is not None
    }


@functools.cache
def form_of(hint: Any, others: bool = False) -> Form:
    """The form of a type hint. Raises TypeError for one that says nothing of files."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        own = _record_of(hint, others)
        return Form(own.read, own.write)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return _named_row(hint, typing.get_type_hints(hint, include_extras=True))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:], others)
    if origin in (types.UnionType, typing.Union):
        (one,) = (form_of(kind, others) for kind in arguments if kind is not types.NoneType)
        return Form(optional(one.read), one.write and _optional(one.write))
    return _PLAIN[hint] if hint in _PLAIN else _many(hint, Length(), others)


_PLAIN = {
    bool: Form(flag()),
    int: Form(integer()),
    float: Form(number()),
    str: Form(text()),
    Any: Form(anything),
    object: Form(anything),
}


def _annotated(hint: Any, said: Sequence[Any], others: bool) -> Form:
    (one,) = said
    if isinstance(one, Form):
        return one
    if isinstance(one, Pairs):
        key, kind = typing.get_args(typing.get_args(hint)[0])
        read = _many(dict[key, kind], one, others).read  # type: ignore[valid-type]
        write = _mapping(form_of(kind).write)
        return Form(lambda value, path: tuple(read(value, path).items()), lambda value: write(dict(value)))
    if isinstance(one, Length):
        return _many(hint, one, others)
    return Form(one, form_of(hint, others).write)


def _many(hint: Any, length: Length, others: bool) -> Form:
    """Lists, rows and mappings."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if not isinstance(origin, type) or not arguments:
        raise TypeError(f"{hint} says nothing of files")
    if issubclass(origin, Mapping):
        key, entry = (form_of(kind, others) for kind in arguments)
        return Form(table(key.read, entry.read, length.least, length.most), _mapping(entry.write))
    if origin is tuple and arguments[-1] is not ...:
        forms = [form_of(kind, others) for kind in arguments]
        return Form(row(*(one.read for one in forms)), _row([one.write for one in forms]))
    entry = form_of(arguments[0], others)
    entries = listed(entry.read, length.least, length.most)
    return Form(
        entries if origin is list else lambda value, path: tuple(entries(value, path)),
        list if entry.write is None else functools.partial(_list, entry.write),
    )


def _optional(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else write(value)


def _list(write: Callable[[Any], Any], value: Sequence[Any]) -> list[Any]:
    return [write(entry) for entry in value]


def _mapping(write: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return dict if write is None else lambda value: {key: write(entry) for key, entry in value.items()}


def _row(writes: Sequence[Callable[[Any], Any] | None]) -> Callable[[Any], Any]:
    if not any(writes):
        return list
    return lambda value: [entry if write is None else write(entry) for write, entry in zip(writes, value, strict=True)]


def _named_row(kind: Any, hints: Mapping[str, Any]) -> Form:
    """Named tuples, which are lists."""
    forms = [form_of(hint) for hint in hints.values()]
    read, write = row(*(one.read for one in forms)), _row([one.write for one in forms])
    return Form(lambda value, path: value if isinstance(value, kind) else kind(*read(value, path)), write)


@dataclass(frozen=True, eq=False)
class _Field:
    """A field in its file. keys: that it has there, one of which is its own, or those of all its fields where it is inline;
    default: MISSING where there is none; required: keys that have to be there."""

    name: str
    form: Form
    keys: tuple[str, ...]
    default: Any
    required: tuple[str, ...]
    kept: Kept

    def read(self, data: Mapping[Any, Any], path: str) -> Any:
        """The field's value as data say it, which have one of its keys. Raises SchemaError."""
        if self.kept.inline:
            return self.form.read({key: data[key] for key in self.keys if key in data}, path)
        if self.kept.unit is not None and self.kept.unit[0] in data:
            key, scale = self.kept.unit
            said = _NUMBER(data[key], inside(path, key))
            return self.form.read(said * scale, f"{inside(path, key)} as {self.name}")
        return self.form.read(data[self.keys[0]], inside(path, self.keys[0]))


_NUMBER = where(is_number, "a number")


@dataclass(frozen=True, eq=False)
class _Record:
    """A dataclass in a file."""

    kind: Any
    fields: tuple[_Field, ...]
    others: bool

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for one in self.fields for key in one.keys)

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        return tuple(key for one in self.fields for key in one.required)

    def read(self, data: object, path: str, absent: Mapping[str, Any] | None = None) -> Any:
        """The dataclass that data say, which may be one already. Raises SchemaError."""
        if isinstance(data, self.kind):
            return data
        if not isinstance(data, Mapping):
            raise must_be(
                path, f"a mapping with the keys {', '.join(self.required)}" if self.required else "a mapping", data
            )
        if not self.others:
            known(data, self.keys, path)
        for one in self.fields:
            if one.required and not any(key in data for key in one.keys):
                raise SchemaError(f"{path + ': ' if path else ''}{one.required[0]!r} is missing")
        value = self.kind(**(absent or {}), **self.values(data, path))
        return value.as_read(path) if hasattr(self.kind, "as_read") else value

    def values(self, data: Mapping[Any, Any], path: str) -> dict[str, Any]:
        """The fields that data say. Raises SchemaError."""
        said = (one for one in self.fields if one.kept.inline or any(key in data for key in one.keys))
        return {one.name: one.read(data, path) for one in said}

    def write(self, value: Any) -> dict[str, Any]:
        """Inverse of `read`."""
        if hasattr(self.kind, "as_written"):
            value = value.as_written()
        data: dict[str, Any] = {}
        defaults = {one.name: one.default for one in self.fields}
        for one in self.fields:
            entry, write, beside = getattr(value, one.name), one.form.write, one.kept.beside
            if (one.kept.sparse and entry == one.default) or (beside and getattr(value, beside) == defaults[beside]):
                continue
            shown = entry if write is None else write(entry)
            data |= shown if one.kept.inline else {one.keys[0]: shown}
        return data


@functools.cache
def _record_of(kind: Any, others: bool) -> _Record:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields: list[_Field] = []
    for one in dataclasses.fields(kind):
        said = one.metadata.get("kept", Kept())
        if said.absent:
            continue
        default = one.default if one.default_factory is MISSING else one.default_factory()
        hint = hints[one.name]
        if said.sparse and default is None:  # nothing is said by its absence, not by null
            (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        if said.inline:
            inner = _record_of(hint, others)
            keys, needed = inner.keys, inner.required
        else:
            keys = (said.key or one.name, *(said.unit or ())[:1])
            needed = keys[-1:] if said.required or default is MISSING else ()
        fields.append(_Field(one.name, form_of(hint, others), keys, default, needed, said))
    fields.sort(key=lambda one: one.kept.last)
    return _Record(kind, tuple(fields), others)
