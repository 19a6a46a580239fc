"""The extras that a step gives beside its loss, nested as loss_fn returned them: EXTRAS of pipeline.py names outputs by number.

EXTRAS = {'accuracy': 1, 'logits': 2}        filled with outputs 1 and 2: {'accuracy': tensor(…), 'logits': tensor(…)}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

Extras = int | tuple[Any, ...] | list[Any] | dict[Any, Any]


def numbers_of(extras: Extras | None) -> list[int]:
    """The outputs that are named, in order."""
    return [number for _, number in named_leaves(extras)]


def filled(extras: Extras, values: Mapping[int, Tensor]) -> Any:
    """The same nesting with the values of outputs by their numbers."""
    if isinstance(extras, int):
        return values[extras]
    if isinstance(extras, dict):
        return {key: filled(item, values) for key, item in extras.items()}
    return type(extras)(filled(item, values) for item in extras)


def named_leaves(nested: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of such a nesting by name: `accuracy`, `heads.0`; `output` where there is nothing around it."""
    if nested is None:
        return
    if not isinstance(nested, (dict, tuple, list)):
        yield name or "output", nested
        return
    for key, item in nested.items() if isinstance(nested, dict) else enumerate(nested):
        yield from named_leaves(item, f"{name}.{key}" if name else str(key))
