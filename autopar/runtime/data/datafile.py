"""Files of data: read within bounds, JSON without its loopholes, and paths that stay inside a directory.

JSON as Python reads it allows NaN and infinities, keys that are given twice (the last one wins) and numbers of any
length; here each is refused, as is nesting deeper than the interpreter's stack.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

from .schema import SchemaError, is_line, must_be, shown

MOST_BYTES = 1 << 26
"""The most bytes of a file of data."""
MOST_VALUES = 3 << 19
"""Values and keys of a JSON file, counted by commas and colons: what Python makes of a few bytes of text takes a hundred."""
MOST_DIGITS = 19


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All of a regular file. Raises OSError, and SchemaError where it is no file, or a larger one."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise SchemaError("this is no regular file")
    if status.st_size > most_bytes:
        raise SchemaError(f"the file has {status.st_size} bytes, at most {most_bytes} are read")
    with path.open("rb") as file:
        return file.read(most_bytes + 1)[:most_bytes]


def open_lines(path: Path) -> io.FileIO:
    """A file of lines, opened to write behind those that are there, each with one `write`; a last line that was not written
    whole is ended, so that it takes no other with it. Raises OSError."""
    file = io.FileIO(path, "ab")
    with suppress(OSError), path.open("rb") as lines:  # a pipe, or a device, has no end
        if lines.seek(0, os.SEEK_END) and lines.seek(-1, os.SEEK_END) >= 0 and lines.read(1) != b"\n":
            file.write(b"\n")
    return file


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """All of a text file. Raises OSError, SchemaError."""
    try:
        return read_bytes(path, most_bytes).decode()
    except UnicodeDecodeError as error:
        raise SchemaError(f"the file is no UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> object:
    """The content of a JSON file. Raises OSError, SchemaError."""
    return parse_json(read_text(path, most_bytes))


def parse_json(text: str, most_values: int = MOST_VALUES) -> object:
    """The value of JSON text. Raises SchemaError where it is none, has what only Python reads, or more values than it may."""
    if (values := text.count(",") + text.count(":")) >= most_values:
        raise SchemaError(f"about {values} values and keys, at most {most_values} are read")
    try:
        return json.loads(
            text, parse_constant=_constant, parse_int=_integer, parse_float=_float, object_pairs_hook=_unique
        )
    except SchemaError:
        raise
    except RecursionError as error:
        raise SchemaError("the nesting is too deep") from error
    except ValueError as error:
        raise SchemaError(f"no JSON: {error}") from error


def _constant(name: str) -> NoReturn:
    raise SchemaError(f"{name} is no number of JSON; numbers are finite")


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise SchemaError(
            f"a number of {len(digits)} digits ({digits[:12]}…); whole numbers have at most {MOST_DIGITS}"
        )
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= 100 else math.inf
    if not math.isfinite(value):
        raise SchemaError(f"the number {digits[:24]} is too large")
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise SchemaError(f"the key {shown(twice)} is given twice")
    return data


def path_inside(value: object, path: str) -> str:
    """A schema: a relative path, written with /, that stays inside its directory."""
    what = "a relative path inside the directory"
    if not isinstance(value, str) or not is_line(value) or not value or len(value) > 1024 or "\\" in value:
        raise must_be(path, what, value)
    pure = PurePosixPath(value)
    if pure.is_absolute() or PureWindowsPath(value).drive or ".." in pure.parts or not pure.parts:
        raise must_be(path, what, value)
    return value
