"""Parameters that rest in runs of elements: any sizes over any ranks train as one device does, and go from run to run.

What divides by no number of ranks here: weights of 23 × 31, and biases of 31 and 23.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.test_other_ranks import NOTED, check_run, train_on

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
DATA = """import torch

def batches():
    for n in range(50):
        draw = torch.Generator().manual_seed(n)
        yield tuple(torch.randn(60, 23, generator=draw, dtype=torch.float64) for _ in range(2))
"""


class Odd(nn.Module):
    """Two products of odd sizes, the second one's weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.back = nn.Linear(23, 31), nn.LayerNorm(31), nn.Linear(31, 23)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.back(self.norm(torch.tanh(self.wide(x))))
        return (x @ self.back.weight - self.wide(y)).square().mean()


def compiled(ranks: int, optimizer: Any = ADAMW, **options: Any) -> autopar.ParallelProgram:
    torch.manual_seed(0)
    batch = tuple(torch.randn(60, 23, dtype=torch.float64) for _ in range(2))
    cluster = autopar.ClusterSpec.local(ranks)
    return autopar.compile(Odd().double(), cluster, batch, optimizer=optimizer, options=autopar.Options(**options))


def equal_to_eager(program: autopar.ParallelProgram) -> None:
    torch.manual_seed(0)
    result = autopar.verify(program, Odd().double(), tuple(torch.randn(60, 23) for _ in range(2)))
    assert result.ok
    assert result.max_error <= 1e-9


def in_runs(program: autopar.ParallelProgram) -> set[str]:
    return {n for stage in program.plan.stages for n, p in stage.parameters.items() if p.optimizer.run}


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_what_divides_by_no_number_of_ranks_is_shared_by_all(ranks: int, strategy: str) -> None:
    microbatches = 60 // ranks % 2 + 1 if 60 % ranks == 0 else 1
    if 60 % ranks:
        pytest.skip("the batch does not divide")
    program = compiled(ranks, strategy=strategy, microbatches=microbatches)
    assert len(in_runs(program)) == 6
    equal_to_eager(program)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "noted.py").write_text(NOTED)
    (folder / "data.py").write_text(DATA)
    return folder


@pytest.mark.timeout(300)
def test_a_run_goes_on_with_other_runs_of_elements(home: Path, tmp_path: Path) -> None:
    program = compiled(4, strategy="zero3")
    out = program.save(tmp_path / "out", also=[3, 2])
    assert in_runs(program)
    train_on(out, home, tmp_path, [(3, 4), (4, 7), (2, 9)])
    check_run(program, home, tmp_path / "run", tmp_path / "losses", 9)
