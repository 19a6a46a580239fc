"""`F.gaussian_nll_loss` raises an error where a variance is negative: a branch on data that programs keep as a guard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.capture.equal import assert_equal_to_eager, compiled

X, Y = torch.rand(4, 8), torch.rand(4, 8)


class Gaussian(nn.Module):
    """(mean, variance) per entry."""

    def __init__(self, positive: Callable[[Tensor], Tensor] = torch.exp) -> None:
        super().__init__()
        self.mean, self.variance = nn.Linear(8, 8), nn.Linear(8, 8)
        self.positive = positive

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.positive(self.variance(x))


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda out, y: F.gaussian_nll_loss(out[0], y, out[1]),
    "clamped": lambda out, y: nn.GaussianNLLLoss(full=True, eps=1.0, reduction="sum")(out[0], y, out[1]),
    "per row": lambda out, y: nn.GaussianNLLLoss(reduction="none")(out[0], y, out[1][:, 0]).square().mean(),
    "one per row": lambda out, y: nn.GaussianNLLLoss()(out[0], y, out[1][:, :1]),
    "a number": lambda out, y: F.gaussian_nll_loss(out[0], y, 0.5) + out[1].mean(),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOSSES)
def test_a_gaussian_likelihood_trains_as_in_eager(name: str) -> None:
    assert_equal_to_eager(Gaussian(), (X, Y), LOSSES[name])


def test_an_infinite_variance_is_the_loss_that_it_is_in_eager() -> None:
    model = Gaussian(positive=lambda v: v.exp() * torch.tensor([float("inf")] + [1.0] * 7))
    program = compiled(model, (X, Y), LOSSES["mean"])
    assert program.run([(X, Y)])[0] == LOSSES["mean"](model(X), Y) == float("inf")


def test_a_negative_variance_stops_the_program_at_the_line_of_the_loss() -> None:
    program = compiled(Gaussian(positive=lambda v: v), (X, Y), LOSSES["mean"])
    with pytest.raises(autopar.GuardError, match=r"test_gaussian_nll\.py:\d+.*gaussian_nll_loss"):
        program.run([(X, Y)])


def test_without_guards_a_negative_variance_is_computed_as_a_small_one() -> None:
    program = autopar.compile(
        Gaussian(), autopar.ClusterSpec.local(2), (X, Y), loss_fn=LOSSES["mean"], options=autopar.Options(guards=False)
    )
    assert autopar.verify(program, program.model, (X, Y)).max_error < 1e-9


def test_variances_of_another_shape_are_refused() -> None:
    with pytest.raises(autopar.CaptureError, match=r"test_gaussian_nll\.py.*\(4, 8\) takes no var of \(4, 2\)"):
        compiled(Gaussian(), (X, Y), lambda out, y: F.gaussian_nll_loss(out[0], y, out[1][:, :2]))
