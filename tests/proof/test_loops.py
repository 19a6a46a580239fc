"""`verify` of models with loops that torch has operators for: what their functions compute is promoted, and trains."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import autopar

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Looped(nn.Module):
    """A loop between two layers, with a third that it may use."""

    def __init__(self, loop: Callable[[Looped, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inside, self.last, self.loop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), loop

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.loop(self, self.first(x)))


def thrice(body: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    i = torch.zeros((), dtype=torch.int64)
    _, y = torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, body(y)), (i, y))
    return y


def with_a_layer(net: Looped, x: Tensor) -> Tensor:
    return thrice(lambda y: net.inside(y).tanh(), x)


def with_a_cast(net: Looped, x: Tensor) -> Tensor:
    return thrice(lambda y: (net.inside(y).bfloat16() * 2).to(y.dtype), x)


def with_a_constant(_: Looped, x: Tensor) -> Tensor:
    return thrice(lambda y: y * torch.tensor(0.3, dtype=y.dtype), x)


def with_values_from_outside(_: Looped, x: Tensor) -> Tensor:
    return thrice(lambda y: y + x, torch.zeros(8, 8, dtype=x.dtype))


def scanned(net: Looped, x: Tensor) -> Tensor:
    return scan(lambda c, y: (c * 0.5 + net.inside(y[None])[0], c * 2), torch.zeros_like(x[0]), x)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "loop",
    [
        with_a_layer,
        with_a_cast,
        with_a_constant,
        pytest.param(with_values_from_outside, marks=pytest.mark.slow),
        pytest.param(scanned, marks=pytest.mark.slow),
    ],
)
def test_a_model_with_a_loop_trains_as_in_eager(loop: Callable[[Looped, Tensor], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = Looped(loop).to(dtype), (torch.randn(8, 8, dtype=dtype), torch.randn(8, 4, dtype=dtype))
    program = autopar.compile(model, autopar.ClusterSpec.local(2), batch, loss_fn=F.mse_loss, optimizer=SGD)
    assert autopar.verify(program, model, batch).ok


def test_a_model_with_a_loop_is_verified_in_mixed_precision() -> None:
    torch.manual_seed(0)
    model, batch = Looped(with_a_layer), (torch.randn(8, 8), torch.randn(8, 4))
    options = autopar.Options(precision="bf16")
    cluster = autopar.ClusterSpec.local(2)
    program = autopar.compile(model, cluster, batch, loss_fn=F.mse_loss, optimizer=SGD, options=options)
    assert autopar.verify(program, model, batch).ok
