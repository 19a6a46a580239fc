"""`torch.cov` and `torch.corrcoef` ask a tensor of their own for its value, which is no branch on data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.while_traced.rewritten import rewritten
from tests.capture.equal import assert_equal_to_eager

X, Y = torch.rand(8, 6), torch.rand(8, 6)


class Aligned(nn.Module):
    """A linear layer whose results on two batches are to have the same statistics."""

    def __init__(self, statistics: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.statistics = nn.Linear(6, 4), statistics

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.statistics(self.layer(x).T) - self.statistics(self.layer(2 * y).T)).square().sum()


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "cov": torch.cov,
    "method, correction": lambda x: x.cov(correction=0),
    "one row": lambda x: torch.cov(x[0]),
    "corrcoef": torch.corrcoef,
}


@pytest.mark.parametrize("name", STATISTICS)
def test_losses_of_covariances_train_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    assert_equal_to_eager(Aligned(STATISTICS[name]), (X, Y))


@pytest.mark.parametrize("function", [torch.cov, torch.corrcoef])
@pytest.mark.parametrize("shape", [(4, 7), (1, 7), (7,), (), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_they_compute_what_torch_does(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=dtype)
    other, args, kwargs = rewritten(function, (x,), {}, lambda condition, truth: None)
    assert other is not function
    torch.testing.assert_close(other(*args, **kwargs), function(x), equal_nan=True)
