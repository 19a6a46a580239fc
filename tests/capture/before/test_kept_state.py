"""State that a step leaves for the next one, where no step computes another thing for it: caches, counters, records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import CaptureError
from tests.capture.equal import Net, assert_equal_to_eager
from tests.capture.nets import Forward, X, capture, squares, with_attributes

COUNTS = {"calls": 0}


@functools.cache
def _positions(size: int) -> Tensor:
    return torch.arange(float(size))


@functools.cache
def _drawn(size: int) -> Tensor:
    return torch.randn(size)


def _mask(net: Net, x: Tensor) -> Tensor:
    if net.mask is None or net.mask.shape[0] != x.shape[0]:
        net.mask = torch.full_like(x, 2.0)[:, :4].triu_(1)
    return net.mask @ net.last(net.first(x))


def _mask_by_size(net: Net, x: Tensor) -> Tensor:
    if len(x) not in net.masks:
        net.masks[len(x)] = torch.ones(len(x), len(x)).tril()
    return net.masks[len(x)] @ net.last(net.first(x))


def _rotary(net: Net, x: Tensor) -> Tensor:
    if x.shape[0] > net.longest:
        net.longest = x.shape[0]
        net.cos = torch.outer(torch.arange(x.shape[0]), net.frequencies).cos()
    return net.last(net.first(x)) * net.cos[: x.shape[0]]


def _grown_buffer(net: Net, x: Tensor) -> Tensor:
    if net.table.shape[0] < len(x):
        net.register_buffer("table", torch.ones(len(x), len(x)).tril(), persistent=False)
    return net.table @ net.last(net.first(x))


def _remembered(net: Net, x: Tensor) -> Tensor:
    return net.last(net.first(x)) * _positions(8)


def _with(forward: Forward, **values: Any) -> nn.Module:
    model = with_attributes(forward, **values)
    model.register_buffer("frequencies", torch.rand(8))
    model.register_buffer("table", torch.ones(1, 1), persistent=False)
    return model


CACHES: dict[Forward, Callable[[], dict[str, Any]]] = {
    _mask: lambda: {"mask": None},
    _mask_by_size: lambda: {"masks": {}},
    _rotary: lambda: {"longest": 0},
    _grown_buffer: dict,
    _remembered: dict,
}


@pytest.mark.parametrize("forward", CACHES, ids=lambda f: f.__name__)
def test_a_cache_of_constants_is_computed_and_the_model_stays_as_it_was(forward: Forward) -> None:
    model = _with(forward, **CACHES[forward]())
    before = {name: repr(value) for name, value in vars(model).items()}
    assert_equal_to_eager(model, (X,), squares, steps=1, seeds=())
    assert {name: repr(value) for name, value in vars(model).items()} == before
    assert not isinstance(_positions(8), FakeTensor)


def _random(net: Net, x: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = torch.randn(8)
    return net.first(x) * net.mask


def _remembered_draw(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * _drawn(8)


def _first_differs(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    if net.mask is None:
        net.mask = torch.ones(8)
        h = h * 2
    return h * net.mask


def _written_later(net: Net, x: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = torch.ones(8)
    h = net.first(x) * net.mask
    net.mask.mul_(0.5)
    return h


def _of_a_buffer_that_is_written(net: Net, x: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = net.frequencies * 2
    net.frequencies.mul_(0.5)
    return net.first(x) * net.mask


def _of_data(net: Net, x: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = torch.ones(8)
        net.mask[0] = x.sum()
    return net.first(x) * net.mask


def _of_a_parameter(net: Net, x: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = net.last.bias * 2
    return net.first(x) * net.mask


NO_CACHES = [
    _random,
    _remembered_draw,
    _first_differs,
    _written_later,
    _of_a_buffer_that_is_written,
    _of_data,
    _of_a_parameter,
]


@pytest.mark.parametrize("forward", NO_CACHES, ids=lambda f: f.__name__)
def test_what_the_next_step_would_compute_otherwise_is_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=r"forward changes (mask|_drawn)"):
        capture(_with(forward, mask=None))


class _Doubled(nn.Module):
    """A layer over another one's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2)


