"""Flattening of user data: nested tuples, lists, dicts, dataclasses and model outputs into tensor leaves, and back.

`structure` is plain data (JSON-able except for the class of a dataclass), so that a batch can be checked against the
example inputs with a message that names the leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any

import numpy as np
import torch

from autopar.errors import InputError


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Stands for tensor number `index`."""

    index: int


def flatten(value: Any) -> tuple[list[torch.Tensor], list[str], Any]:
    """(tensor leaves, their names, structure with tensors replaced by Leaf). Raises InputError for what is no plain tensor."""
    leaves: list[torch.Tensor] = []
    names: list[str] = []

    def visit(x: Any, name: str) -> Any:
        if isinstance(x, torch.Tensor):
            leaves.append(x)
            names.append(name)
            return Leaf(len(leaves) - 1)
        if isinstance(x, np.ndarray):
            raise InputError(f"input {name or '0'} is a numpy array; make it a tensor with torch.from_numpy")
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
            return _Made(type(x), {k: visit(v, _join(name, k)) for k, v in fields.items()})
        if isinstance(x, Mapping):
            return {k: visit(v, _join(name, str(k))) for k, v in x.items()}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return _Made(type(x), {k: visit(v, _join(name, k)) for k, v in zip(x._fields, x, strict=True)})
        if isinstance(x, (list, tuple)):
            return type(x)(visit(v, _join(name, str(i))) for i, v in enumerate(x))
        if hasattr(type(x), "__torch_function__"):
            raise InputError(f"{name or 'the value'} is a {type(x).__name__} and no tensor of a fixed shape")
        return x

    return leaves, names, visit(value, "")


def tensors_of_extras(value: Any) -> tuple[list[torch.Tensor], Any]:
    """(tensor leaves, structure) of what loss_fn returned beside the loss, None being nothing. Raises InputError for anything but
    tensors in tuples, lists and dicts."""
    if value is None:
        return [], None
    leaves, _, structure = flatten(value)
    _check_extras(structure, "[1]")
    if not leaves:
        raise InputError(f"loss_fn returned {value!r} beside the loss, which holds no tensor; return the loss alone")
    return leaves, structure


def _check_extras(structure: Any, path: str) -> None:
    if isinstance(structure, Leaf):
        return
    if type(structure) is dict and all(isinstance(key, (str, int)) for key in structure):
        items = list(structure.items())
    elif type(structure) in (tuple, list):
        items = list(enumerate(structure))
    else:
        made = structure.cls if isinstance(structure, _Made) else type(structure)
        what = repr(structure) if isinstance(structure, (int, float, str, NoneType)) else f"a {made.__name__}"
        if isinstance(structure, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            what = "a number that item() gave of a tensor"
        raise InputError(
            f"loss_fn(…){path} is {what}: beside the loss a step gives tensors, in tuples, lists and dicts; pick the tensors, "
            'as in return loss, {"logits": out.logits}'
        )
    for key, item in items:
        _check_extras(item, f"{path}[{key!r}]")


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


def shapes_text(value: Any) -> str:
    """`input_ids (8, 512), labels (8, 512)`."""
    leaves, names, _ = flatten(value)
    return ", ".join(f"{name or 0} {tuple(leaf.shape)}" for name, leaf in zip(names, leaves, strict=True))


def check_like(value: Any, structure: Any, what: str) -> list[torch.Tensor]:
    """Tensor leaves of `value`, which must be built like `structure`. Raises InputError naming the first difference."""
    leaves: dict[int, torch.Tensor] = {}
    _match(value, structure, what, leaves)
    return [leaves[i] for i in range(len(leaves))]


def _match(value: Any, structure: Any, path: str, leaves: dict[int, torch.Tensor]) -> None:
    if isinstance(structure, Leaf):
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{path} must be a tensor as in the example inputs, it is {_kind(value)}")
        leaves[structure.index] = value
        return
    fields: dict[Any, Any]
    expected: dict[Any, Any]
    if isinstance(structure, _Made):
        if not isinstance(value, structure.cls):
            raise InputError(
                f"{path} must be a {structure.cls.__name__} as in the example inputs, it is {_kind(value)}"
            )
        fields = {name: getattr(value, name) for name in structure.fields}
        expected = structure.fields
    elif isinstance(structure, dict):
        if not isinstance(value, Mapping):
            raise InputError(f"{path} must be a dict as in the example inputs, it is {_kind(value)}")
        fields, expected = dict(value), structure
        for problem, keys in (
            ("lacks", expected.keys() - fields.keys()),
            ("has the surplus", fields.keys() - expected.keys()),
        ):
            if keys:
                raise InputError(
                    f"{path} {problem} {', '.join(sorted(map(repr, keys)))}; the example inputs have "
                    f"{', '.join(map(repr, expected))}"
                )
    elif isinstance(structure, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(structure):
            got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else _kind(value)
            raise InputError(f"{path} must have {len(structure)} entries as in the example inputs, it has {got}")
        fields, expected = dict(enumerate(value)), dict(enumerate(structure))
    else:
        if isinstance(value, torch.Tensor) or value != structure:
            raise InputError(
                f"{path} is a constant of the program: it was {structure!r} in the example inputs, now it is {_kind(value)}; "
                "compile again for another value"
            )
        return
    for name, part in expected.items():
        _match(
            fields[name], part, f"{path}[{name!r}]" if not isinstance(structure, _Made) else f"{path}.{name}", leaves
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else f"a {type(value).__name__}"


@dataclasses.dataclass(frozen=True)
class _Made:
    """An instance to make again from its fields."""

    cls: type
    fields: dict[str, Any]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
