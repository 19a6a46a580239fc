"""autopar's own graph ops and what ATen's become of them.

The stock backward of some ops shreds them into flattening views (linear) or device kernels (attention). The dialect's
ops stay whole: each is one graph node, registered with torch.library so that make_fx can trace it, with a shape
function for tracing and the runtime's function as its implementation. `LIFT` says what an ATen op becomes while a
template is traced: a function that computes the same with dialect ops and plain ones. What is not in it runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.ops.registry import RuleFunction, define

_LIBRARY = torch.library.Library("autopar", "DEF")
LIFT: dict[Any, Callable[..., Any]] = {}
SHAPES: dict[Any, Callable[..., Any]] = {}
"""Shape functions of ATen ops for which torch has none, or one that takes less than the op does; used while a model is
captured."""


def graph_op(
    schema: str, implementation: Callable[..., Any], shape: Callable[..., Any], **facts: Any
) -> Callable[[RuleFunction], Any]:
    """Decorate the rule of a new op of the dialect; the name then stands for the op itself, to be called on tensors.

    shape: empty results for fake arguments. facts: further fields of the op's definition (`OpDef`).
    """

    def add(rule: RuleFunction) -> Any:
        op = _defined(schema, implementation, shape)
        define(f"autopar.{schema[: schema.index('(')]}", rule=rule, **facts)
        return op

    return add


def captured_op(schema: str, shape: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate what a new op of captured graphs becomes while a template is traced; the name then stands for the op, which
    needs no rule. shape: as for `graph_op`."""

    def add(lift: Callable[..., Any]) -> Any:
        op = _defined(schema, lift, shape)
        lifts(op)(lift)
        return op

    return add


def _defined(schema: str, implementation: Callable[..., Any], shape: Callable[..., Any]) -> Any:
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", shape, lib=_LIBRARY)
    return getattr(torch.ops.autopar, name).default


def _operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, torch.Tensor)))
    ctx.arguments = tuple(None if isinstance(x, torch.Tensor) else x for x in inputs)
    ctx.are_tensors = tuple(isinstance(x, torch.Tensor) for x in inputs)


def differentiable(op: Any, backward: Callable[..., Any], save: Callable[..., None] = _operands) -> None:
    """Autograd's way back through an op of the dialect that models may call themselves. backward(ctx, g): a gradient per
    argument; save(ctx, inputs, output) keeps what it reads, by default the op's tensors (ctx.saved_tensors; `given(ctx)`: all
    its arguments)."""
    torch.library.register_autograd(op.name(), backward, setup_context=save, lib=_LIBRARY)


def given(ctx: Any) -> list[Any]:
    """All arguments of an op that is `differentiable`, as its backward knows them."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if is_one else x for is_one, x in zip(ctx.are_tensors, ctx.arguments, strict=True)]


def lifts(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as what `targets` become. Raises ValueError where one has another lift."""

    def add(f: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            if LIFT.setdefault(target, f) is not f:
                raise ValueError(f"{target} is lifted twice")
        return f

    return add


def shapes(target: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the shape function of an ATen op."""

    def add(f: Callable[..., Any]) -> Callable[..., Any]:
        SHAPES[target] = f
        return f

    return add


def empty_like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The shape function of an op whose result is like its first operand."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
