"""`@autopar.register_op`: users add an op with its sharding rule.

    @autopar.register_op("n d!, d! -> n d!")
    def scaled_tanh(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * scale

The decorated function becomes one graph node, and its backward another. Unless a `gradient` is given the backward is
computed locally by torch's autograd on the rank's block. The rule of the backward follows from the forward's: a gradient
has its operand's labels, and factors that an operand lacks are summed. Tensor arguments come first and are annotated
`torch.Tensor`; the functions must be made of torch ops and must not depend on anything outside their arguments, because
their source travels with emitted programs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import InputError
from autopar.ir.call import OpCall, bind
from autopar.ir.rule import Rule, parse_rule
from autopar.ops.registry import define
from autopar.runtime.data.schema import is_identifier

Tensor = torch.Tensor
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class UserFunction:
    """A function that emitted programs call; `source` when it is generated, else the function's own source is used."""

    function: Callable[..., Any]
    source: str = ""


USER_FUNCTIONS: dict[str, UserFunction] = {}
_LIBRARIES: list[torch.library.Library] = []
_PLAIN = (int, float, bool, str)
_FACTS = (
    "work",
    "localize",
    "globalize",
    "free",
    "fresh",
    "dear",
    "carries",
    "hidden_workspace",
    "precision",
    "low_operands",
    "view",
)
"""Fields of a definition that a user may state."""
_GRADIENT = """

def {name}_grad(g, *arguments):
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in arguments[:{tensors}]]
    with torch.enable_grad():
        out = {name}(*leaves, *arguments[{tensors}:])
    wanted = [t for t in leaves if t.requires_grad]
    grads = iter(torch.autograd.grad(out, wanted, g, allow_unused=True))
    found = [next(grads) if t.requires_grad else None for t in leaves]
    return [torch.zeros_like(t) if f is None else f for f, t in zip(found, leaves)]
"""


def register_op(
    rule: str,
    *,
    sizes: dict[str, int] | None = None,
    linear: Iterable[Iterable[int]] = (),
    gradient: Callable[..., list[Tensor]] | None = None,
    shape: Function | None = None,
    **facts: Any,
) -> Callable[[Function], Function]:
    """Decorate a function of tensors (then plain numbers) with its rule line; see `autopar.ir.rule`.

    sizes: sizes of the factors of composite dims. linear: groups of operands in which the op is linear, so that sums
    owed on them may pass through. gradient: a function `{name}_grad(g, *arguments)` that gives one gradient per tensor
    argument (zeros where there is none). shape: an empty result for fake arguments, where the function itself cannot be
    run on them. facts: `work`, `localize` and `globalize`, which are asked of the op and of its gradient (`call.op` says
    which), and facts such as `precision` and `dear`; see `autopar.ops.registry.OpDef`. Raises InputError when the
    function cannot be an op.
    """
    operands, arrow, results = rule.partition("->")
    if not arrow or not results.strip() or "," in results:
        raise InputError(f"register_op: {rule!r} is no rule for one result; write for example 'n d, d -> n d'")
    if unknown := [fact for fact in facts if fact not in _FACTS]:
        raise InputError(
            f"register_op: {unknown[0]} is nothing that can be stated of an op; possible: {', '.join(_FACTS)}"
        )
    groups = tuple(frozenset(group) for group in linear)
    # What a max or min owes depends on the other blocks, so its gradient needs that factor whole.
    gradient_rule = re.sub(r"!?<(max|min)", "!", f"{results},{operands}->{operands}")

    def forward(call: OpCall) -> Rule:
        return parse_rule(rule, call.shapes, call.out_shapes, sizes, groups)

    def backward(call: OpCall) -> Rule:
        return parse_rule(gradient_rule, call.shapes, call.out_shapes, sizes)

    def add(function: Function) -> Function:
        name = getattr(function, "__name__", "")
        if not is_identifier(name):
            kind = (
                f"a {type(function).__name__}"
                if not name
                else f"{name}, which is no name; define the function with def"
            )
            raise InputError(f"register_op takes a function with a name, not {kind}")
        parameters, tensors = _signature(function, rule, operands.count(",") + 1)
        if name in USER_FUNCTIONS:
            raise InputError(f"register_op: there is an op {name} already; rename the function")
        if gradient is not None and gradient.__name__ != f"{name}_grad":
            raise InputError(f"register_op: the gradient of {name} must be called {name}_grad, not {gradient.__name__}")
        op = _torch_op(function, shape)
        backward_function = UserFunction(gradient) if gradient else _by_autograd(name, function, len(tensors))
        _register_backward(name, backward_function.function, op, _cotangent(parameters), len(tensors))
        stated = {"home": "user_ops", "dear": True, **facts}
        define(f"autopar_ops.{name}", rule=forward, **stated)
        define(f"autopar_ops.{name}_grad", rule=backward, linear=lambda call: [{0}], **stated)
        USER_FUNCTIONS[name] = UserFunction(function)
        USER_FUNCTIONS[f"{name}_grad"] = backward_function
        return op

    return add