def _with_a_child() -> nn.Module:
    model = _with(_replaced_child)
    model.block = _Doubled(nn.Linear(8, 8))
    return model


def _replaced_child(net: Net, x: Tensor) -> Tensor:
    if type(net.block) is not _Halved:
        net.block = _Halved(net.block.inner)
    return net.last(net.block(net.first(x))) * net.table


class _Halved(_Doubled):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x / 2)


def test_a_child_that_the_first_step_puts_in_place_of_another_computes_and_the_other_is_put_back() -> None:
    model = _with_a_child()
    assert_equal_to_eager(model, (X,), squares, seeds=())
    assert type(model.block) is _Doubled


def _exchanged_children(net: Net, x: Tensor) -> Tensor:
    h = net.last(net.first(x).relu())
    if net.new:
        net.first, net.last, net.new = net.last, net.first, False
    return h


def _new_parameters(net: Net, x: Tensor) -> Tensor:
    h = net.last(net.first(x))
    if net.new:
        net.last.weight, net.new = nn.Parameter(torch.ones(8, 8)), False
    return h


@pytest.mark.parametrize("forward", [_exchanged_children, _new_parameters], ids=lambda f: f.__name__)
def test_other_parameters_under_the_same_names_are_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError, match="forward changes"):
        capture(with_attributes(forward, new=True))


class Meter:
    """Counts, and keeps what it is shown."""

    def __init__(self) -> None:
        self.steps, self.shown, self.last = 0, [], {}


def _metered(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    net.meter.steps += len(x)
    net.meter.shown.append(h.detach())
    net.meter.last["first"] = h
    COUNTS["calls"] += 1
    net.calls = getattr(net, "calls", 0) + 1
    return net.last(h)


def _hooked() -> nn.Module:
    model, shown = with_attributes(lambda net, x: net.last(net.first(x))), []
    calls = {"n": 0}

    def show(module: nn.Module, args: Any, output: Tensor) -> None:
        calls["n"] += 1
        shown.append(output)

    model.first.register_forward_hook(show)
    return model


@pytest.mark.parametrize("make", [lambda: with_attributes(_metered, meter=Meter()), _hooked])
def test_what_no_step_reads_is_left_out_and_told(make: Callable[[], nn.Module]) -> None:
    model = make()
    with pytest.warns(UserWarning, match="which no step reads"):
        assert_equal_to_eager(model, (X,), squares, steps=1, seeds=())
    assert not hasattr(model, "calls"), "the model is as it was"


def _asks_for_the_number(net: Net, x: Tensor) -> Tensor:
    net.n += 1
    return net.first(x) * 2 if net.n > 100 else net.first(x)


def _asks_for_the_remainder(net: Net, x: Tensor) -> Tensor:
    net.n += 1
    return net.first(x) * 2 if net.n % 100 == 0 else net.first(x)


def _asks_for_the_length(net: Net, x: Tensor) -> Tensor:
    net.shown.append(1)
    return net.first(x) * 2 if len(net.shown) > 100 else net.first(x)


def _asks_by_another_way(net: Net, x: Tensor) -> Tensor:
    net.shown.append(1)
    return net.first(x) * 2 if len(net.both[0]) > 100 else net.first(x)


def _asks_and_catches(net: Net, x: Tensor) -> Tensor:
    net.n += 1
    try:
        return net.first(x) * 2 if net.n > 100 else net.first(x)
    except Exception:
        return net.first(x)


def _keeps_in_a_default(net: Net, x: Tensor, shown: list[int] = []) -> Tensor:  # noqa: B006
    shown.append(1)
    return net.first(x) * 2 if len(shown) > 100 else net.first(x)


READS = [_asks_for_the_number, _asks_for_the_remainder, _asks_for_the_length, _asks_by_another_way, _asks_and_catches]


@pytest.mark.parametrize("forward", [*READS, _keeps_in_a_default], ids=lambda f: f.__name__)
def test_state_that_only_a_much_later_step_would_read_otherwise_is_refused(forward: Forward) -> None:
    shown: list[int] = []
    with pytest.raises(CaptureError, match="forward changes"):
        capture(with_attributes(forward, n=0, shown=shown, both=(shown,)))
