"""The gradients that are said to be held are those that a step holds, however it sums them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.proof.measure import measure_peak

SGD = functools.partial(torch.optim.SGD, lr=0.1)
WIDTH = 128


class Shared(nn.Module):
    """Two large parameters whose gradients are one tensor, which neither may write into, and one that has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.c) @ (self.a + self.b)).square().mean()


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("compensated", [False, True])
def test_sums_of_gradients_take_the_bytes_that_are_predicted(compensated: bool, microbatches: int) -> None:
    """A gradient that two parameters share counts once for either, at most."""
    x = torch.randn(8, WIDTH)
    options = autopar.Options(microbatches=microbatches, compensated_sums=compensated)
    program = autopar.compile(Shared(), autopar.ClusterSpec.local(1), (x,), optimizer=SGD, options=options)
    (measured,) = measure_peak(program, (x,))
    assert 0.98 * measured - 256 <= program.predicted.peak_bytes <= 1.02 * measured + 4 * WIDTH**2
