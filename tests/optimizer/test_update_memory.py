"""The predicted peak holds with whatever surrounds the optimizer: what it counts is what these need."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.runtime.update.update_rule import UpdateRule
from tests.measure import measure_peak
from tests.optimizer.test_optimizers import groups, muon_and_adam
from tests.proof.test_memory_measured import NUMBERS, PLANS, WIDE, assert_kept
from tests.zoo.models import ADAMW
from tests.zoo.programs import compiled_zoo

COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)
ZOO = WIDE[0]
RULES = {
    "clip": UpdateRule(ADAMW, clip_norm=autopar.ClipNorm(0.1)),
    "clip by value": UpdateRule(ADAMW, clip_value=0.1),
    "scaling": UpdateRule(ADAMW, COSINE, autopar.ClipNorm(0.1, float("inf")), loss_scaling=autopar.LossScaling()),
    "compensated": UpdateRule(ADAMW, compensated=True),
    "groups": UpdateRule(groups),
    "adafactor": UpdateRule(torch.optim.Adafactor),
    "foreach": UpdateRule(functools.partial(torch.optim.Adam, foreach=True)),
    "fused": UpdateRule(functools.partial(torch.optim.Adam, fused=True)),
}


def compiled(rule, plan, microbatches):
    return compiled_zoo(ZOO, 2, optimizer=rule, options=replace(PLANS[plan], microbatches=microbatches))


@pytest.mark.few(2)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("rule", "plan"),
    [(r, p) for r in RULES for p in ("dp", "zero1", "zero3", "1f1b") if r != "adafactor" or not p.startswith("zero")],
)
def test_the_peak_is_what_was_predicted(rule, plan, microbatches):
    assert_kept(compiled(RULES[rule], plan, microbatches), ZOO.batch())


@pytest.mark.few(2)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("plan", ["dp", "1f1b"])
def test_two_optimizers_keep_what_either_keeps(plan, microbatches):
    """Muon's scratch depends on a matrix' shape and is taken from the largest one: resting bytes are the claim."""
    program = compiled(muon_and_adam, plan, microbatches)
    state = [s.memory.resting["optimizer"] for s in program.account.stages]
    matrices = [
        sum(p.type.nbytes * (1 if len(p.type.shape) == 2 else 2) for p in s.parameters.values()) for s in program.stages
    ]
    assert state == matrices
    for rank, measured in enumerate(measure_peak(program, ZOO.batch())):
        assert program.account.peaks[program.group_of(rank)] >= 0.98 * measured - NUMBERS
