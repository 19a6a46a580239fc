"""Command lines of Megatron held against what its parser and its checks say of the flags that the format has.

`megatron_arguments.json` says of every flag its type ("switch": it has no value) and its choices; which flags Megatron takes only
with others ("any": of any value), and which exclude each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.exchange import megatron

TABLE = json.loads(Path(__file__).with_name("megatron_arguments.json").read_text())
LAUNCHER = ("nnodes", "nproc_per_node")
"""Flags of torchrun."""


def faults(command: str) -> list[str]:
    """The points of a command line that Megatron would not take, in words."""
    values = {name: value for name, value in megatron.flags(command).items() if name not in LAUNCHER}
    return [*_unlike_their_flags(values), *_alone(values)]


def _unlike_their_flags(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        row = TABLE["flags"].get(name)
        if row is None:
            yield f"there is no flag {name}"
        elif (value is True) != (row["type"] == "switch") or (row["type"] == "int") != (type(value) is int):
            yield f"{name} = {value!r} is no {row['type']}"
        elif "choices" in row and value not in row["choices"]:
            yield f"{name} = {value!r} is none of {row['choices']}"


def _alone(values: Mapping[str, Any]) -> Iterator[str]:
    for rule in TABLE["needs"]:
        if all(_has(values, *one) for one in rule["where"].items()):
            yield from (f"{rule['where']} needs {one}" for one in rule["needs"].items() if not _has(values, *one))
    for names in TABLE["apart"]:
        if len(both := [name for name in names if name in values]) > 1:
            yield f"{' and '.join(both)} exclude each other"


def _has(values: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in values if value == "any" else values.get(name) == value
