"""Many layers of torch in a container are blocks, each traced once where they compute alike; few, or such as differ, are not."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.templates.fold import MANY_LAYERS

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Looped(nn.Module):
    """Layers that a loop calls, with a function between them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(model: nn.Module, **options: object) -> autopar.Program:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    cluster, chosen = autopar.ClusterSpec.local(2), autopar.Options(**options)  # type: ignore[arg-type]
    return autopar.compile(model, cluster, batch, loss_fn=F.mse_loss, optimizer=SGD, options=chosen)


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [Looped(MANY_LAYERS), nn.Sequential(*(nn.Linear(8, 8) for _ in range(MANY_LAYERS)))])
def test_many_layers_alike_are_traced_once(model: nn.Module) -> None:
    program = compiled(model)
    assert len(program.ir.calls) >= MANY_LAYERS
    assert len(program.ir.templates) <= 5


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"pp": 2}, {"microbatches": 2}])
def test_they_equal_eager(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    program = compiled(model := Looped(MANY_LAYERS), **options)
    assert autopar.verify(program, model, program.request.inputs).ok


def test_few_layers_and_layers_that_differ_are_no_blocks() -> None:
    widths = [8, *range(9, 9 + MANY_LAYERS), 8]
    unequal = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    assert len(compiled(unequal).ir.calls) < MANY_LAYERS
    assert len(compiled(Looped(MANY_LAYERS // 2)).ir.calls) < MANY_LAYERS // 2
