"""One op applied to typed operands: what rules, costs and local implementations look at instead of a graph node."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.types import TensorType


@dataclass(frozen=True)
class Operand:
    """Stands in `OpCall.arguments` where a tensor was: the index into `operands`."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """`arguments`: every schema argument by name, tensors replaced by Operand, defaults filled in."""

    op: str
    arguments: dict[str, Any] = field(hash=False)
    operands: tuple[TensorType, ...]
    results: tuple[TensorType | None, ...]

    @functools.cached_property
    def signature(self) -> str:
        """All that the op is, as a key: calls of the same signature have the same rule, work and price."""
        return (
            f"{self.op}({self.arguments}; {', '.join(map(str, self.operands))}) -> {', '.join(map(str, self.results))}"
        )

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def type_of(self, name: str) -> TensorType | None:
        """Type of the tensor argument `name`, None when it is absent."""
        value = self.arguments.get(name)
        return self.operands[value.index] if isinstance(value, Operand) else None

    def operand(self, name: str) -> TensorType:
        """Type of the tensor argument `name`, which the op always has."""
        type_ = self.type_of(name)
        assert type_ is not None, f"{self.op} without {name}"
        return type_

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(t.shape for t in self.operands)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the first result, where that is a tensor."""
        first = self.results[0]
        assert first is not None, f"{self.op} has no tensor as its first result"
        return first.shape

    @property
    def out_shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(t.shape if t is not None else None for t in self.results)


@functools.cache
def schema_arguments(target: torch._ops.OpOverload) -> tuple[tuple[str, bool, Any], ...]:
    """(name, has default, default) of every argument of an operator."""
    return tuple((a.name, a.has_default_value(), a.default_value) for a in target._schema.arguments)


def bind(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments of an operator call by schema name, defaults filled in."""
    if not isinstance(target, torch._ops.OpOverload):
        return {f"arg{i}": a for i, a in enumerate(args)} | dict(kwargs)
    bound: dict[str, Any] = {}
    for i, (name, has_default, default) in enumerate(schema_arguments(target)):
        if i < len(args):
            bound[name] = args[i]
        elif name in kwargs:
            bound[name] = kwargs[name]
        elif has_default:
            bound[name] = default
    return bound
