"""Branches on random numbers: named with their line where a step may take either way, followed where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.equal import Net, assert_equal_to_eager
from tests.capture.nets import X, refusal, squares

Forward = Callable[..., Tensor]


def _guarded(net: Any, x: Tensor, p: float) -> Tensor:
    if net.training and p > 0.0:
        drawn = torch.rand([])
        if drawn < p:
            return net.first(x)
    return net.last(net.first(x))


def _always_drawn(net: Any, x: Tensor, p: float) -> Tensor:
    skip = net.training and torch.rand([]) < p
    return net.first(x) if skip else net.last(net.first(x))


def _kept(net: Any, x: Tensor, p: float) -> Tensor:
    return net.last(net.first(x)) if torch.rand(1) >= p else net.first(x)


DROPS = (_guarded, _always_drawn, _kept)


@pytest.mark.few(2)
@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("drop", DROPS)
def test_a_layer_that_is_never_or_always_dropped_compiles(drop: Forward, p: float) -> None:
    assert_equal_to_eager(Net(lambda net, x: drop(net, x, p)), (X,), squares)


@pytest.mark.parametrize("drop", DROPS)
def test_a_layer_that_may_be_dropped_is_refused_with_the_line_and_what_to_do(drop: Forward) -> None:
    text = refusal(Net(lambda net, x: drop(net, x, 0.3)))
    assert "test_random_branches.py" in text
    assert f"in {drop.__name__}" in text
    assert "layerdrop=0.0" in text


def test_what_is_computed_of_a_random_number_is_one() -> None:
    def scaled(net: Any, x: Tensor) -> Tensor:
        return net.first(x) * int((torch.randint(0, 4, ()) + 1) * 2)

    assert "random number" in refusal(Net(scaled))


def test_a_number_below_one_says_nothing_of_a_bound_between() -> None:
    def never(net: Any, x: Tensor) -> Tensor:
        return net.first(x) if torch.rand([]).mul(2) < 1.0 else net.last(x)

    assert "random number" in refusal(Net(never))


@pytest.mark.parametrize("change", [lambda u: u.uniform_(-1, 1), lambda u: u.sub_(0.5), lambda u: u.__setitem__((), 3)])
def test_a_number_that_was_written_to_is_not_known_to_be_uniform(change: Callable[[Tensor], Any]) -> None:
    def changed(net: Any, x: Tensor) -> Tensor:
        drawn = torch.rand(())
        change(drawn)
        return net.first(x) if drawn < 0.0 else net.last(x)

    assert "random number" in refusal(Net(changed))


def test_random_numbers_inside_the_graph_are_no_branches() -> None:
    def mixed(net: Any, x: Tensor) -> Tensor:
        return net.last(torch.where(torch.rand(()) < 2.0, net.first(x), net.last(x)))

    assert_equal_to_eager(Net(mixed), (X,), squares)
