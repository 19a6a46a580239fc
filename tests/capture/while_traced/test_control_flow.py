"""Loops that torch has operators for compute what they compute in eager, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

import autopar
from autopar.capture import capture_program
from tests.capture.equal import Net, assert_equal_to_eager


def squares(out: Tensor) -> Tensor:
    return (out**2).sum()


def scanned(net: Net, x: Tensor) -> Tensor:
    """A running sum that decays, carried over dim 1."""
    h = net.first(x)
    last, each = scan(lambda c, y: (c * 0.5 + y, (c - y).clone()), torch.zeros_like(h[:, 0]), h, dim=1)
    return net.last(each.movedim(0, 1) if each.shape != h.shape else each) + last[:, None]


def looped(net: Net, x: Tensor) -> Tensor:
    i = torch.zeros((), dtype=torch.int64)
    _, y = torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin() * 2), (i, net.first(x)))
    return net.last(y)


@pytest.mark.parametrize("loop", [pytest.param(scanned, marks=pytest.mark.slow), looped], ids=["scanned", "looped"])
def test_a_loop_trains_as_in_eager(loop: object) -> None:
    torch.manual_seed(0)
    assert_equal_to_eager(Net(loop), (torch.randn(4, 8),), squares, seeds=())  # type: ignore[arg-type]


def test_a_condition_of_two_functions_is_refused_at_its_line() -> None:
    model = Net(lambda net, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (net.first(x),)))
    with pytest.raises(autopar.CaptureError, match=r"calls torch\.cond at .*test_control_flow"):
        capture_program(model, (torch.randn(4, 8),))
