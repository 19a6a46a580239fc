"""Classes and functions made while a program runs may say no module and no name: they are captured as any other."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.data.origin import package_of

X, Y = torch.randn(8, 4), torch.randint(0, 4, (8,))


def forward_from_nowhere() -> Any:
    """A function of globals without `__name__`, as `exec(text, {})` makes them."""
    scope: dict[str, Any] = {"F": F}
    exec("def forward(self, x): return F.linear(x, self.weight) * 2", scope)
    assert scope["forward"].__module__ in (None, "builtins")
    return scope["forward"]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * 2


def without_module() -> nn.Module:
    return type("Made", (Plain,), {"__module__": None})()


def made_by_type() -> nn.Module:
    forward = types.FunctionType(forward_from_nowhere().__code__, {"F": F})
    assert forward.__module__ is None
    return type("Made", (Plain,), {"forward": forward})()


def made_by_exec() -> nn.Module:
    return type("Made", (Plain,), {"forward": forward_from_nowhere(), "__module__": None, "__qualname__": "a<b>.c"})()


def with_an_object_from_nowhere() -> nn.Module:
    model = Plain()
    model.helper = type("Helper", (), {"__module__": None, "factor": 2})()  # type: ignore[assignment]
    return model


def with_a_function_of_its_own() -> nn.Module:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    Doubled.__module__ = None  # type: ignore[assignment]

    class Model(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(F.linear(x, self.weight))

    return Model()


MODELS = (without_module, made_by_type, made_by_exec, with_an_object_from_nowhere, with_a_function_of_its_own)


class Loss:
    """Callable, without a name."""

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)


LOSSES = {
    "function": F.cross_entropy,
    "partial": functools.partial(F.cross_entropy, label_smoothing=0.0),
    "partial of a partial": functools.partial(
        functools.partial(F.cross_entropy, label_smoothing=0.0), reduction="mean"
    ),
    "object": Loss(),
    "method": Loss().__call__,
    "lambda": lambda out, y: F.cross_entropy(out, y),
    "object without a module": type("Nowhere", (Loss,), {"__module__": None})(),
    "function without a module": types.FunctionType(
        (lambda out, y: F.cross_entropy(out, y)).__code__, {"F": F}, "loss"
    ),
}


def compiled(model: nn.Module, loss_fn: Any, optimizer: Any = None) -> autopar.ParallelProgram:
    optimizer = optimizer or functools.partial(torch.optim.SGD, lr=0.1)
    return autopar.compile(model, autopar.ClusterSpec.local(2), (X, Y), loss_fn=loss_fn, optimizer=optimizer)


def check(program: autopar.ParallelProgram) -> None:
    (loss,) = program.run([(X, Y)], steps=1)
    torch.testing.assert_close(loss, F.cross_entropy(X @ torch.ones(4, 4) * 2, Y))


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_model_that_says_no_module_is_captured(make: Any) -> None:
    check(compiled(make(), F.cross_entropy))


@pytest.mark.parametrize("kind", LOSSES)
def test_any_callable_is_a_loss(kind: str) -> None:
    check(compiled(Plain(), LOSSES[kind]))


def test_an_optimizer_that_says_no_module_is_used() -> None:
    own = type("Own", (torch.optim.SGD,), {"__module__": None})
    program = compiled(Plain(), F.cross_entropy, lambda params: own(params, lr=0.1))
    check(program)


def test_python_state_of_an_object_from_nowhere_is_seen() -> None:
    """A value of its state would be a constant of the program."""

    class Counting(Plain):
        def forward(self, x: Tensor) -> Tensor:
            self.helper.factor += 1
            return F.linear(x, self.weight) * self.helper.factor

    for module in (None, "builtins"):
        model = Counting()
        model.helper = type("Helper", (), {"__module__": module})()  # type: ignore[assignment]
        model.helper.factor = 1  # type: ignore[union-attr]
        with pytest.raises(autopar.CaptureError, match="factor"):
            compiled(model, F.cross_entropy)


def test_a_registered_op_without_a_name_is_told_what_it_needs() -> None:
    def twice(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(autopar.InputError, match="a function with a name, not a partial"):
        autopar.register_op("a -> a")(functools.partial(twice))
    with pytest.raises(autopar.InputError, match=r"<lambda>.*is no name; define the function with def"):
        autopar.register_op("a -> a")(lambda x: x)


def test_a_forward_without_a_name_is_told_by_its_class() -> None:
    class Known(Plain):
        pass

    def same(self: Any, x: Tensor, factor: float) -> Tensor:
        return F.linear(x, self.weight) * factor

    Known.forward = lambda self, x: F.linear(x, self.weight) * 2  # type: ignore[method-assign]
    autopar.forward_of(Known)(functools.partial(same, factor=2.0))
    program = compiled(Known(), F.cross_entropy)
    check(program)
    assert any("partial" in text for text in program.captured.exported.known_blocks)


def test_what_says_no_package_has_none() -> None:
    assert package_of(nn.Linear) == "torch"
    assert package_of(len) == "builtins"
    assert package_of(int) == "builtins"
    assert package_of(without_module().__class__) == ""
    assert package_of(type("Helper", (), {"__module__": "builtins"})) == ""
    assert package_of(functools.partial(len)) == "functools"


def test_what_the_interpreter_makes_is_pythons_own() -> None:
    own = (
        types.ModuleType,
        types.FunctionType,
        types.MethodType,
        type({}.items()),
        type(dict.__dict__),
        type(print),
        type(iter([])),
    )
    assert {package_of(cls) for cls in own} == {"builtins"}
