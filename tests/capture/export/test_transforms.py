"""Functions that forward transforms compute what they compute in eager, gradients included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar.capture import capture_program
from tests.capture.equal import Net, assert_equal_to_eager

Case = Callable[[Net, Tensor], Tensor]


def rows(net: Net, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: F.layer_norm(net.last(torch.tanh(net.first(row))), (8,)))(x)


def heads(net: Net, x: Tensor) -> Tensor:
    return torch.vmap(lambda w, y: (y @ w).softmax(-1), in_dims=(0, None))(net.first.weight.view(2, 8, 4), x)


def nested(net: Net, x: Tensor) -> Tensor:
    """A square of all pairs, as masks of attention are made."""
    pairs = torch.vmap(torch.vmap(lambda a, b: (a * b).sum(), in_dims=(None, 0)), in_dims=(0, None))
    return torch.vmap(lambda row: pairs(row.view(4, 2), row.view(4, 2)))(net.first(x)) + net.last(x).sum()


def slope(net: Net, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda y: torch.tanh(net.first(y)), (x,), (torch.ones_like(x),))[1]


def moved(net: Net, x: Tensor) -> Tensor:
    """Batch dims that come out in other places."""
    columns = torch.vmap(lambda row: net.first(row) * 2, out_dims=1)(x)
    products = torch.vmap(torch.vmap(lambda a, b: a * b, in_dims=(1, 1), out_dims=1))
    pairs = x.view(-1, 2, 4)
    return net.last(columns.mT) + products(pairs, pairs).reshape(x.shape)


def twice(net: Net, x: Tensor) -> Tensor:
    """Two regions one after the other, and ops between."""
    h = torch.vmap(net.first)(x).relu()
    return torch.vmap(net.last)(h) + h


CASES: list[Case] = [rows, heads, nested, slope, moved, twice]
QUICK = (nested, slope, moved)


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_a_transformed_function_is_the_batched_ops_that_it_comes_to(case: Case) -> None:
    torch.manual_seed(0)
    assert_equal_to_eager(Net(case), (torch.randn(4, 8),), lambda out: (out**2).sum())


def test_a_gradient_inside_forward_is_refused_by_name() -> None:
    model = Net(lambda net, x: torch.func.grad(lambda y: net.first(y).tanh().sum())(x))
    with pytest.raises(autopar.CaptureError, match=r"torch\.func\.grad"):
        capture_program(model, (torch.randn(4, 8),))


def test_a_jacobian_inside_forward_is_refused_as_a_transform_and_not_for_what_torch_writes_to() -> None:
    model = Net(lambda net, x: torch.vmap(torch.func.jacfwd(lambda y: net.first(y).tanh()))(x))
    with pytest.raises(autopar.CaptureError, match=r"transforms a function .*jvp"):
        capture_program(model, (torch.randn(4, 8),))


def test_a_write_to_a_tensor_of_ones_own_is_refused_inside_a_transform_too() -> None:
    kept = torch.zeros(4, 8)
    model = Net(lambda net, x: net.first(torch.vmap(lambda row, own: own.add_(row))(x, kept)))
    with pytest.raises(autopar.CaptureError, match="plain tensor that it keeps from step to step"):
        capture_program(model, (torch.randn(4, 8),))