def _signature(function: Function, rule: str, count: int) -> tuple[list[str], list[str]]:
    """Names of all parameters, and of the tensors among them. Raises InputError where an op cannot have them."""
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
    if count != len(tensors):
        raise InputError(
            f"register_op: the rule {rule!r} names {count} operands, {name} takes {len(tensors)} "
            f"tensors ({', '.join(tensors)})"
        )
    return [p.name for p in parameters], tensors


def _torch_op(function: Function, shape: Function | None) -> Any:
    """The function as an op of torch's library. Raises InputError where torch cannot derive a schema."""
    name = function.__name__
    try:
        op = torch.library.custom_op(f"autopar_ops::{name}", function, mutates_args=())
    except ValueError as error:
        raise InputError(
            f"register_op: {name} cannot become an op: {error}; annotate arguments and the result"
        ) from error
    op.register_fake(shape or (lambda *args, **kwargs: torch.empty_like(function(*args, **kwargs))))
    return op


def _cotangent(parameters: list[str]) -> str:
    """The name of the gradient that comes in, which none of the function's parameters has."""
    name = "g"
    while name in parameters:
        name += "_"
    return name


def _by_autograd(name: str, function: Function, tensors: int) -> UserFunction:
    """The gradients of all tensors, the first arguments, by autograd inside one op."""
    source = _GRADIENT.format(name=name, tensors=tensors)
    scope: dict[str, Any] = {"torch": torch, name: function}
    exec(source, scope)
    return UserFunction(scope[f"{name}_grad"], source)


def _register_backward(name: str, gradient: Callable[..., Any], op: Any, g: str, tensors: int) -> None:
    """One op for the gradients of the first `tensors` arguments of `op`, and autograd's way to it. g: the name of the gradient
    that comes in."""
    library = torch.library.Library("autopar_ops", "FRAGMENT")
    schema = str(op._opoverload._schema).split("(", 1)[1].rsplit("->", 1)[0].strip()
    library.define(f"{name}_grad(Tensor {g}, {schema} -> Tensor[]")

    def with_autograd(*args: Any) -> list[Tensor]:
        # Below a dispatch mode (verification runs under one) autograd is excluded, which the gradient needs, and arguments
        # that are as by default are left out, which it expects.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
            return list(gradient(*bind(raw, args, {}).values()))

    raw = getattr(torch.ops.autopar_ops, f"{name}_grad").default
    library.impl(f"{name}_grad", with_autograd, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"autopar_ops::{name}_grad", lambda g, *args: [torch.empty_like(t) for t in args[:tensors]], lib=library
    )
    _LIBRARIES.append(library)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.rest = inputs[tensors:]

    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        grads = raw(g, *saved, *ctx.rest)
        wanted = (d if t.is_floating_point() else None for d, t in zip(grads, saved, strict=True))
        return *wanted, *(None for _ in ctx.rest)

    op.register_autograd(backward, setup_context=setup)
