"""Parameters whose gradient is zero whatever the batch is: a call that has nothing to keep for W gives it in W all the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.differential.eager import LR, MOMENTUM, STEPS, difference, trained


class Scaled(nn.Module):
    """Two layers, and a factor that is a step function of a parameter."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.w = nn.Parameter(torch.linspace(-1.3, 1.4, 6))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.first(x).tanh()).mean(1) * self.step(self.w).mean()).pow(2).mean()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        {"pp": 2, "microbatches": 2, "schedule": "zb-h1"},
        {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
    ],
    ids=["microbatches", "W apart", "together"],
)
@pytest.mark.parametrize("step", [torch.ceil, torch.floor, torch.sign], ids=["ceil", "floor", "sign"])
def test_constant_gradients_reach_the_store(step: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Scaled(step).double()
    batches = [(torch.randn(8, 6, dtype=torch.float64),) for _ in range(STEPS)]
    program = autopar.compile(
        copy.deepcopy(model),
        autopar.ClusterSpec.local(2),
        batches[0],
        optimizer=functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM),
        options=autopar.Options(**options),
    )
    result = program.run(batches)
    ours = {f"loss {k}": loss.reshape(()).double() for k, loss in enumerate(result.losses)} | result.state
    assert difference(ours, trained(model, batches, None)) <= 1e-9
