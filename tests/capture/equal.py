"""The one question of these tests: does the compiled program compute what the eager model computes?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar

SGD = functools.partial(torch.optim.SGD, lr=0.1)
TOLERANCE = 1e-9


class Net(nn.Module):
    """Two linear layers around whatever a test puts between them: forward(x) = f(self, x)."""

    def __init__(self, f: Callable[..., Any], width: int = 8, **modules: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        for name, module in modules.items():
            setattr(self, name, module)
        self.f = f

    def forward(self, *inputs: Tensor) -> Any:
        return self.f(self, *inputs)


def square(*tensors: Tensor) -> Tensor:
    """A loss that every element of every tensor has a say in."""
    return sum(((t * torch.arange(1, t.numel() + 1).view(t.shape) / t.numel()) ** 2).sum() for t in tensors)  # type: ignore[return-value]


def compiled(
    model: nn.Module, batch: Any, loss_fn: Any = None, *, ranks: int = 2, training: bool = True
) -> autopar.Program:
    options = autopar.Options(pp=1)  # what was captured is what stages are cut from: no need to look for them
    optimizer = SGD if training else None
    cluster = autopar.ClusterSpec.local(ranks)
    return autopar.compile(model, cluster, batch, loss_fn=loss_fn, optimizer=optimizer, options=options)


def assert_equal_to_eager(
    model: nn.Module,
    batch: Any,
    loss_fn: Any = None,
    *,
    ranks: int = 2,
    steps: int = 2,
    training: bool = True,
    seeds: tuple[int, ...] = (0,),
) -> autopar.Program:
    """The solver's plan and random plans agree with the eager model on loss, gradients, parameters, buffers, outputs."""
    program = compiled(model, batch, loss_fn, ranks=ranks, training=training)
    assert program.training == training
    for plan in (None, *(autopar.random_plan(program, seed) for seed in seeds)):
        one = program if plan is None else program.with_plan(plan)
        result = autopar.verify(one, model, batch, steps=steps)
        worst = sorted(result.errors.items(), key=lambda item: -item[1])[:5]
        assert result.ok, f"{worst}\n{one.report()}"
        assert result.max_error <= TOLERANCE, worst
    return program
