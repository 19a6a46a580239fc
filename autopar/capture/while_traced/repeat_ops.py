"""The ops that mark a traced call in the graph of a step, and the one that stands for a call which is like it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx.node import has_side_effect

_LIBRARY = torch.library.Library("autopar_repeat", "DEF")
_TAGS = (torch.Tag.flexible_layout,)
"""A trace keeps the values of all operands in the nodes of other ops."""
for _schema in (
    "begin(int block, Tensor[] roles) -> ()",
    "end(int block, Tensor[] made) -> ()",
    "repeat(int call, Tensor[] roles) -> Tensor[]",
    "parameter(str name) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_TAGS)
BEGIN = has_side_effect(torch.ops.autopar_repeat.begin.default)
END = has_side_effect(torch.ops.autopar_repeat.end.default)
REPEAT = torch.ops.autopar_repeat.repeat.default
PARAMETER = torch.ops.autopar_repeat.parameter.default
"""A parameter that is set aside (`set_aside.py`), where an op reads it."""
MARKS = (BEGIN, END, REPEAT)
Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, tuple[int, ...]]
"""A tensor that a call made: shape, strides, dtype, and the numbers of the roles that its gradient leads to."""
_made: list[tuple[Sequence[Made], Sequence[Tensor]]] = []


@contextmanager
def made_as(made: Sequence[Made], roles: Sequence[Tensor]) -> Iterator[None]:
    """Within the context `repeat` makes such tensors. roles: all of the call, those too that the op is not given."""
    _made.append((made, roles))
    try:
        yield
    finally:
        _made.pop()


class _Made(Function):
    """An empty tensor whose gradient leads to other tensors."""

    @staticmethod
    def forward(ctx: Any, shape: Any, stride: Any, dtype: torch.dtype, *roles: Tensor) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("a call that stands for another one has no backward")


def _mark(block: int, tensors: list[Tensor]) -> None:
    pass


def _repeat(call: int, given: list[Tensor]) -> list[Tensor]:
    made, roles = _made[-1]
    return [
        _Made.apply(shape, stride, dtype, *(roles[i] for i in reached))
        if reached
        else torch.empty_strided(shape, stride, dtype=dtype)
        for shape, stride, dtype, reached in made
    ]


for _name in ("begin", "end"):
    _LIBRARY.impl(_name, _mark, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar_repeat::{_name}", _mark, lib=_LIBRARY)
for _key in ("Autograd", "CompositeExplicitAutograd"):
    _LIBRARY.impl("repeat", _repeat, _key)
