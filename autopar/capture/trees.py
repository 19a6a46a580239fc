"""Flattening of user data: nested tuples, lists, dicts, dataclasses and model outputs into tensor leaves, and back.

`structure` is plain data (JSON-able except for the class of a dataclass), so that a batch can be checked against the
example inputs with a message that names the leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import InputError


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Stands for tensor number `index`."""

    index: int


def flatten(value: Any) -> tuple[list[torch.Tensor], list[str], Any]:
    """(tensor leaves, their names, structure with tensors replaced by Leaf)."""
    leaves: list[torch.Tensor] = []
    names: list[str] = []

    def visit(x: Any, name: str) -> Any:
        if isinstance(x, torch.Tensor):
            leaves.append(x)
            names.append(name)
            return Leaf(len(leaves) - 1)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
            return _Made(type(x), {k: visit(v, _join(name, k)) for k, v in fields.items()})
        if isinstance(x, Mapping):
            return {k: visit(v, _join(name, str(k))) for k, v in x.items()}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return _Made(type(x), {k: visit(v, _join(name, k)) for k, v in x._asdict().items()})
        if isinstance(x, (list, tuple)):
            return type(x)(visit(v, _join(name, str(i))) for i, v in enumerate(x))
        return x

    return leaves, names, visit(value, "")


def rebuild(structure: Any, leaves: list[Any]) -> Any:
    """Inverse of `flatten`."""
    if isinstance(structure, Leaf):
        return leaves[structure.index]
    if isinstance(structure, _Made):
        return structure.cls(**{k: rebuild(v, leaves) for k, v in structure.fields.items()})
    if isinstance(structure, dict):
        return {k: rebuild(v, leaves) for k, v in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(rebuild(v, leaves) for v in structure)
    return structure


def check_like(value: Any, structure: Any, what: str) -> list[torch.Tensor]:
    """Tensor leaves of `value`, which must be built like `structure`. Raises InputError naming the first difference."""
    leaves, _, own = flatten(value)
    if own != structure:
        raise InputError(f"{what} is built differently from the example inputs: got {own}, expected {structure}")
    return leaves


@dataclasses.dataclass(frozen=True)
class _Made:
    """An instance to make again from its fields."""

    cls: type
    fields: dict[str, Any]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
