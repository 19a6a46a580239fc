"""`@autopar.register_op`: users add an op with its sharding rule.

    @autopar.register_op("n d!, d! -> n d!")
    def scaled_tanh(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * scale

The decorated function becomes one graph node. Its backward is one node too: the gradients of all operands, computed
locally by torch's autograd on the rank's block. The rule of the backward follows from the forward's: a gradient has
its operand's labels, and factors that an operand lacks are summed. Tensor arguments come first and are annotated
`torch.Tensor`; the function must be made of torch ops and must not depend on anything outside its arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import InputError
from autopar.ir.call import OpCall
from autopar.ir.rule import Rule, parse_rule
from autopar.ops.registry import register

Tensor = torch.Tensor


@dataclass(frozen=True)
class UserFunction:
    """A function that emitted programs call; `source` when it is generated, else the function's own source is used."""

    function: Callable[..., Any]
    source: str = ""


Function = Callable[..., Tensor]
USER_FUNCTIONS: dict[str, UserFunction] = {}
_PLAIN = (int, float, bool, str)
_GRADIENT = """

def {name}_grad(g, {args}):
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in ({tensors},)]
    with torch.enable_grad():
        out = {name}(*leaves{rest})
    wanted = [t for t in leaves if t.requires_grad]
    grads = iter(torch.autograd.grad(out, wanted, g, allow_unused=True))
    found = [next(grads) if t.requires_grad else None for t in leaves]
    return [torch.zeros_like(t) if f is None else f for f, t in zip(found, leaves)]
"""


def register_op(rule: str, *, sizes: dict[str, int] | None = None) -> Callable[[Function], Function]:
    """Decorate a function of tensors (then plain numbers) with its rule line; see `autopar.ir.rule`.

    sizes: sizes of the factors of composite dims. Raises InputError when the function cannot be an op.
    """
    operands, arrow, results = rule.partition("->")
    if not arrow or not results.strip() or "," in results:
        raise InputError(f"register_op: {rule!r} is no rule for one result; write for example 'n d, d -> n d'")

    def add(function: Function) -> Function:
        name = function.__name__
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
        tensors = [p.name for p in parameters if p.annotation is Tensor]
        if not tensors or [p.name for p in parameters[: len(tensors)]] != tensors:
            raise InputError(f"register_op: {name} must take its tensors first, each annotated torch.Tensor")
        odd = [p.name for p in parameters[len(tensors) :] if p.annotation not in _PLAIN]
        if odd:
            raise InputError(
                f"register_op: {name}: argument {odd[0]} must be annotated int, float, bool or str (an optional tensor "
                "is two ops)"
            )
        if operands.count(",") + 1 != len(tensors):
            raise InputError(
                f"register_op: the rule {rule!r} names {operands.count(',') + 1} operands, {name} takes {len(tensors)} "
                f"tensors ({', '.join(tensors)})"
            )
        if name in USER_FUNCTIONS:
            raise InputError(f"register_op: there is an op {name} already; rename the function")
        try:
            op = torch.library.custom_op(f"autopar_ops::{name}", function, mutates_args=())
        except ValueError as error:
            raise InputError(
                f"register_op: {name} cannot become an op: {error}; annotate arguments and the result"
            ) from error
        op.register_fake(lambda *args, **kwargs: torch.empty_like(function(*args, **kwargs)))
        _register_backward(name, function, op, parameters, tensors)

        def forward_rule(call: OpCall) -> Rule:
            return parse_rule(rule, call.shapes, call.out_shapes, sizes)

        def backward_rule(call: OpCall) -> Rule:
            # What a max or min owes depends on the other blocks, so its gradient needs that factor whole.
            back = re.sub(r"!?<(max|min)", "!", f"{results},{operands}->{operands}")
            return parse_rule(back, call.shapes, call.out_shapes, sizes)

        register(f"autopar_ops.{name}")(forward_rule)
        register(f"autopar_ops.{name}_grad")(backward_rule)
        USER_FUNCTIONS[name] = UserFunction(function)
        return op

    return add


def _register_backward(name: str, function: Any, op: Any, parameters: list[Any], tensors: list[str]) -> None:
    names = [p.name for p in parameters]
    rest = names[len(tensors) :]
    source = _GRADIENT.format(
        name=name, args=", ".join(names), tensors=", ".join(tensors), rest="".join(f", {r}" for r in rest)
    )
    scope: dict[str, Any] = {"torch": torch, name: function}
    exec(source, scope)
    gradient = scope[f"{name}_grad"]
    library = torch.library.Library("autopar_ops", "FRAGMENT")
    schema = str(op._opoverload._schema).split("(", 1)[1].rsplit("->", 1)[0].strip()
    library.define(f"{name}_grad(Tensor g, {schema} -> Tensor[]")

    def with_autograd(*args: Any) -> list[Tensor]:
        # Below a dispatch mode (verification runs under one) autograd is excluded; the gradient needs it.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            return gradient(*args)

    library.impl(f"{name}_grad", with_autograd, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"autopar_ops::{name}_grad", lambda g, *args: [torch.empty_like(t) for t in args[: len(tensors)]], lib=library
    )
    _LIBRARIES.append(library)
    raw = getattr(torch.ops.autopar_ops, f"{name}_grad").default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[: len(tensors)])
        ctx.rest = inputs[len(tensors) :]

    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        grads = raw(g, *saved, *ctx.rest)
        wanted = (d if t.is_floating_point() else None for d, t in zip(grads, saved, strict=True))
        return *wanted, *(None for _ in ctx.rest)

    op.register_autograd(backward, setup_context=setup)
    USER_FUNCTIONS[f"{name}_grad"] = UserFunction(gradient, source)


_LIBRARIES: list[torch.library.Library] = []
