"""Batch norm without a momentum: its running statistics are means over all batches, counted by a buffer that moves."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import autopar

SHAPES = {nn.BatchNorm1d: (8, 6), nn.BatchNorm2d: (8, 6, 3, 3), nn.BatchNorm3d: (8, 6, 2, 2, 2)}
STEPS = 4


class Own(nn.BatchNorm1d):
    """A class of the user's that calls torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.rand(6)), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * self.scale.view(1, 6, *[1] * (x.ndim - 2))).pow(2).sin().mean()


def equal_to_eager(norm: nn.Module, ranks: int, parts: int = 1, **options: Any) -> None:
    """Losses, parameters and buffers after some steps. parts: microbatches, each a batch of its own."""
    torch.manual_seed(0)
    model = Net(norm).double()
    model.norm.num_batches_tracked.fill_(3)  # type: ignore[operator, union-attr]
    shape = SHAPES.get(type(norm), (8, 6))
    batches = [torch.randn(shape, dtype=torch.float64) + step for step in range(STEPS)]
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(ranks),
        (batches[0],),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        options=autopar.Options(**options),
    )
    run = program.run([(batch,) for batch in batches])
    eager = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(eager.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(torch.zeros((), dtype=torch.float64))
        for piece in batch.chunk(parts):
            loss = eager(piece) / parts
            loss.backward()
            losses[-1] += loss.detach()
        optimizer.step()
    torch.testing.assert_close(list(run.losses), losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(run.state_dict(), dict(eager.state_dict()), rtol=1e-9, atol=1e-12)
    assert int(run.state_dict()["norm.num_batches_tracked"]) == 3 + STEPS * parts


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [*SHAPES, Own], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("options", [{"mesh": {"dp": 2}}, {"mesh": {"dp": 2, "tp": 2}}, {"pp": 2, "mesh": {"dp": 1}}])
def test_running_means_are_those_of_eager(kind: type[nn.Module], options: dict[str, Any]) -> None:
    ranks = 4 if "tp" in options["mesh"] else 2
    equal_to_eager(kind(6, momentum=None), ranks, **options)  # type: ignore[call-arg]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"mesh": {"dp": 2}}, {"pp": 2, "mesh": {"dp": 1}}])
def test_microbatches_of_their_own_count_each(options: dict[str, Any]) -> None:
    equal_to_eager(nn.BatchNorm1d(6, momentum=None), 2, 2, coupled="per-microbatch", microbatches=2, **options)


def test_microbatches_of_one_batch_are_refused_as_with_a_momentum() -> None:
    with pytest.raises(autopar.CoupledError, match="batch_norm"):
        equal_to_eager(nn.BatchNorm1d(6, momentum=None), 2, microbatches=2)


def test_in_eval_mode_the_statistics_are_given() -> None:
    norm = nn.BatchNorm1d(6, momentum=None).double().eval()
    norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
    x = torch.randn(8, 6, dtype=torch.float64)
    (out,) = autopar.compile(norm, autopar.ClusterSpec.local(2), (x,)).run([(x,)])
    torch.testing.assert_close(out, norm(x))
