"""The gradients that are said to be held are those that a step holds, however it sums and changes them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.measure import measure_peak

SGD = functools.partial(torch.optim.SGD, lr=0.1)
WIDTH = 128
CHANGED: dict[str, dict[str, Any]] = {
    "as they are": {},
    "clipped by norm": {"clip_grad_norm": 0.1},
    "clipped by value": {"clip_grad_value": 0.1},
    "scaled": {"loss_scaling": True},
    "scaled and clipped": {"clip_grad_norm": autopar.ClipNorm(0.1, float("inf")), "loss_scaling": True},
}


class Shared(nn.Module):
    """Two large parameters whose gradients are one tensor, which neither may write into, and one that has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.c) @ (self.a + self.b)).square().mean()


class Apart(Shared):
    """Between the two that share a gradient comes backward of another layer."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ (self.c + self.a)) @ (self.a + self.b)).square().mean()


class Parts(Shared):
    """The gradients of three parameters are parts of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.cat([self.a, self.b, self.c], 1)).square().mean()


class Sums(Shared):
    """Gradients that are one number everywhere, which no tensor of their size holds until they are changed."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.sum() + self.b.mean() + self.c.sum()) * x.mean()


def assert_kept(model: nn.Module, changed: str, **options: Any) -> None:
    x = torch.randn(8, WIDTH)
    cluster, settings = autopar.ClusterSpec.local(1), autopar.Options(**options)
    program = autopar.compile(model, cluster, (x,), optimizer=SGD, options=settings, **CHANGED[changed])
    for rank, measured in enumerate(measure_peak(program, (x,))):
        predicted = program.account.peaks[program.group_of(rank)]
        assert 0.98 * measured - 256 <= predicted <= 1.05 * measured + 256, (rank, predicted, measured)


@pytest.mark.few(4)
@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("compensated", [False, True])
def test_gradients_take_the_bytes_that_are_predicted(compensated: bool, microbatches: int, changed: str) -> None:
    """A gradient that two parameters share counts once, until either needs one that it may write into."""
    assert_kept(Shared(), changed, microbatches=microbatches, compensated_sums=compensated)


@pytest.mark.few(2)
@pytest.mark.parametrize("changed", ["as they are", "scaled"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_parameter_that_contributes_twice_shares_one_gradient_with_another(microbatches: int, changed: str) -> None:
    assert_kept(Apart(), changed, microbatches=microbatches)


@pytest.mark.few(4)
@pytest.mark.parametrize("changed", ["as they are", "scaled"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("model", [Parts, Sums])
def test_gradients_that_are_views_keep_what_they_look_at(model: type[Shared], microbatches: int, changed: str) -> None:
    assert_kept(model(), changed, microbatches=microbatches)
