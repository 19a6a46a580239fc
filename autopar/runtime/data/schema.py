"""Schemas of data files, said once per kind of file; everything else is refused with its place in the file.

A schema is a function of a value and of its path that returns the checked value or raises SchemaError:

    LINK = record({"name": text(), "bandwidth_GBps": positive()}, {"latency_us": number(0, 1e12)})
    listed(LINK)(data, "levels")        levels[1].latency_us must be a number from 0 to 1e+12, got 'fast'

Data is not code: names are single printable lines, the names of axes are identifiers, numbers are finite and in a stated
range, so that what was read may be counted, shown and written into a comment. Every reader names its own error around a
SchemaError.
"""

from __future__ import annotations

import difflib
import keyword
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K")
Schema = Callable[[object, str], T]
"""(value, its path) -> the checked value. Raises SchemaError."""

MOST_RANKS = 1 << 20
"""Devices of a cluster, and ranks of a plan."""
MOST_COUNT = 1 << 20
"""Calls, microbatches, stages and other things that are counted one by one."""
MOST_SIZE = 1 << 60
"""Elements, bytes and other sizes that are only reckoned with."""
MOST_NUMBER = 1e100
"""Seconds, bytes and rates: squares and sums of such numbers are finite."""
MOST_TEXT = 4096
"""Characters of a name."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class SchemaError(ValueError):
    """Data that is not as it may be. The message says where it stands, what may stand there, and what does."""


def must_be(path: str, what: str, value: object) -> SchemaError:
    """`levels[1].latency_us must be a number from 0 to 1e+12, got 'fast'`."""
    return SchemaError(f"{path or 'the whole'} must be {what}, got {shown(value)}")


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """`; did you mean 'zero3'?` where one of the names is much like this one; else nothing."""
    near = difflib.get_close_matches(name, names, 1) if isinstance(name, str) and len(name) < 64 else []
    return f"; did you mean {near[0]!r}?" if near else ""


def is_identifier(name: object) -> bool:
    """Whether a name may be that of a mesh axis: ASCII letters, digits and _, at most 64, no keyword of Python."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name)


def is_line(value: object) -> bool:
    """Whether a value is text that prints as one line: no control characters, no marks that turn the direction of text."""
    return isinstance(value, str) and value.isprintable()


def is_integer(value: object, least: int, most: int) -> bool:
    """Whether a value is a whole number in a range, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float = -MOST_NUMBER, most: float = MOST_NUMBER) -> bool:
    """Whether a value is a finite number in a range, and no truth value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return least <= value <= most and math.isfinite(value)


# --- schemas of single values ------------------------------------------------------------------------------------------


def where(right: Callable[[Any], bool], what: str) -> Schema[Any]:
    """Any value that is right; `what` says in words which are."""

    def check(value: object, path: str) -> Any:
        if not right(value):
            raise must_be(path, what, value)
        return value

    return check


def anything(value: object, path: str) -> Any:
    """The value as it is: another schema checks it, where it is used."""
    return value


def integer(least: int = 0, most: int = MOST_COUNT) -> Schema[int]:
    return where(lambda value: is_integer(value, least, most), f"a whole number from {least} to {most}")


def number(least: float = -MOST_NUMBER, most: float = MOST_NUMBER) -> Schema[float]:
    return where(lambda value: is_number(value, least, most), f"a number from {least:g} to {most:g}")


def positive(most: float = MOST_NUMBER) -> Schema[float]:
    what = "a positive number" if most == MOST_NUMBER else f"a positive number of at most {most:g}"
    return where(lambda value: is_number(value, 1 / MOST_NUMBER, most), what)


def flag() -> Schema[bool]:
    return where(lambda value: isinstance(value, bool), "true or false")


def text(most: int = MOST_TEXT) -> Schema[str]:
    return where(
        lambda value: is_line(value) and len(value) <= most, f"printable text on one line, of at most {most} characters"
    )


def paragraph(most: int = 1 << 16) -> Schema[str]:
    """Text that is printable once white space is made a space."""
    return where(
        lambda value: isinstance(value, str) and len(value) <= most and is_line(" ".join(value.split())),
        f"printable text of at most {most} characters",
    )


def identifier() -> Schema[str]:
    return where(is_identifier, "a name of letters, digits and _ that starts with no digit and is no keyword")


