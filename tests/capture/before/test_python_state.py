"""Python state that one step leaves to the next is found and named, and the user's module and process stay as they were."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import CaptureError
from tests.capture.equal import Net, assert_equal_to_eager
from tests.capture.nets import Forward, X, capture, refusal, squares, with_attributes

COUNTS = {"calls": 0}


def _count(net: Net, x: Tensor) -> Tensor:
    net.n += 1
    return net.last(net.first(x)) * net.n


def _carry(net: Net, x: Tensor) -> Tensor:
    h = net.first(x) if net.state is None else net.first(x) + net.state
    net.state = h.detach()
    return net.last(h)


def _global(net: Net, x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return net.last(net.first(x)) * COUNTS["calls"]


def _iterator(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) * next(net.numbers)


def _plain_tensor(net: Net, x: Tensor) -> Tensor:
    net.table.mul_(0.9)
    return net.last(net.first(x))


def _new_parameter(net: Net, x: Tensor) -> Tensor:
    net.first.weight = nn.Parameter(net.first.weight.detach() * 2)
    return net.last(net.first(x))


def _new_module(net: Net, x: Tensor) -> Tensor:
    net.extra = nn.Linear(8, 8)
    return net.extra(net.last(net.first(x)))


def _new_buffer(net: Net, x: Tensor) -> Tensor:
    net.register_buffer("extra", torch.ones(8))
    return net.last(net.first(x))


def _python_random(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) * random.random()


def _numpy_random(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) * float(np.random.rand())


def _own_random(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) * net.rng.random()


def _entropy(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) * float(int.from_bytes(os.urandom(4), "big"))


def _clock(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) * time.time()


def _default_dtype(net: Net, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return net.last(net.first(x))


def _mode(net: Net, x: Tensor) -> Tensor:
    h = net.drop(net.first(x))
    net.drop.eval()
    return net.last(h)


def _fails(net: Net, x: Tensor) -> Tensor:
    net.n += 1
    net.cache.append(x)
    net.train(False)
    random.random()
    return net.first(x) @ net.first(x)


STATES: dict[Forward, tuple[Callable[[], dict[str, Any]], str]] = {
    _count: (lambda: {"n": 0}, "changes n,"),
    _carry: (lambda: {"state": None}, "changes state,"),
    _global: (dict, "changes COUNTS"),
    _iterator: (lambda: {"numbers": itertools.count(1)}, "changes numbers,"),
    _plain_tensor: (lambda: {"table": torch.ones(8)}, "writes to a plain tensor.*register_buffer"),
    _new_parameter: (dict, r"changes first\.weight,"),
    _new_module: (dict, "changes extra,"),
    _new_buffer: (dict, "changes extra"),
    _python_random: (dict, "Python's random numbers.*torch.rand"),
    _numpy_random: (dict, "NumPy's random numbers.*torch.rand"),
    _own_random: (lambda: {"rng": random.Random(0)}, "changes rng,"),
    _entropy: (dict, r"posix\.urandom|os\.urandom in _entropy"),
    _clock: (dict, r"time\.time in _clock"),
    _default_dtype: (dict, "default dtype"),
    _mode: (lambda: {"drop": nn.Dropout(0.5)}, r"changes drop\.training,"),
    _fails: (lambda: {"n": 0, "cache": []}, "in _fails"),
}


def everything(model: nn.Module) -> dict[str, Any]:
    """Everything that a user could see of a model and of the process, by name."""
    seen: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            seen[f"{path}:{name}"] = value
            if isinstance(value, (dict, list)):
                seen |= {
                    f"{path}:{name}[{k}]": v
                    for k, v in (value.items() if isinstance(value, dict) else enumerate(value))
                }
    seen |= {f"grad of {name}": p.grad for name, p in model.named_parameters()}
    seen |= {f"{name} is trained": p.requires_grad for name, p in model.named_parameters()}
    return seen


def process() -> tuple[Any, ...]:
    generators = str(random.getstate()), str(np.random.get_state()), torch.get_rng_state().tolist()
    return *generators, torch.get_default_dtype(), torch.is_grad_enabled(), dict(COUNTS), torch.manual_seed.__name__


@pytest.mark.parametrize("forward", STATES, ids=lambda f: f.__name__)
def test_state_that_one_step_leaves_to_the_next_is_refused_and_the_model_stays_as_it_was(forward: Forward) -> None:
    make, says = STATES[forward]
    model = with_attributes(forward, **make())
    model.first.weight.grad = torch.ones(8, 8)
    values = {name: t.clone() for name, t in model.state_dict().items()}
    before, around = everything(model), process()
    with pytest.raises(CaptureError, match=says):
        capture(model)
    after = everything(model)
    assert before.keys() == after.keys()
    assert [name for name in before if after[name] is not before[name] and after[name] != before[name]] == []
    assert not any(isinstance(value, FakeTensor) for value in after.values())
    assert all(torch.equal(t, values[name]) for name, t in model.state_dict().items())
    assert process() == around


def _remembers(net: Net, x: Tensor) -> Tensor:
    started = time.perf_counter()
    net.losses = []
    h = net.first(x)
    net.losses.append((h**2).mean())
    net.seen = h
    out = net.last(h) + sum(net.losses)
    net.took = time.perf_counter() - started
    return out


def _counts_in_buffers(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    net.average.data.mul_(0.9).add_(h.detach().mean(0))
    net.scale.data = net.scale * 0.5 + 1
    return net.last(h) * net.average * net.scale * net.first.weight.data.mean()


def test_attributes_written_before_they_are_read_are_part_of_the_step_and_leave_no_trace() -> None:
    model = with_attributes(_remembers, losses=[])
    before = everything(model)
    assert_equal_to_eager(model, (X,), squares, seeds=())
    assert model.losses == []
    assert not hasattr(model, "seen")
    assert everything(model).keys() == before.keys()


def test_data_of_buffers_and_parameters_is_read_and_written_as_eager_does() -> None:
    model = Net(_counts_in_buffers)
    model.register_buffer("average", torch.ones(8))
    model.register_buffer("scale", torch.ones(8))
    program = assert_equal_to_eager(model, (X,), squares, steps=3, seeds=())
    assert set(program.ir.buffer_updates) == {"average", "scale"}


def test_a_block_with_buffers_that_is_used_twice_writes_them_twice() -> None:
    class Decaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("mean", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return self.lin(x) * self.mean.clone()

    block = Decaying()
    assert_equal_to_eager(nn.Sequential(block, nn.Tanh(), block), (X,), squares, steps=3, seeds=())


def test_a_written_buffer_that_shares_memory_is_refused() -> None:
    model = with_attributes(lambda net, x: net.last(net.first(x)) * net.a.mul_(0.9).clone())
    memory = torch.ones(8)
    model.register_buffer("a", memory)
    model.register_buffer("b", memory.view(8))
    assert "a and b are the same memory" in refusal(model)


def registers_hooks(again: bool) -> Forward:
    """The first step registers a hook that doubles what comes out of a layer; again: every step does."""

    def forward(net: Net, x: Tensor) -> Tensor:
        if again or not net.hooked:
            net.first.register_forward_hook(lambda module, args, out: out * 2)
            net.hooked = True
        return net.last(net.first(x))

    return forward


def test_hooks_that_the_first_step_registers_are_traced_and_taken_away_again() -> None:
    model = with_attributes(registers_hooks(again=False), hooked=False)
    assert_equal_to_eager(model, (X,), squares)
    assert not model.first._forward_hooks
    assert not model.hooked


def test_hooks_that_every_step_registers_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"changes first\._forward_hooks"):
        capture(with_attributes(registers_hooks(again=True), hooked=False))


class Kind:
    """The kind of a model, as configurations hold it."""

    def __init__(self) -> None:
        self.problem: str | None = None


def notes_the_kind(net: Net, x: Tensor) -> Tensor:
    if net.kind.problem is None:
        net.kind.problem = "regression"
    h = net.first(x)
    return h * 2 if net.kind.problem == "regression" else h


def changes_its_mind(net: Net, x: Tensor) -> Tensor:
    """The first step computes something else than all others."""
    h = net.first(x)
    if net.kind.problem is None:
        net.kind.problem = "regression"
        return h * 3
    return h


class Inner(nn.Module):
    """A way to use a layer, made with one that may be replaced."""

    def __init__(self, rectified: bool = False) -> None:
        super().__init__()
        self.layer, self.rectified = nn.Linear(8, 4), rectified

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() if self.rectified else self.layer(x)


def makes_a_module_of_its_own(net: Net, x: Tensor) -> Tensor:
    """A switch of attention does this: what the new module was made with is written in place, by the first step alone."""
    if not net.inner.rectified:
        made = Inner(rectified=True)
        made.layer = net.inner.layer
        net.inner = made
    return net.inner(x)


def test_what_the_first_step_makes_once_for_all_is_traced() -> None:
    inner = Inner()
    model = with_attributes(makes_a_module_of_its_own, inner=inner)
    capture(model)
    assert model.inner is inner, "the model is as it was"


def test_what_the_first_step_notes_once_for_all_is_traced() -> None:
    kind = Kind()
    capture(with_attributes(notes_the_kind, kind=kind))
    assert kind.problem is None, "the model is as it was"


def test_what_makes_a_later_step_another_one_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"changes kind\."):
        capture(with_attributes(changes_its_mind, kind=Kind()))


def another_number(net: Net, x: Tensor) -> Tensor:
    """Later steps differ in a number alone."""
    h = net.first(x) * (3.0 if net.kind.problem is None else 4.0)
    net.kind.problem = "regression"
    return h


def another_constant(net: Net, x: Tensor) -> Tensor:
    """Later steps differ in the value of a constant alone."""
    h = net.first(x) * torch.tensor([3.0 if net.kind.problem is None else 4.0])
    net.kind.problem = "regression"
    return h


def another_gradient(net: Net, x: Tensor) -> Tensor:
    """Later steps compute the same values, and their gradients another way."""
    with torch.set_grad_enabled(net.kind.problem is None):
        h = net.first(x)
    net.kind.problem = "regression"
    return net.last(x) + h


def another_operand(net: Net, x: Tensor) -> Tensor:
    """Later steps run the same ops on other values."""
    h, g = net.first(x), net.last(x)
    h = h - g if net.kind.problem is None else g - h
    net.kind.problem = "regression"
    return h.sigmoid()


@pytest.mark.parametrize("forward", [another_number, another_constant, another_gradient, another_operand])
def test_a_later_step_that_differs_in_one_respect_is_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=r"changes kind\."):
        capture(with_attributes(forward, kind=Kind()))


def notes_beside_all_that(net: Net, x: Tensor) -> Tensor:
    net.kind.problem = "regression"
    with torch.no_grad():
        scale = net.last(x) * torch.tensor([3.0])
    return torch.nn.functional.dropout(net.first(x), 0.5) * scale


def test_a_later_step_that_is_the_same_in_every_respect_is_traced() -> None:
    capture(with_attributes(notes_beside_all_that, kind=Kind()))
