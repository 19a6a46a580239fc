"""The formats by name: a new one is a file of this room, and a row here."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import InputError
from autopar.exchange import accelerate, deepspeed, fsdp2, megatron, torchtitan, tp_plan
from autopar.exchange.keys import Format, Read
from autopar.exchange.layout import Layout

FORMATS = {one.FORMAT.name: one.FORMAT for one in (fsdp2, tp_plan, accelerate, megatron, torchtitan, deepspeed)}


_NEVER_SILENT = frozenset({"accelerate", "fsdp2"})
"""Formats whose files say how many ranks there are."""


def format_named(name: str) -> Format:
    """A format. Raises InputError where there is none so named."""
    if name not in FORMATS:
        raise InputError(f"there is no format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def read_file(path: Path, name: str | None = None) -> Read:
    """The content of a file. name: of its format; None: told by the file. Raises InputError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error})") from error
    told = name or format_of(path, text)
    read = format_named(told).read(text)
    if name is None and read.layout == Layout() and (told in _NEVER_SILENT or (told == "tp_plan" and read.unknown)):
        keys = f" ({', '.join([*read.unknown][:5])})" if read.unknown else ""
        raise InputError(
            f"{path} says nothing of a layout{keys}, so it is no {told} file; --format names another of {', '.join(FORMATS)}"
        )
    return read


def format_of(path: Path, text: str) -> str:
    """The format that a file is in, by its suffix and the words that only one format has. Raises InputError."""
    if path.suffix in (".yaml", ".yml"):
        return "accelerate"
    if path.suffix == ".json":
        return (
            "deepspeed"
            if any(word in text for word in ("train_", "zero_optimization", "tensor_parallel"))
            else "tp_plan"
        )
    if path.suffix == ".py":
        return "torchtitan" if "ParallelismConfig(" in text else "fsdp2"
    if "--" in text:
        return "megatron"
    raise InputError(f"{path}: the format is not told by the file; give --format, of {', '.join(FORMATS)}")
