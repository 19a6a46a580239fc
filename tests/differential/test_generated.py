"""Random compositions: layers of every family in a row, a loss, a number of microbatches and a random plan."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from tests.differential import layers, losses, states
from tests.differential.cases import BATCH, draw
from tests.differential.eager import STEPS, difference, trained
from tests.differential.modules import W
from tests.differential.suite import OPTIMIZER, TOLERANCE, values_of

LAYERS = {f"{kind}/{name}": f for kind, family in layers.FAMILIES.items() for name, f in family.items()}
MIXING = {f"coupled/{name}": f for name, f in layers.COUPLED.items()}
STATES = {f"state/{name}": f for name, f in states.STATES.items()}


class Row(nn.Module):
    """Layers in a row, each followed by a linear layer that brings what it gives to the common width."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.first = nn.Linear(6, W)
        self.layers = nn.ModuleList()
        x = draw(0, BATCH, W).float()
        for name in names:
            f = (LAYERS | MIXING | STATES)[name]
            holder = layers.Between(f, W, **layers.used(f)).float()
            out = f(holder, x.clone()).reshape(BATCH, -1).float().detach()
            holder.first = nn.Linear(out.shape[1], W)
            self.layers.append(holder)
        self.last = nn.Linear(W, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for holder in self.layers:
            h = torch.tanh(holder.first(holder.f(holder, h).reshape(h.shape[0], -1).to(h.dtype))) + h
        return self.last(h)


@st.composite
def models(draws: Any) -> tuple[list[str], str, int, int, int]:
    """(layers, loss, microbatches, ranks, seed of the plan)."""
    mixing = draws(st.integers(0, 9)) == 0
    names = draws(st.lists(st.sampled_from([*LAYERS]), min_size=1, max_size=3))
    names += draws(st.lists(st.sampled_from([*STATES]), max_size=1))
    names += [draws(st.sampled_from([*MIXING]))] if mixing else []
    loss = draws(st.sampled_from([*losses.REGRESSING, *losses.COUPLED]))
    return (
        names,
        loss,
        draws(st.sampled_from([1, 2, 4, 8])),
        draws(st.sampled_from([1, 2, 4])),
        draws(st.integers(0, 99)),
    )


def check(names: list[str], loss: str, microbatches: int, ranks: int, plan_seed: int) -> None:
    """The program equals eager, or microbatches of it are refused."""
    torch.manual_seed(plan_seed)
    model = Row(names).double()
    loss_fn = (losses.REGRESSING | losses.COUPLED)[loss]
    batches = [(draw(s, BATCH, 6), draw(s + 50, BATCH, 4)) for s in range(STEPS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = autopar.compile(
                copy.deepcopy(model),
                autopar.ClusterSpec.local(ranks),
                batches[0],
                loss_fn=loss_fn,
                optimizer=OPTIMIZER,
                options=autopar.Options(microbatches=microbatches, pp=1),
            )
            program = program.with_plan(autopar.random_plan(program, plan_seed))
        except autopar.CoupledError:
            assert microbatches > 1
            return
        except (autopar.CaptureError, autopar.InputError):
            return
        result = program.run(batches)
    assert difference(values_of(result), trained(model, batches, loss_fn)) <= TOLERANCE


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_a_few_compositions_equal_eager_or_are_refused(row: tuple[list[str], str, int, int, int]) -> None:
    check(*row)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_compositions_equal_eager_or_are_refused(part: int) -> None:
    @seed(part)
    @settings(
        max_examples=100, deadline=None, derandomize=False, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(models())
    def run(row: tuple[list[str], str, int, int, int]) -> None:
        check(*row)

    run()
