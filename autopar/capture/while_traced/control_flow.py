"""torch's control flow as the Python that it is.

while_loop(c, f, (x,))   a loop whose conditions are those of branches on data
scan(f, init, xs)        a loop over the slices of xs
cond(c, f, g, (x,))      refused: what its sides share and whose gradients are zeros is torch's compiler's to say
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._higher_order_ops import utils
from torch._higher_order_ops.cond import CondOp
from torch._higher_order_ops.scan import ScanOp
from torch._higher_order_ops.while_loop import WhileLoopOp

from autopar.capture.explain import refusal


def _cond(_: Any, *args: Any) -> Any:
    raise refusal(
        "calls torch.cond",
        "write torch.where(condition, f(x), g(x)), or an if of Python, which goes the way of the example",
    )


def _while_loop(
    _: Any, cond_fn: Any, body_fn: Any, carried_inputs: Sequence[Any], additional_inputs: Sequence[Any]
) -> Any:
    values = tuple(carried_inputs)
    while bool(cond_fn(*values, *additional_inputs)):
        values = tuple(body_fn(*values, *additional_inputs))
    return values


def _scan(
    _: Any, combine_fn: Any, init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Sequence[Any]
) -> Any:
    """The carried values, then what every step gives, stacked in dim 0, over which xs go."""
    carried, given = list(init), list[list[Tensor]]()
    for i in range(xs[0].shape[0]):
        results = list(combine_fn(*carried, *(x[i] for x in xs), *additional_inputs))
        carried = results[: len(init)]
        given.append(results[len(init) :])
    return [*carried, *(torch.stack(steps) for steps in zip(*given, strict=True))]


WRITTEN_OUT: dict[type, Callable[..., Any]] = {CondOp: _cond, WhileLoopOp: _while_loop, ScanOp: _scan}
"""The class of an operator → what a call of it is while a model is traced."""


@contextmanager
def control_flow_in_python() -> Iterator[None]:
    """Within the context loops compute as the Python that they are, also where nothing is traced. Torch itself compiles their
    functions: no mode then sees an op of these, and under a mode torch's compiler fails on parameters in a loop that trains."""
    with ExitStack() as patches:
        for kind, call in WRITTEN_OUT.items():
            if kind is not CondOp:
                patches.enter_context(mock.patch.object(kind, "__call__", call))
        patches.enter_context(mock.patch.object(utils, "_hop_compile_and_call", _called))
        yield


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    return function(*args, **(kwargs or {}))
