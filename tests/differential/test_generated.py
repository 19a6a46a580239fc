"""Random compositions: layers of every family in a row, a loss, perhaps a term of parameters alone, a number of microbatches, and
a random plan with forced pieces, overlap and recompute."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.passes.search.overlap import overlapping
from autopar.plan import OVERLAPS
from autopar.proof.random_plans import insisting
from tests.differential import layers, losses, states, terms
from tests.differential.cases import BATCH, draw
from tests.differential.eager import STEPS, difference, trained
from tests.differential.modules import W
from tests.differential.suite import OPTIMIZER, TOLERANCE, values_of
from tests.passes.recompute.recomputed import with_random_recompute

LAYERS = {f"{kind}/{name}": f for kind, family in layers.FAMILIES.items() for name, f in family.items()}
MIXING = {f"coupled/{name}": f for name, f in layers.COUPLED.items()}
STATES = {f"state/{name}": f for name, f in states.STATES.items()}


class Row(nn.Module):
    """Layers in a row, each followed by a linear layer that brings what it gives to the common width."""

    def __init__(self, names: list[str], term: str = "") -> None:
        super().__init__()
        self.term = term
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

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        for holder in self.layers:
            h = torch.tanh(holder.first(holder.f(holder, h).reshape(h.shape[0], -1).to(h.dtype))) + h
        out = self.last(h)
        return (out, terms.TERMS[self.term](self)) if self.term else out


@dataclass(frozen=True)
class Combination:
    """layers: names, in a row. term, join: of the loss, beside its samples' terms ("": none). plan: the seed of a random one;
    pieces, overlap: that it insists on; recompute: the share of values that it makes again."""

    layers: tuple[str, ...]
    loss: str
    term: str
    join: str
    microbatches: int
    ranks: int
    plan: int
    pieces: int
    overlap: str
    recompute: float


@st.composite
def combinations(draws: Any) -> Combination:
    mixing = draws(st.integers(0, 9)) == 0
    names = draws(st.lists(st.sampled_from([*LAYERS]), min_size=1, max_size=3))
    names += draws(st.lists(st.sampled_from([*STATES]), max_size=1))
    names += [draws(st.sampled_from([*MIXING]))] if mixing else []
    term = draws(st.sampled_from(["", *terms.TERMS]))
    return Combination(
        tuple(names),
        draws(st.sampled_from([*losses.REGRESSING, *losses.COUPLED])),
        term,
        draws(st.sampled_from([*terms.JOINS])) if term else "",
        draws(st.sampled_from([1, 2, 4, 8])),
        draws(st.sampled_from([1, 2, 4])),
        draws(st.integers(0, 99)),
        draws(st.sampled_from([1, 2, 4])),
        draws(st.sampled_from(OVERLAPS)),
        draws(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
    )


def outcome(one: Combination) -> str:
    """ "equal", or the name of the error by which the program is refused. Raises AssertionError where it differs from eager."""
    torch.manual_seed(one.plan)
    model = Row([*one.layers], one.term).double()
    loss_fn = terms.loss_of(terms.JOINS[one.join]) if one.term else (losses.REGRESSING | losses.COUPLED)[one.loss]
    batches = [(draw(s, BATCH, 6), draw(s + 50, BATCH, 4)) for s in range(STEPS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = autopar.compile(
                copy.deepcopy(model),
                autopar.ClusterSpec.local(one.ranks),
                batches[0],
                loss_fn=loss_fn,
                optimizer=OPTIMIZER,
                options=autopar.Options(microbatches=one.microbatches, pp=1),
            )
        except (autopar.CaptureError, autopar.InputError) as error:
            return type(error).__name__
        except autopar.CoupledError as error:
            return type(error).__name__ if one.microbatches > 1 else f"{error} with one microbatch"
        plan = insisting(overlapping(autopar.random_plan(program, one.plan, pieces=one.pieces), one.overlap))
        program = program.with_plan(with_random_recompute(program, plan, one.plan, one.recompute))
        result = program.run(batches)
    worst = difference(values_of(result), trained(model, batches, loss_fn))
    assert worst <= TOLERANCE, f"{worst:.1e} from eager: {one}"
    return "equal"


@pytest.mark.slow
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(combinations())
def test_a_few_compositions_equal_eager_or_are_refused(one: Combination) -> None:
    assert outcome(one) in ("equal", "CaptureError", "InputError", "CoupledError")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(30))
def test_three_thousand_compositions_equal_eager_or_are_refused(part: int) -> None:
    seen: Counter[str] = Counter()

    @seed(part)
    @settings(
        max_examples=100, deadline=None, derandomize=False, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(combinations())
    def run(one: Combination) -> None:
        seen[outcome(one)] += 1

    run()
    assert seen.keys() <= {"equal", "CaptureError", "InputError", "CoupledError"}, seen
    assert seen["equal"] >= 50, seen