def choice(choices: Sequence[str]) -> Schema[str]:
    what = f"one of {', '.join(one if one else repr(one) for one in choices)}"

    def check(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise SchemaError(f"{must_be(path, what, value)}{did_you_mean(value, choices)}")
        return value

    return check


def parsed(parse: Callable[[str], T], schema: Schema[str] | None = None) -> Schema[T]:
    """Text in a notation of its own; `parse` raises ValueError, or an error of ours, where it is not."""
    as_text = schema or text()

    def check(value: object, path: str) -> T:
        line = as_text(value, path)
        try:
            return parse(line)
        except SchemaError:
            raise
        except Exception as error:
            raise SchemaError(f"{path}: {error}") from error

    return check


# --- schemas of schemas --------------------------------------------------------------------------------------------------


def optional(schema: Schema[T]) -> Schema[T | None]:
    return lambda value, path: None if value is None else schema(value, path)


def either(*schemas: tuple[type | tuple[type, ...], Schema[Any]], what: str) -> Schema[Any]:
    """The schema that goes with the value's type; `what` says in words which types there are."""

    def check(value: object, path: str) -> Any:
        for kind, schema in schemas:
            if isinstance(value, kind):
                return schema(value, path)
        raise must_be(path, what, value)

    return check


def listed(schema: Schema[T], least: int = 0, most: int = MOST_COUNT) -> Schema[list[T]]:
    """A list whose entries are alike."""
    what = f"a list of {f'at least {least} and ' if least else ''}at most {most} entries"

    def check(value: object, path: str) -> list[T]:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise must_be(path, what, value)
        return [schema(entry, f"{path}[{i}]") for i, entry in enumerate(value)]

    return check


def row(*schemas: Schema[Any]) -> Schema[tuple[Any, ...]]:
    """A list with an entry per schema."""

    def check(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(schemas):
            raise must_be(path, f"a list of {len(schemas)} entries", value)
        return tuple(
            schema(entry, f"{path}[{i}]") for i, (schema, entry) in enumerate(zip(schemas, value, strict=True))
        )

    return check


def table(key: Schema[K], schema: Schema[T], least: int = 0, most: int = MOST_COUNT) -> Schema[dict[K, T]]:
    """A mapping whose keys are alike, and whose values are."""

    def check(value: object, path: str) -> dict[K, T]:
        if not isinstance(value, Mapping) or not least <= len(value) <= most:
            raise must_be(path, f"a mapping{f' of at least {least} entries' if least else ''}", value)
        return {key(k, f"a key of {path}" if path else "a key"): schema(v, inside(path, k)) for k, v in value.items()}

    return check


def record(
    required: Mapping[str, Schema[Any]], possible: Mapping[str, Schema[Any]] | None = None, *, others: bool = False
) -> Schema[dict[str, Any]]:
    """A mapping with the required keys, and perhaps the possible ones, a schema each. others: keys beside these are left
    out, instead of being refused."""
    schemas = {**required, **(possible or {})}
    what = f"a mapping with the keys {', '.join(required)}" if required else "a mapping"

    def check(value: object, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise must_be(path, what, value)
        if not others:
            known(value, schemas, path)
        for key in required:
            if key not in value:
                raise SchemaError(f"{path + ': ' if path else ''}{key!r} is missing")
        return {k: schemas[k](value[k], inside(path, k)) for k in schemas if k in value}

    return check


def known(value: Mapping[Any, object], allowed: Iterable[str], path: str) -> None:
    """Raises SchemaError for a key that is not allowed."""
    allowed = tuple(allowed)
    for key in value:
        if not isinstance(key, str) or key not in allowed:
            raise SchemaError(f"{path + ': ' if path else ''}unknown key {shown(key)}; allowed: {', '.join(allowed)}")


def inside(path: str, key: object) -> str:
    """The path of a mapping's entry: `mesh.dp`, or `templates['a b']` where the key is no identifier."""
    name = str(key) if is_identifier(key) else ""
    if not name:
        return f"{path}[{shown(key)}]"
    return f"{path}.{name}" if path else name


# --- values in messages ----------------------------------------------------------------------------------------------------


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 2, 3, 4, 4
        self.maxstring = self.maxother = self.maxlong = 80


def shown(value: object) -> str:
    """A value as one short line for messages, whatever it is."""
    try:
        text = _Short().repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return "".join(c if c.isprintable() else " " for c in text)[:200]
