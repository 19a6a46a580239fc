"""YAML as cluster files use it: plain data, without what makes a small text large or a key mean two things.

Anchors and merge keys can multiply a few lines into gigabytes, keys given twice hide one another, tags make other types:
each is refused. `80e9` is a number, as YAML 1.2 and JSON have it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any

import yaml

from autopar.runtime.data.schema import MOST_NUMBER, SchemaError, shown

MOST_DEPTH = 32
MOST_NODES = 1 << 17
_PLAIN = ("map", "seq", "str", "int", "float", "bool", "null")


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader within bounds."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = self.nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.nodes += 1
        self.depth += 1
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise SchemaError("anchors and aliases (& and *) are not read; write the values out")
        if self.depth > MOST_DEPTH or self.nodes > MOST_NODES:
            raise SchemaError(f"more than {MOST_DEPTH} levels or {MOST_NODES} values")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node is not None and node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN:
            raise SchemaError(f"{shown(node.tag)} is no plain value; put text in quotes")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise SchemaError(f"a key of {shown(mapping)} is given twice")
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def parse_yaml(text: str) -> object:
    """The value of YAML text. Raises SchemaError."""
    try:
        data = yaml.load(text, _Loader)
        _check_numbers(data)
        return data
    except yaml.YAMLError as error:
        raise SchemaError(str(error)) from error
    except RecursionError as error:
        raise SchemaError("the nesting is too deep") from error
    except (ValueError, OverflowError) as error:
        raise error if isinstance(error, SchemaError) else SchemaError(str(error)) from error


def _check_numbers(data: object) -> None:
    if isinstance(data, dict):
        for value in data.values():
            _check_numbers(value)
    elif isinstance(data, list):
        for value in data:
            _check_numbers(value)
    elif isinstance(data, int | float) and not (abs(data) <= MOST_NUMBER and math.isfinite(data)):
        raise SchemaError(f"the number {shown(data)} is too large, or none")
