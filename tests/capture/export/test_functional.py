"""Which steps are made functional: those that write, not those that make constants out of numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export.functional import functional, traced_step


class Computes(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def written_constant(x: Tensor) -> Tensor:
    total = torch.tensor([0.5, 1.5, 2.5])
    total += x.sum(0)
    return total * x


COMPUTED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a constant": (lambda x: x * torch.tensor([1.0, -2.0, 3.0]), False),
    "an empty constant": (lambda x: torch.cat([torch.tensor([]), x], 1), False),
    "a constant that is written": (written_constant, True),
    "a detached sum": (lambda x: x * x.sum(0).detach_(), True),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_step_is_made_functional_where_it_writes_and_computes_the_same(name: str) -> None:
    f, writes = COMPUTED[name]
    x = torch.randn(4, 3)
    traced, has_writes = traced_step(Computes(f), [x])
    assert has_writes == writes
    made = functional(traced, has_writes)
    assert not any("detach_" in str(node.target) for node in made.graph.nodes)
    assert torch.equal(made.module()(x), f(x))
